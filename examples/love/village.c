/*
 * village.c - a village of 100 characters in 64 MB of keys and values, behind the interface of village.h. main.lua
 * draws it with LOVE, village_sdl.c with SDL2.
 *
 * cc -O2 -shared -fPIC examples/love/village.c examples/tieredkv.c -o examples/love/libvillage.so -lm -pthread
 *
 * One sequence of the cache has a prompt of 512 tokens. Each person is a fork of it and reads a past of 1,000 tokens of
 * its own. Two threads share the cache through one lock:
 *   - the model's thread reads, listens and speaks. It holds the lock for one layer's append and attention at a time,
 *     and leaves it while it multiplies matrices.
 *   - a frame forks, takes back interrupted speech, recodes what is due (tkv_maintain) and looks at tiers, until its
 *     time is up. What it leaves, the next frame does.
 *
 * Tables of the tiers are made from 2,048 tokens at the start and then frozen, so no frame learns, and a saved person
 * goes on with the same bits. In this order: people, model, speaking, wishes, the model's thread, frames, life.
 */
#include "../save_file.h" /* before system headers: it defines _XOPEN_SOURCE */

#include "../latency.h"
#include "../llama.h"

#include <pthread.h>
#include <sched.h>

#include "people.h"
#include "village.h"

#ifndef VILLAGE_BUDGET
#define VILLAGE_BUDGET (64 << 20) /* bytes of the cache, whatever is said */
#endif

enum {
    PEOPLE = VILLAGE_PEOPLE,
    SPARE = PEOPLE, /* a sequence to load into */
    FIRST,          /* the sequence of the prompt */
    SEQUENCES,
    PROMPT = 512,
    PAST = 1000,
    CHUNK = 32, /* tokens that the model reads at once: a layer of them holds the lock for about half a ms */
    LEARN = 2048,  /* tokens that tables are made from */
    MEMORY = 1984, /* most tokens of a person after a speech; the model's context ends at 2,048 */
    FORGET = 256,  /* oldest tokens of its own that it forgets where more would come */
    QUEUE = 256,
    REPLY = 48, /* most tokens of a speech */
    DIGITS = 5,
    TALKERS = 4 /* people who talk among themselves at a time */
};
enum { WISH_THINK = 1, WISH_NEXT = 2, WISH_SAVE = 4, WISH_LOAD = 8, WISH_NUMBER = 16 };
enum { SAVED_NUMBERS = 3 }; /* of a file: the newest token, and the state of random numbers */
static const double answer_pace = 1.0 / 24, gossip_pace = 1.0 / 11; /* seconds for a token */

typedef struct villager {
    int soul, order; /* index of its name and past; people read their pasts in this order */
    char name[24];
    float *logits; /* of its next token */
    uint64_t rng;
    int past[PAST], n_read;
    int is_here;        /* it was forked from the prompt */
    int is_refused;     /* the budget has no room for its past: it sleeps on */
    int wishes;         /* WISH_... that the model's thread serves */
    int is_interrupted; /* the next frame takes the speech back */
    int queue[QUEUE];   /* words that it hears next */
    int n_queued, n_heard;
    int is_asked; /* by the player */
    int speaks, n_spoken;
    int partner, turns; /* who hears the speech, and how often that goes on; partner -1: no one */
    double next_time;   /* when it says its next token */
    int last;           /* its newest token */
    int undo_length,
        undo_last; /* tokens before the newest question, and the newest of them; undo_length 0: none */
    char speech[VILLAGE_TEXT];
    village_line line[VILLAGE_LINES];
    int n_lines, file_bytes;
} villager;

typedef struct request { /* of the player; the next frame carries it out, or a later one */
    int who, wishes, interrupts;
    char text[VILLAGE_TEXT]; /* a question, or "" */
} request;

struct village {
    village_view view; /* of the frames' thread */
    request request[32];
    int n_requests;
    double frame_start, second_start;
    int n_second_tokens;      /* n_tokens at second_start */
    int refreshed;            /* the last person whose tiers were looked at */
    int n_forked, has_prompt; /* people who are here; 1: the prompt's sequence is */
    struct play {             /* play.h */
        char *script, *at;
        double resume; /* the next command waits for this time, and for this frame */
        int resume_frame;
    } play;
    FILE *log;
    char folder[512];
    int is_silent; /* people do not talk with each other */
    int n_wishes;  /* that the model's thread has not served yet */

    pthread_t thread;
    pthread_mutex_t lock; /* of all that follows */
    int has_thread, is_ending;
    llama_model model;
    char model_name[20];
    tkv_cache *kv;
    int in_step; /* the sequence that the model computes; -1: none */
    int n_tokens, secret_token;
    int token_bytes;           /* of a token in FP16 */
    int n_asked, n_remembered; /* people asked for their number together; those who knew it */
    double next_gossip;
    int selected, is_quiet; /* copies of view.selected and is_silent */
    uint64_t rng;
    char message[200]; /* for the view; "": nothing new */
    villager of[PEOPLE];
    float *logits; /* of the sequences that are no person's */
};

/* >>people */
static void add_line(villager *p, int kind, const char *text) {
    if (p->n_lines == VILLAGE_LINES) {
        memmove(p->line, p->line + 1, (VILLAGE_LINES - 1) * sizeof *p->line);
        p->n_lines--;
    }
    p->line[p->n_lines].kind = kind;
    snprintf(p->line[p->n_lines++].text, VILLAGE_TEXT, "%s", text);
}

