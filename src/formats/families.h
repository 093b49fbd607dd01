/*
 * formats/families.h - families by their bits (tkvi_family.part), and where their states are in memory.
 *
 * The states of a layer are one piece of memory, one family after another in the order of their bits. A family has the
 * part of the layer, then those of its heads.
 */
#ifndef TKVI_FORMATS_FAMILIES_H
#define TKVI_FORMATS_FAMILIES_H

#include "formats/table.h"

/* The family with this bit. There must be one. */
static const tkvi_family *tkvi_family_of(int part) {
    int f = 0;
    while (tkvi_formats[f].family->part != part) f++;
    return tkvi_formats[f].family;
}

/* The first family of `parts` behind `f`; f NULL: the first of all. NULL: there are no more. */
static const tkvi_family *tkvi_next_family(int parts, const tkvi_family *f) {
    int part = f ? 2 * f->part : 2;
    while (part <= parts && !(parts & part)) part *= 2;
    return part <= parts ? tkvi_family_of(part) : NULL;
}

/* Bytes of the states of all families of `parts` in one layer. */
static size_t tkvi_states_bytes(const tkv_format_options *o, const tkvi_geometry *g, int parts) {
    const tkvi_family *f = NULL;
    size_t bytes = 0;
    while ((f = tkvi_next_family(parts, f)) != NULL)
        bytes += tkvi_align_up(f->layer_bytes) + tkvi_align_up((size_t)g->n_kv_heads * f->head_bytes(o, g));
    return bytes;
}

/* The state of a family for a layer. states: of all families of `parts` in this layer; NULL: there is none yet. rope:
 * that of the layer, or NULL. */
static tkvi_family_state tkvi_state_of(const tkv_format_options *o, const tkvi_geometry *g,
                                       const tkvi_rope *rope, uint8_t *states, int parts,
                                       const tkvi_family *f) {
    tkvi_family_state state;
    state.options = o;
    state.geometry = g;
    state.rope = tkvi_undone_rope(f, o, rope);
    state.layer = state.heads = NULL;
    if (!states) return state;
    state.layer = states + tkvi_states_bytes(o, g, parts & (f->part - 1));
    state.heads = (uint8_t *)state.layer + tkvi_align_up(f->layer_bytes);
    return state;
}

/* The part of one head. */
static void *tkvi_head_state(const tkvi_family_state *state, const tkvi_family *f, int head) {
    return (uint8_t *)state->heads + (size_t)head * f->head_bytes(state->options, state->geometry);
}

#endif /* TKVI_FORMATS_FAMILIES_H */
