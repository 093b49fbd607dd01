/*
 * core/parts.h - a call that threads of the caller run as parts, each with its own number. The parts share a workspace,
 * count in its head, and the last one to end does what needs an order.
 */
#ifndef TKVI_CORE_PARTS_H
#define TKVI_CORE_PARTS_H

#include "core/base.h"

#define TKVI_MAX_PARTS_OF_CALL 65536
#define TKVI_PARTS_CLEAR 128 /* bytes that the caller clears: room to align the head, and the head */

/* At the front of the caller's workspace, all 0 between calls. */
typedef struct tkvi_parts {
    int n_ended; /* parts that have ended */
    int failed;  /* of attention, as tkvi_call.failed */
    int n_begun; /* of an append: parts that have begun to encode */
    int n_taken; /* of an append: heads of blocks that parts have taken */
} tkvi_parts;

/* 1 if the arguments of a part are possible. */
static int tkvi_is_part(int part, int n_parts, const void *workspace) {
    return n_parts >= 1 && n_parts <= TKVI_MAX_PARTS_OF_CALL && part >= 0 && part < n_parts && workspace;
}

/* The head of a workspace, aligned. */
static tkvi_parts *tkvi_parts_head(void *workspace) {
    return (tkvi_parts *)(void *)((uint8_t *)workspace + (64 - (uintptr_t)workspace % 64) % 64);
}

/* What follows the head, aligned. */
static uint8_t *tkvi_parts_data(tkvi_parts *head) { return (uint8_t *)head + tkvi_align_up(sizeof *head); }

/* Adds one to a count of the head, and returns the new count. A part that reads it sees what those before wrote. */
static int tkvi_count_up(int *count) {
#if defined(__GNUC__) || defined(__clang__)
    return __atomic_add_fetch(count, 1, __ATOMIC_ACQ_REL);
#else
    return ++*count;
#endif
}

/* Counts a part that has ended. Returns 1 for the last one, which sees what the others have written. */
static int tkvi_is_last_part(tkvi_parts *head, int n_parts) {
    return tkvi_count_up(&head->n_ended) == n_parts;
}

/* Ends a call: clears the head, at any alignment of the workspace. */
static void tkvi_parts_end(void *workspace) { memset(workspace, 0, TKVI_PARTS_CLEAR); }

#endif /* TKVI_CORE_PARTS_H */