/* Writes the speech to the newest line of an answer. A note may stand behind it. */
static void show_speech(villager *p) {
    int i = p->n_lines - 1;
    while (i >= 0 && p->line[i].kind != VILLAGE_ANSWER) i--;
    if (i >= 0) memcpy(p->line[i].text, p->speech, sizeof p->speech);
}

/* Adds bytes of UTF-8 to a text, as ASCII: quotes and dashes (E2 80 xx) become those of a typewriter. The bytes of the
 * model may begin within a character. */
static void add_bytes(char *text, size_t size, const char *bytes, int n) {
    size_t used = strlen(text);
    for (int i = 0; i < n && used + 1 < size; i++) {
        const unsigned char c = (unsigned char)bytes[i];
        const int is_third = i == 0 || (unsigned char)bytes[i - 1] == 0x80;
        if (c == '\n' ? used > 0 && text[used - 1] != '\n' : c >= 32 && c < 127) text[used++] = (char)c;
        else if (!is_third) continue;
        else if (c == 0x98 || c == 0x99) text[used++] = '\'';
        else if (c == 0x9c || c == 0x9d) text[used++] = '"';
        else if (c == 0x94) text[used++] = '-';
    }
    text[used] = 0;
}

static const char *fault_of(const village *v, tkv_status status) {
    return *tkv_get_last_error(v->kv) ? tkv_get_last_error(v->kv) : tkv_get_status_text(status);
}

LLAMA_PRINTF(2, 3)
static void tell(village *v, const char *fmt, ...) { /* to the log, one line */
    va_list ap;
    if (!v->log) return;
    va_start(ap, fmt);
    vfprintf(v->log, fmt, ap);
    va_end(ap);
    fflush(v->log);
}

/* >>model. These functions are called with the lock, and have it again when they return. */
static int next_position(const village *v, int seq) {
    const int n = tkv_get_length(v->kv, seq, TKV_ALL_LAYERS);
    int position = -1;
    if (n > 0) (void)tkv_get_positions(v->kv, seq, 0, n - 1, 1, &position); /* cannot fail: it has n tokens */
    return position + 1;
}

/* The llama_attention of the thread: one layer of a step, with the lock. */
static tkv_status attend(void *ctx, int layer, const float *q, const float *k, const float *v, int n,
                         float *out) {
    village *to = (village *)ctx;
    pthread_mutex_lock(&to->lock);
    tkv_status status = tkv_append(to->kv, to->in_step, layer, k, v, n);
    if (status == TKV_OK) status = tkv_attend(to->kv, to->in_step, layer, q, n, out);
    pthread_mutex_unlock(&to->lock);
    return status;
}

/* A sequence reads or says n tokens, CHUNK at most. */
static tkv_status read_tokens(village *v, int seq, const int *tokens, int n, float *logits) {
    tkv_status status = tkv_seq_begin(v->kv, seq);
    const int position = next_position(v, seq);
    if (status != TKV_OK) return status;
    v->in_step = seq;
    pthread_mutex_unlock(&v->lock);
    status = llama_forward_with(&v->model, tokens, n, position, attend, v, logits, 1);
    pthread_mutex_lock(&v->lock);
    v->in_step = -1;
    if (status == TKV_OK) status = tkv_seq_commit(v->kv, seq);
    else (void)tkv_seq_abort(v->kv, seq);
    v->n_tokens += n;
    return status;
}

/* Tells why the cache refused tokens of a person, and ends what the person does. */
static void refuse(village *v, int who, tkv_status status) {
    villager *p = &v->of[who];
    snprintf(v->message, sizeof v->message, "%s: %s", p->name, fault_of(v, status));
    tell(v, "refused %s: %s\n", p->name, fault_of(v, status));
    p->speaks = p->n_queued = p->n_heard = p->is_asked = 0;
}

/* A person reads or says tokens. Returns 0 after a refusal. */
static int remember(village *v, int who, const int *tokens, int n) {
    villager *p = &v->of[who];
    const tkv_status status = read_tokens(v, who, tokens, n, p->logits);
    if (status == TKV_OK) p->last = tokens[n - 1];
    else refuse(v, who, status);
    return status == TKV_OK;
}

/* A person forgets its oldest own tokens until n more fit. Later ones move up. */
static int make_room(village *v, int who, int n) {
    tkv_status status = TKV_OK;
    int n_forgotten = 0;
    while (status == TKV_OK && next_position(v, who) + n > MEMORY) {
        status = tkv_seq_remove(v->kv, who, PROMPT, PROMPT + FORGET);
        if (status == TKV_OK) status = tkv_seq_shift(v->kv, who, PROMPT + FORGET, TKV_UNLIMITED, -FORGET);
        n_forgotten += FORGET;
    }
    if (status != TKV_OK) refuse(v, who, status);
    else if (n_forgotten) {
        snprintf(v->message, sizeof v->message, "%s forgets its oldest %d tokens", v->of[who].name,
                 n_forgotten);
        tell(v, "forgot %s %d\n", v->of[who].name, n_forgotten);
    }
    return status == TKV_OK;
}

/* The attention of the newest token once more, without an append, while the lock is held. */
static tkv_status attend_again(void *ctx, int layer, const float *q, const float *k, const float *v, int n,
                               float *out) {
    village *to = (village *)ctx;
    (void)k;
    (void)v;
    return tkv_attend(to->kv, to->in_step, layer, q, n, out);
}

