/*
 * qemu_count.c - a plugin for qemu's user mode: counts the instructions that a program executes, prints the
 * number on stderr at its end. What it needs of qemu's plugin interface (version 1) is declared here.
 *
 * cc -O2 -shared -fPIC tools/qemu_count.c -o qemu_count.so
 * qemu-aarch64 -plugin ./qemu_count.so program
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define SHOWN __attribute__((visibility("default")))
enum { ADD = 0 }; /* QEMU_PLUGIN_INLINE_ADD_U64 */

struct qemu_plugin_tb;
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*f)(uint64_t id, struct qemu_plugin_tb *tb));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, int op, void *p, uint64_t x);
void qemu_plugin_register_atexit_cb(uint64_t id, void (*f)(uint64_t id, void *user), void *user);

SHOWN int qemu_plugin_version = 1;
SHOWN int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv);

static uint64_t count;

static void translated(uint64_t id,
                       struct qemu_plugin_tb *tb) { /* a block of instructions without branches */
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, ADD, &count, qemu_plugin_tb_n_insns(tb));
}

static void ended(uint64_t id, void *user) {
    (void)id;
    (void)user;
    fprintf(stderr, "%llu\n", (unsigned long long)count);
}

int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv) {
    (void)info;
    (void)argc;
    (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
