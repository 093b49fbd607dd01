/*
 * qemu_count.c - a plugin for qemu's user mode. It counts the instructions that a program executes, and prints the
 * number on stderr at the end. This file declares the parts of qemu's plugin interface (version 1) that it uses.
 *
 * cc -O2 -shared -fPIC tools/qemu_count.c -o qemu_count.so
 * qemu-aarch64 -plugin ./qemu_count.so program
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define EXPORTED __attribute__((visibility("default")))
enum { ADD = 0 }; /* QEMU_PLUGIN_INLINE_ADD_U64 */

struct qemu_plugin_tb;
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*f)(uint64_t id, struct qemu_plugin_tb *tb));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, int op, void *p, uint64_t x);
void qemu_plugin_register_atexit_cb(uint64_t id, void (*f)(uint64_t id, void *user), void *user);

EXPORTED int qemu_plugin_version = 1;
EXPORTED int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv);

static uint64_t count;

/* Called when qemu translates a block of instructions. */
static void on_translation(uint64_t id, struct qemu_plugin_tb *tb) {
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, ADD, &count, qemu_plugin_tb_n_insns(tb));
}

static void on_exit_print(uint64_t id, void *user) {
    (void)id;
    (void)user;
    fprintf(stderr, "%llu\n", (unsigned long long)count);
}

int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv) {
    (void)info;
    (void)argc;
    (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
    qemu_plugin_register_atexit_cb(id, on_exit_print, NULL);
    return 0;
}