/* Computes the logits of a person's next token from the cache as it is. Returns a hash of their bits. */
static unsigned think(village *v, int who) {
    villager *p = &v->of[who];
    v->in_step = who;
    const tkv_status status =
        llama_forward_with(&v->model, &p->last, 1, next_position(v, who) - 1, attend_again, v, p->logits, 1);
    v->in_step = -1;
    p->wishes &= ~WISH_THINK;
    if (status != TKV_OK) return 0;
    const uint64_t sum = llama_add_to_checksum(0, p->logits, (size_t)v->model.vocab * sizeof *p->logits);
    return (unsigned)(sum ^ sum >> 32);
}

/* >>speaking */
/* The weight of a token at temperature .7; 0 if it is less than a tenth as likely as the likeliest one. */
static double weight_of(const village *v, const villager *p, int token, float best) {
    const float x = (p->logits[token] - best) / .7f;
    return token == v->secret_token || x < -2.3f ? 0 : exp((double)x);
}

/* Samples a token. Secret numbers are left out, since the model would speak of nothing else. */
static int choose_token(const village *v, villager *p) {
    float best = -1e30f;
    double sum = 0;
    int i;
    for (i = 0; i < v->model.vocab; i++)
        if (i != v->secret_token && p->logits[i] > best) best = p->logits[i];
    for (i = 0; i < v->model.vocab; i++) sum += weight_of(v, p, i, best);
    double left = people_random(&p->rng) / 4294967296.0 * sum;
    for (i = 0; i + 1 < v->model.vocab; i++) {
        left -= weight_of(v, p, i, best);
        if (left < 0) break;
    }
    return i;
}

/* A person shall hear a text. Words that do not fit into the queue are lost, and so are those of a former text. */
static void hear(village *v, int who, const char *text) {
    int tokens[VILLAGE_TEXT * 2 + 2];
    villager *p = &v->of[who];
    const int n = llama_tokenize(&v->model, text, strlen(text), 0, tokens);
    p->n_queued = n < QUEUE ? n : QUEUE;
    memcpy(p->queue, tokens, (size_t)p->n_queued * sizeof *tokens);
    p->n_heard = p->speaks = 0;
}

/* A person shall answer what somebody says. `partner` -1: the player. */
static void address(village *v, int who, const char *speaker, const char *said, int partner, int turns) {
    char text[2 * VILLAGE_TEXT], shown[VILLAGE_TEXT];
    villager *p = &v->of[who];
    size_t n = (size_t)write_speaker(speaker, text, sizeof text);
    n += (size_t)snprintf(text + n, sizeof text - n, "%s\n", said);
    (void)write_speaker(p->name, text + n, sizeof text - n);
    hear(v, who, text);
    p->partner = partner;
    p->turns = turns;
    p->is_asked = partner < 0;
    p->undo_length = 0;
    if (partner < 0) snprintf(shown, sizeof shown, "%s", said);
    else snprintf(shown, sizeof shown, "%s: %.200s", speaker, said);
    add_line(p, partner < 0 ? VILLAGE_YOU : VILLAGE_OTHER, shown);
}

static void listen(village *v, int who) { /* to the next words of its queue */
    villager *p = &v->of[who];
    const int n = p->n_queued - p->n_heard < CHUNK ? p->n_queued - p->n_heard : CHUNK;
    if (p->n_heard == 0) {
        if (!make_room(v, who, p->n_queued + REPLY)) return;
        p->undo_length = tkv_get_length(v->kv, who, TKV_ALL_LAYERS);
        p->undo_last = p->last;
    }
    if (!remember(v, who, p->queue + p->n_heard, n)) return;
    p->n_heard += n;
    if (p->n_heard < p->n_queued) return;
    p->speaks = 1;
    p->n_spoken = 0;
    p->speech[0] = 0;
    p->next_time = latency_now();
    add_line(p, VILLAGE_ANSWER, "");
}

static void end_speech(village *v, int who) {
    villager *p = &v->of[who];
    const int partner = p->partner;
    const size_t n = strlen(p->speech);
    p->speaks = p->is_asked = 0;
    p->n_queued = p->n_heard = 0;
    if (n && p->speech[n - 1] == '\n') p->speech[n - 1] = 0;
    show_speech(p);
    if (v->log) {
        char text[VILLAGE_TEXT];
        memcpy(text, p->speech, sizeof text);
        for (char *c = text; *c; c++)
            if (*c == '\n') *c = '/';
        tell(v, "said %s: %s\n", p->name, text);
    }
    if (partner < 0 || p->turns == 0 || v->of[partner].n_queued || v->of[partner].speaks) return;
    address(v, partner, p->name, p->speech, who, p->turns - 1);
}

static void speak(village *v, int who) { /* one token */
    villager *p = &v->of[who];
    const int token = choose_token(v, p);
    int len;
    const char *piece = llama_piece(&v->model, p->last, token, &len);
    const int ends_line = len > 0 && piece[len - 1] == '\n', was_empty = !p->speech[0];
    if (!remember(v, who, &token, 1)) return;
    add_bytes(p->speech, sizeof p->speech, piece, len);
    show_speech(p);
    p->n_spoken++;
    p->next_time += p->is_asked ? answer_pace : gossip_pace;
    if (p->next_time < latency_now() - .25) p->next_time = latency_now();
    if (p->n_spoken >= REPLY || (ends_line && !was_empty && (len > 1 || p->n_spoken > REPLY / 3)))
        end_speech(v, who);
}

