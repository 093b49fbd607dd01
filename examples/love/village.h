/*
 * village.h - what a frame of the village shows, and what a player can do in it. village.c is behind it. Its text
 * without the lines that begin with # is also the declaration for LuaJIT (main.lua).
 *
 *     village *v = village_create(&options, reason, sizeof reason);
 *     each frame: const village_view *view = village_frame(v, 1000);   draw it; village_key(v, "return") for a key
 *     village_destroy(v);
 *
 * One thread calls these functions: that of the frames. The model runs in a thread of the library's.
 */
#ifndef VILLAGE_H
#define VILLAGE_H

#include <stddef.h>

enum {
    VILLAGE_PEOPLE = 100,
    VILLAGE_TREES = 60,
    VILLAGE_LINES = 8,
    VILLAGE_TEXT = 240,
    VILLAGE_FRAMES = 240
};
enum { VILLAGE_AWAY, VILLAGE_READING, VILLAGE_SILENT, VILLAGE_LISTENING, VILLAGE_SPEAKING }; /* of a person */
enum { VILLAGE_YOU, VILLAGE_ANSWER, VILLAGE_OTHER, VILLAGE_NOTE, VILLAGE_TAKEN_BACK };       /* of a line */

typedef struct village_line {
    int kind;
    char text[VILLAGE_TEXT]; /* ASCII, with line ends */
} village_line;

typedef struct village_person {
    char name[24];
    float x, y;    /* place of the house, 0 to 1 */
    int family;    /* 0 to 4 */
    int road_to;   /* the next person towards the square; -1: the square */
    int state;     /* VILLAGE_SILENT ... */
    int n_shared;  /* tokens of the prompt, whose bytes all people share */
    int n_own[3];  /* tokens of its own: hot, warm, archive */
    int own_bytes; /* of its own blocks */
    int shared_bytes;
    int fp16_bytes; /* what all its tokens would take in FP16 */
    int file_bytes; /* of its saved file; 0: none */
    char words[32]; /* the newest words that it says */
} village_person;

typedef struct village_view {
    village_person person[VILLAGE_PEOPLE]; /* from the back to the front of the picture */
    float tree[VILLAGE_TREES][2];
    int selected;
    village_line line[VILLAGE_LINES]; /* of the selected person, oldest first */
    int n_lines;
    int is_typing;
    char typed[96];
    char message[200];
    int n_read, n_refused; /* people whose past has been read; for whose past the budget has no room */
    double budget, used, fp16,
        unshared;        /* bytes: the limit, the cache, FP16, the blocks if nothing were shared */
    int level, n_levels; /* of the budget's ladder: how far old tokens are compressed, 0 to n_levels - 1 */
    double tokens_per_second;       /* of the model */
    float frame_ms[VILLAGE_FRAMES]; /* a ring: frame `n_frames` is at n_frames % VILLAGE_FRAMES */
    float cache_ms
        [VILLAGE_FRAMES]; /* processor time of the frame's work on the cache, waits for the lock included */
    int n_frames;
    float cache_p99_ms; /* of the ring */
    char shot[200];     /* not "": save the picture of this frame there */
    int quits;          /* 1: the player has had enough */
} village_view;

typedef struct village_options { /* fill with zeros first */
    const char *model;           /* a .gguf file; required */
    const char *folder;          /* for saved people; NULL: the present one */
    const char *script;          /* NULL, or a file with keys to play (play.h) */
    const char *log;             /* NULL, or a file for the times of frames and what happened */
    int is_silent;               /* 1: people do not talk with each other */
} village_options;

typedef struct village village;

/* Loads the model, makes tables for the tiers, reads the prompt, and starts the thread. Takes about a second.
 * Returns NULL with a sentence in reason[size] after an error. */
village *village_create(const village_options *options, char *reason, size_t size);
void village_destroy(village *v);
/* Runs one frame: scripted keys, work on the cache for at most limit_us microseconds, and the view to draw. If the
 * model's thread holds the cache for longer than that, the view is that of the frame before. */
const village_view *village_frame(village *v, int limit_us);
/* Handles a key: left, right, up, down, return, backspace, escape, tab, or a letter of village_help. */
void village_key(village *v, const char *key);
void village_type(village *v, const char *text); /* adds letters to the question that is typed */
void village_pick(village *v, float x, float y); /* selects the person whose house is nearest */
const char *village_help(void);                  /* the keys, in one line */

#endif /* VILLAGE_H */
