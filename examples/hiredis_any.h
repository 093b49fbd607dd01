/*
 * hiredis_any.h - what differs between hiredis 0.14 and hiredis 1.0 or later, for store_valkey.c.
 */
#ifndef HIREDIS_ANY_H
#define HIREDIS_ANY_H

#include <hiredis/hiredis.h>

/* >>the reader. reply_item: the type of the item of a reply that the reader reads now; 0: none. */
#if HIREDIS_MAJOR < 1
typedef int list_length;
static inline int reply_item(const redisReader *r) { return r->ridx < 0 ? 0 : r->rstack[r->ridx].type; }
#else
typedef size_t list_length;
static inline int reply_item(const redisReader *r) { return r->ridx < 0 ? 0 : r->task[r->ridx]->type; }
#endif

#endif /* HIREDIS_ANY_H */