static void begin_gossip(village *v) {
    const int who = people_below(&v->rng, PEOPLE);
    const int partner = v->view.person[who].road_to;
    int talkers = 0;
    for (int i = 0; i < PEOPLE; i++) talkers += v->of[i].speaks || v->of[i].n_queued;
    if (partner < 0 || talkers >= TALKERS) return;
    const villager *a = &v->of[who], *b = &v->of[partner];
    if (a->n_read < PAST || b->n_read < PAST || a->speaks || b->speaks || a->n_queued || b->n_queued) return;
    if (who == v->selected || partner == v->selected) return; /* the player may want to talk */
    address(v, who, b->name, gossip[people_below(&v->rng, PEOPLE_COUNT(gossip))], partner, 2);
}

/* >>wishes */
/* Asks a person for its number, and takes question and answer back again. */
static void ask_number(village *v, int who) {
    villager *p = &v->of[who];
    const int before = tkv_get_length(v->kv, who, TKV_ALL_LAYERS), last = p->last;
    int tokens[128], n_digits = 0, truth = secret_number(p->soul);
    char text[VILLAGE_TEXT], digits[DIGITS + 1];
    snprintf(text, sizeof text, "\nThe secret number of %s is", p->name);
    const int n = llama_tokenize(&v->model, text, strlen(text), 0, tokens);
    int ok = remember(v, who, tokens, n < CHUNK ? n : CHUNK);
    for (int i = 0; ok && i < 2 * DIGITS && n_digits < DIGITS; i++) {
        int len;
        const int token = llama_argmax(p->logits, v->model.vocab);
        const char *piece = llama_piece(&v->model, p->last, token, &len);
        for (int k = 0; k < len && n_digits < DIGITS; k++)
            if (piece[k] >= '0' && piece[k] <= '9') digits[n_digits++] = piece[k];
        ok = remember(v, who, &token, 1);
    }
    digits[n_digits] = 0;
    (void)tkv_seq_truncate(v->kv, who, before); /* cannot fail: there is no window, and no step is open */
    p->last = last;
    p->wishes |= WISH_THINK;
    snprintf(text, sizeof text, "Its number, asked from memory: %s (%s)", digits,
             atoi(digits) == truth ? "right" : "wrong");
    add_line(p, VILLAGE_NOTE, text);
    v->n_asked++;
    v->n_remembered += atoi(digits) == truth;
    if (v->n_asked > 1)
        snprintf(v->message, sizeof v->message, "%d of %d know their number", v->n_remembered, v->n_asked);
    tell(v, "number %s %s %d\n", p->name, digits[0] ? digits : "-", truth);
}

static void name_file(const village *v, const villager *p, char *path, size_t size) {
    snprintf(path, size, "%s/village-%s.tkv", v->folder, p->name);
    for (char *c = path + strlen(v->folder); *c; c++)
        if (*c == ' ') *c = '_';
}

/* Writes bytes to a file as a whole, without the lock. Returns NULL, or why not. */
static const char *write_file(village *v, const char *path, const void *bytes, size_t size) {
    save_file f;
    pthread_mutex_unlock(&v->lock);
    int ok = save_file_begin(&f, path) == 0;
    if (ok && fwrite(bytes, 1, size, f.out) != size) ok = save_file_abandon(&f) == 0;
    if (ok) ok = save_file_end(&f) == 0;
    const char *why = ok ? NULL : strerror(errno);
    pthread_mutex_lock(&v->lock);
    return why;
}

static void save_person(village *v, int who) {
    villager *p = &v->of[who];
    const uint32_t low = (uint32_t)(p->rng & 0xffffffffu), high = (uint32_t)(p->rng >> 32);
    int numbers[SAVED_NUMBERS] = {p->last, 0, 0};
    memcpy(&numbers[1], &low, sizeof low);
    memcpy(&numbers[2], &high, sizeof high);
    tkv_save_params save;
    char path[1024];
    size_t size = 0;
    memset(&save, 0, sizeof save);
    save.seq = who;
    save.model = v->model_name;
    save.model_bytes = strlen(v->model_name);
    save.tokens = numbers;
    save.n_tokens = SAVED_NUMBERS;
    name_file(v, p, path, sizeof path);
    const unsigned thought = think(v, who);
    tkv_status status = tkv_seq_save(v->kv, &save, NULL, 0, &size);
    void *bytes = malloc(size + 1);
    if (!bytes) status = TKV_ERR_NOMEM;
    if (status == TKV_OK) status = tkv_seq_save(v->kv, &save, bytes, size, NULL);
    const char *why = status == TKV_OK ? write_file(v, path, bytes, size) : fault_of(v, status);
    free(bytes);
    if (why) {
        snprintf(v->message, sizeof v->message, "%s is not saved: %s", p->name, why);
        tell(v, "refused %s: %s\n", p->name, why);
        return;
    }
    const int fp16 = next_position(v, who) * v->token_bytes;
    p->file_bytes = (int)size;
    tell(v, "saved %s %d %d %08x %d\n", p->name, (int)size, fp16, thought,
         llama_argmax(p->logits, v->model.vocab));
    snprintf(v->message, sizeof v->message, "%s is saved: %d KB (FP16: %d KB)", p->name, (int)(size / 1024),
             fp16 / 1024);
}

/* Loads a person into the spare sequence. If that succeeds, it takes the place of the present one. */
static void load_person(village *v, int who) {
    villager *p = &v->of[who];
    int numbers[SAVED_NUMBERS] = {0, 0, 0};
    uint32_t low, high;
    char path[1024];
    const char *why = NULL;
    tkv_load_params load;
    tkv_load_info info;
    size_t size;
    memset(&load, 0, sizeof load);
    memset(&info, 0, sizeof info);
    load.seq = SPARE;
    load.model = v->model_name;
    load.model_bytes = strlen(v->model_name);
    load.tokens = numbers;
    load.token_capacity = SAVED_NUMBERS;
    name_file(v, p, path, sizeof path);
    v->in_step = who; /* requests wait: a question would be lost with the present talk */
    pthread_mutex_unlock(&v->lock);
    void *bytes = llama_read_file(path, &size);
    pthread_mutex_lock(&v->lock);
    v->in_step = -1;
    if (!bytes) why = "there is no saved file";
    else {
        tkv_status status = tkv_seq_load(v->kv, &load, bytes, size, &info);
        const int n = next_position(v, SPARE);
        if (status == TKV_OK && (info.n_saved_tokens != SAVED_NUMBERS || numbers[0] < 0 ||
                                 numbers[0] >= v->model.vocab || n <= PROMPT || n > MEMORY))
            why = "the file has a sequence that the village did not save";
        else if (status != TKV_OK) why = fault_of(v, status);
        else {
            int sources[SPARE + 1]; /* both change places, which takes no memory */
            for (int i = 0; i <= SPARE; i++) sources[i] = i == who ? SPARE : i == SPARE ? who : i;
            status = tkv_seq_reorder(v->kv, 0, sources, SPARE + 1);
            if (status != TKV_OK) why = fault_of(v, status);
        }
    }
    if (why) {
        snprintf(v->message, sizeof v->message, "%s is not restored: %s", p->name, why);
        tell(v, "refused %s: %s\n", p->name, why);
    } else {
        p->last = numbers[0];
        memcpy(&low, &numbers[1], sizeof low);
        memcpy(&high, &numbers[2], sizeof high);
        p->rng = (uint64_t)high << 32 | low;
        p->n_queued = p->n_heard = p->speaks = p->undo_length = 0;
        p->n_read = PAST;
        p->file_bytes = (int)size;
        const unsigned thought = think(v, who);
        tell(v, "loaded %s %08x %d\n", p->name, thought, llama_argmax(p->logits, v->model.vocab));
        add_line(p, VILLAGE_NOTE, "Restored from its file.");
        snprintf(v->message, sizeof v->message, "%s is restored from %d KB", p->name, (int)(size / 1024));
    }
    (void)tkv_seq_reset(v->kv, SPARE);
    free(bytes);
}

/* A wish to load is the oldest one: later wishes for the same person alone wait in carry_out. */
static void serve_wish(village *v, int who) {
    villager *p = &v->of[who];
    const int wishes = p->wishes & WISH_LOAD ? WISH_LOAD : p->wishes;
    p->wishes &= ~wishes;
    if (wishes & (WISH_THINK | WISH_NEXT)) {
        const unsigned thought = think(v, who);
        if (wishes & WISH_NEXT)
            tell(v, "next %s %08x %d\n", p->name, thought, llama_argmax(p->logits, v->model.vocab));
    }
    if (wishes & WISH_SAVE) save_person(v, who);
    if (wishes & WISH_LOAD) load_person(v, who);
    if (wishes & WISH_NUMBER) ask_number(v, who);
}

/* >>the model's thread */
enum { WORK_NONE, WORK_READ, WORK_LISTEN, WORK_SPEAK, WORK_ANSWER, WORK_WISH };

static int work_of(const village *v, int who, double now) {
    const villager *p = &v->of[who];
    if (!p->is_here || p->is_refused || p->is_interrupted) return WORK_NONE;
    if (p->wishes && (p->n_read == PAST || p->wishes & WISH_LOAD)) return WORK_WISH;
    const int waits = p->n_heard < p->n_queued;
    if (p->n_read < PAST) return waits || p->wishes || who == v->selected ? WORK_LISTEN : WORK_READ;
    if (waits) return p->is_asked ? WORK_ANSWER : WORK_LISTEN;
    return p->speaks && p->next_time <= now ? WORK_SPEAK : WORK_NONE;
}

static void do_work(village *v, int who, int work) {
    villager *p = &v->of[who];
    if (work == WORK_WISH) serve_wish(v, who);
    else if (p->n_read < PAST) {
        const int n = PAST - p->n_read < CHUNK ? PAST - p->n_read : CHUNK;
        if (remember(v, who, p->past + p->n_read, n)) p->n_read += n;
        else {
            p->is_refused = 1;
            p->wishes = 0;
        }
        if (p->n_read == PAST) tell(v, "read %s\n", p->name);
    } else if (work == WORK_SPEAK) speak(v, who);
    else listen(v, who);
}

static void *run_model(void *user) {
    village *v = (village *)user;
    pthread_mutex_lock(&v->lock);
    while (!v->is_ending) {
        const double now = latency_now();
        int best = 0, most = WORK_NONE;
        for (int i = 0; i < PEOPLE; i++) {
            const int work = work_of(v, i, now);
            if (work > most || (work == most && v->of[i].order < v->of[best].order)) {
                most = work;
                best = i;
            }
        }
        if (!v->is_quiet && now >= v->next_gossip) {
            v->next_gossip = now + .4;
            begin_gossip(v);
        }
        if (most != WORK_NONE) {
            do_work(v, best, most);
            continue;
        }
        pthread_mutex_unlock(&v->lock);
        const struct timespec rest = {0, 2000000};
        nanosleep(&rest, NULL);
        pthread_mutex_lock(&v->lock);
    }
    pthread_mutex_unlock(&v->lock);
    return NULL;
}

/* >>frames */
static int is_time_up(void *user) { return latency_now() >= *(const double *)user; }

/* Waits for the lock until the deadline. Returns 0 if it did not get it. */
static int take_lock(village *v, double deadline) {
    while (pthread_mutex_trylock(&v->lock) != 0) {
        if (latency_now() >= deadline) return 0;
        sched_yield();
    }
    return 1;
}

/* Takes the newest question and its answer back: the person is as it was before. */
static void take_back(village *v, int who) {
    villager *p = &v->of[who];
    p->is_interrupted = 0;
    if (!p->undo_length && p->n_queued == 0) return;
    int n = 0;
    if (p->undo_length) { /* it has heard some of it */
        n = tkv_get_length(v->kv, who, TKV_ALL_LAYERS) - p->undo_length;
        if (tkv_seq_truncate(v->kv, who, p->undo_length) != TKV_OK) return;
        p->last = p->undo_last;
        p->wishes |= WISH_THINK;
    }
    char text[VILLAGE_TEXT];
    snprintf(text, sizeof text, "Interrupted: %d tokens were taken back.", n);
    for (int i = p->n_lines, is_question = 0; i-- > 0 && !is_question;) {
        if (p->line[i].kind == VILLAGE_NOTE) continue;
        is_question = p->line[i].kind != VILLAGE_ANSWER;
        p->line[i].kind = VILLAGE_TAKEN_BACK;
    }
    add_line(p, VILLAGE_NOTE, text);
    p->speaks = p->n_queued = p->n_heard = p->is_asked = p->undo_length = 0;
    tell(v, "undone %s %d\n", p->name, n);
}

/* Returns 0 if the request has to wait: the model computes a token of this person, or a former wish is not served. */
static int carry_out(village *v, const request *r) {
    if (r->who >= 0 && (r->who == v->in_step || v->of[r->who].wishes & ~WISH_THINK)) return 0;
    if (r->wishes & WISH_NUMBER) v->n_asked = v->n_remembered = 0;
    for (int i = 0; i < PEOPLE; i++) {
        villager *p = &v->of[i];
        if (p->is_refused || (r->who >= 0 && r->who != i)) continue;
        p->wishes |= r->wishes;
        if (r->interrupts) p->is_interrupted = 1;
        if (r->text[0]) address(v, i, "Stranger", r->text, -1, 0);
    }
    return 1;
}

/* Forks, cuts and recodes until the deadline, and looks at the tiers of some people. */
static void work_on_cache(village *v, double deadline) {
    double half = latency_now() + (deadline - latency_now()) * .6;
    int n_forks = 0;
    for (int i = 0; i < PEOPLE; i++) {
        villager *p = &v->of[i];
        if (p->is_interrupted && v->in_step != i) take_back(v, i);
        if (p->is_here || n_forks == 4 || p->order > v->view.n_frames * 4) continue;
        if (tkv_seq_fork(v->kv, FIRST, i, TKV_UNLIMITED) != TKV_OK) continue;
        p->is_here = 1;
        n_forks++;
        v->n_forked++;
    }
    if (v->n_forked == PEOPLE && v->has_prompt) { /* it lives on in them, and ages with the last of them */
        (void)tkv_seq_reset(v->kv, FIRST);
        v->has_prompt = 0;
    }
    (void)tkv_maintain(v->kv, INT_MAX, is_time_up, &half,
                       NULL); /* a later append reports what it could not do */
    for (int n = 0; n < 10 && latency_now() < deadline; n++) { /* all people six times a second */
        const int who = v->refreshed = (v->refreshed + 1) % PEOPLE;
        village_person *to = &v->view.person[who];
        tkv_layer_info info;
        tkv_seq_memory_info m;
        uint8_t tiers[PROMPT];
        if (who == v->in_step || !v->of[who].is_here) continue;
        if (tkv_get_layer(v->kv, who, 0, &info) != TKV_OK || tkv_seq_get_memory(v->kv, who, &m) != TKV_OK ||
            tkv_get_tiers(v->kv, who, 0, 0, PROMPT, tiers) != TKV_OK)
            continue;
        to->n_shared = m.shared > 0 ? PROMPT : 0;
        for (int i = 0; i < to->n_shared; i++) info.tokens[tiers[i] < 3 ? tiers[i] : 2]--;
        for (int i = 0; i < 3; i++) to->n_own[i] = info.tokens[i];
        to->own_bytes = (int)m.own;
        to->shared_bytes = (int)m.shared;
        to->fp16_bytes = (to->n_shared + to->n_own[0] + to->n_own[1] + to->n_own[2]) * v->token_bytes;
    }
}

/* Copies what the thread of the model says. */
static void look_at_people(village *v) {
    village_view *to = &v->view;
    const villager *chosen = &v->of[to->selected];
    tkv_memory_info memory;
    tkv_budget_info budget;
    v->selected = to->selected;
    v->is_quiet = v->is_silent;
    v->n_wishes = to->n_read = to->n_refused = 0;
    to->fp16 = to->unshared = 0;
    for (int i = 0; i < PEOPLE; i++) {
        const villager *p = &v->of[i];
        village_person *q = &to->person[i];
        q->state = !p->is_here                ? VILLAGE_AWAY
                   : p->speaks                ? VILLAGE_SPEAKING
                   : p->n_read < PAST         ? (v->in_step == i ? VILLAGE_READING : VILLAGE_AWAY)
                   : p->n_heard < p->n_queued ? VILLAGE_LISTENING
                                              : VILLAGE_SILENT;
        const size_t n = strlen(p->speech);
        const char *line = strrchr(p->speech, '\n');
        line = line ? line + 1 : p->speech;
        if (strlen(line) > 26) line = p->speech + n - 26;
        snprintf(q->words, sizeof q->words, "%s", p->speaks ? line : "");
        q->file_bytes = p->file_bytes;
        to->n_read += p->n_read == PAST;
        to->n_refused += p->is_refused;
        v->n_wishes += p->wishes != 0;
        to->fp16 += q->fp16_bytes;
        to->unshared += (double)q->own_bytes + q->shared_bytes;
    }
    memcpy(to->line, chosen->line, sizeof to->line);
    to->n_lines = chosen->n_lines;
    if (v->message[0]) memcpy(to->message, v->message, sizeof to->message);
    v->message[0] = 0;
    if (to->n_frames % 16 == 0 && tkv_get_memory(v->kv, &memory) == TKV_OK) to->used = (double)memory.total;
    if (to->n_frames % 16 == 8 && tkv_get_budget(v->kv, &budget) == TKV_OK) {
        to->level = budget.level;
        to->n_levels = budget.n_levels;
    }
    if (v->frame_start - v->second_start >= 1) {
        to->tokens_per_second = (v->n_tokens - v->n_second_tokens) / (v->frame_start - v->second_start);
        v->n_second_tokens = v->n_tokens;
        v->second_start = v->frame_start;
    }
}

static int by_time(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double thread_seconds(void) { /* processor time of this thread */
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void add_request(village *v, int who, int wishes, int interrupts, const char *text) {
    if (v->n_requests == (int)(sizeof v->request / sizeof *v->request)) return; /* too fast a player */
    request *r = &v->request[v->n_requests++];
    r->who = who;
    r->wishes = wishes;
    r->interrupts = interrupts;
    snprintf(r->text, sizeof r->text, "%s", text);
}

#include "map.h"
#include "play.h"

const village_view *village_frame(village *v, int limit_us) {
    village_view *view = &v->view;
    const double start = latency_now(), processor = thread_seconds(), deadline = start + 1e-6 * limit_us;
    const float frame = v->frame_start > 0 ? (float)(1e3 * (start - v->frame_start)) : 0;
    const int in_time = take_lock(v, deadline);
    v->frame_start = start;
    if (in_time) {
        int n_left = 0;
        for (int i = 0; i < v->n_requests; i++)
            if (!carry_out(v, &v->request[i])) v->request[n_left++] = v->request[i];
        v->n_requests = n_left;
        work_on_cache(v, deadline);
        look_at_people(v);
        pthread_mutex_unlock(&v->lock);
    }
    const double by_clock = 1e3 * (latency_now() - start);
    const int at = view->n_frames++ % VILLAGE_FRAMES;
    view->frame_ms[at] = frame;
    view->cache_ms[at] = (float)(1e3 * (thread_seconds() - processor));
    if (at % 30 == 29) {
        float times[VILLAGE_FRAMES];
        const int n = view->n_frames < VILLAGE_FRAMES ? view->n_frames : VILLAGE_FRAMES;
        memcpy(times, view->cache_ms, sizeof times);
        qsort(times, (size_t)n, sizeof *times, by_time);
        view->cache_p99_ms = times[n * 99 / 100];
    }
    if (v->log)
        fprintf(v->log, "frame %d %.3f %.3f %.3f %d %d %.0f\n", view->n_frames, (double)frame, by_clock,
                (double)view->cache_ms[at], in_time, view->n_read, view->used);
    view->shot[0] = 0;
    play_script(v, start);
    return view;
}

/* >>life */
/* Reads tokens into a sequence of the cache that is no person's. */
static tkv_status read_all(village *v, int seq, const int *tokens, int n) {
    tkv_status status = TKV_OK;
    for (int i = 0; i < n && status == TKV_OK; i += CHUNK)
        status = read_tokens(v, seq, tokens + i, n - i < CHUNK ? n - i : CHUNK, v->logits);
    return status;
}

/* Makes tokens of the prompt and of all pasts. Returns 0 if the model's tokens are too long for that. */
static int write_pasts(village *v, int *prompt) {
    enum { TEXT = 5000 };
    char text[TEXT];
    int tokens[TEXT + 2];
    if (llama_tokenize(&v->model, village_prompt, strlen(village_prompt), 0, tokens) < PROMPT) return 0;
    memcpy(prompt, tokens, PROMPT * sizeof *tokens);
    for (int i = 0; i < PEOPLE; i++) {
        villager *p = &v->of[i];
        write_past(p->soul, text, TEXT);
        if (llama_tokenize(&v->model, text, strlen(text), 0, tokens) < PAST) return 0;
        memcpy(p->past, tokens, sizeof p->past);
        p->last = prompt[PROMPT - 1];
    }
    return 1;
}

/* Makes the tables of the tiers from the prompt and two pasts, freezes them, and reads the prompt. */
static tkv_status read_prompt(village *v, const int *prompt) {
    tkv_status status = read_all(v, SPARE, prompt, PROMPT);
    for (int who = 0; who < PEOPLE && status == TKV_OK; who += PEOPLE / 2)
        status = read_all(v, SPARE, v->of[who].past, (LEARN - PROMPT) / 2);
    if (status == TKV_OK) status = tkv_freeze_calibration(v->kv);
    if (status == TKV_OK) status = tkv_seq_reset(v->kv, SPARE);
    if (status == TKV_OK) status = read_all(v, FIRST, prompt, PROMPT);
    v->has_prompt = status == TKV_OK;
    return status;
}

static int begin_cache(village *v, char *reason, size_t size) {
    int prompt[PROMPT];
    if (!write_pasts(v, prompt))
        return snprintf(reason, size, "this model's tokens are too long for the village"), 0;
    pthread_mutex_lock(&v->lock);
    const tkv_status status = read_prompt(v, prompt);
    if (status != TKV_OK) snprintf(reason, size, "the prompt: %s", fault_of(v, status));
    pthread_mutex_unlock(&v->lock);
    return status == TKV_OK;
}

static int create_cache(village *v, char *reason, size_t size) {
    tkv_config cfg = tkv_default_config();
    tkv_memory_info memory;
    llama_kv_config(&v->model, &cfg);
    cfg.limits.max_seqs = SEQUENCES;
    cfg.limits.max_append = CHUNK;
    cfg.tiers.hot_tokens = 16;
    cfg.tiers.warm_tokens = 128;
    cfg.budget.bytes = VILLAGE_BUDGET;
    cfg.budget.pressure.min_level = 3; /* old tokens are compressed from the beginning on */
    if (!cfg.model.rope.dim)
        return snprintf(reason, size, "the model's RoPE is of a kind that cannot move"), 0;
    if (tkv_create_ex(&cfg, NULL, 0, &v->kv, reason, size) != TKV_OK) return 0;
    if (tkv_estimate_memory(&cfg, PROMPT + PAST, PEOPLE, &memory) == TKV_OK)
        tell(v, "forecast %.0f\n", (double)memory.total);
    return 1;
}

static int begin_people(village *v) {
    const size_t vocab = (size_t)v->model.vocab;
    int tokens[16];
    v->logits = (float *)malloc(vocab * sizeof(float));
    for (int i = 0; i < PEOPLE; i++) {
        v->of[i].logits = (float *)calloc(vocab, sizeof(float));
        v->of[i].rng = people_seed(v->of[i].soul);
        if (!v->of[i].logits) return 0;
    }
    (void)llama_tokenize(&v->model, " secret", 7, 0, tokens);
    v->secret_token = tokens[0];
    v->token_bytes = 2 * v->model.n_layers * v->model.n_kv_heads * (v->model.head_dim + v->model.v_head_dim);
    const uint64_t sum = llama_checksum(&v->model);
    snprintf(v->model_name, sizeof v->model_name, "%08x%08x", (unsigned)(sum >> 32),
             (unsigned)(sum & 0xffffffffu));
    return v->logits != NULL;
}

village *village_create(const village_options *options, char *reason, size_t size) {
    village *v = (village *)calloc(1, sizeof *v);
    if (size) *reason = 0;
    if (!v) return snprintf(reason, size, "out of memory"), NULL;
    pthread_mutex_init(&v->lock, NULL);
    snprintf(v->folder, sizeof v->folder, "%s", options->folder ? options->folder : ".");
    v->is_silent = options->is_silent;
    v->in_step = -1;
    v->rng = people_seed(4711);
    v->view.budget = VILLAGE_BUDGET;
    int ok = 1;
    if (options->folder && strlen(options->folder) >= sizeof v->folder)
        ok = 0, snprintf(reason, size, "the name of the folder is too long");
    if (ok && options->log) v->log = fopen(options->log, "w");
    if (ok && options->log && !v->log) ok = 0, snprintf(reason, size, "cannot write %s", options->log);
    if (ok && options->script) ok = begin_script(v, options->script, reason, size);
    if (ok) ok = llama_load(options->model, NULL, &v->model, reason, size);
    place_people(v);
    plant_trees(v);
    if (ok && !begin_people(v)) ok = 0, snprintf(reason, size, "out of memory");
    if (ok) ok = create_cache(v, reason, size) && begin_cache(v, reason, size);
    v->second_start = latency_now();
    v->next_gossip = v->second_start + 2;
    if (ok) ok = v->has_thread = pthread_create(&v->thread, NULL, run_model, v) == 0;
    if (ok) return v;
    if (size && !*reason) snprintf(reason, size, "no thread can be started");
    village_destroy(v);
    return NULL;
}

void village_destroy(village *v) {
    if (!v) return;
    pthread_mutex_lock(&v->lock);
    v->is_ending = 1;
    pthread_mutex_unlock(&v->lock);
    if (v->has_thread) pthread_join(v->thread, NULL);
    pthread_mutex_destroy(&v->lock);
    tkv_destroy(v->kv);
    llama_free(&v->model);
    for (int i = 0; i < PEOPLE; i++) free(v->of[i].logits);
    free(v->logits);
    free(v->play.script);
    if (v->log) fclose(v->log);
    free(v);
}
