/*
 * remembers.c - the character that remembers: a talk that three caches hear, for the page in examples/web.
 *
 *     make web                               compiles this file to WASM, and puts all into build/web/index.html
 *
 * One model reads the same tokens three times:
 *   - PLAIN    K and V in FP16, in as many tokens as the budget holds: the first 4, and the newest ones
 *   - TIERED   tieredkv with the same budget
 *   - EXACT    tieredkv with all tokens in F32 and no budget; the divergences of the others are measured from it
 *
 * The functions web_* are the interface to JavaScript. Tokens enter a talk first (web_hear, web_speak), and each side
 * then reads those that it has not read (web_read), so that the page can show and measure every step. A function that
 * fails returns -1, and web_text() is the reason.
 *
 * Two endings are two forks of the talk in TIERED. The talk goes on with the one that is kept. A saved file is the whole
 * cache, with the tokens and the random numbers of the talk; PLAIN and EXACT read the tokens again.
 *
 * In this order: interface, state, the window, the talk, reading, questions, endings, saving, reports.
 */
#include "../llama.h"
#include "../measure.h"

#if defined(__wasm__)
#define WEB_EXPORT(name) __attribute__((export_name(#name)))
#else
#define WEB_EXPORT(name)
#endif

enum { PLAIN, TIERED, EXACT, SIDES };
enum { TALK, ENDING_A, ENDING_B, SEQS }; /* sequences of TIERED; the other sides have the talk only */
enum { CHUNK = 32, SINKS = 4, RECENT = 64, LEVELS = 6, ANSWER = 16, FIRST_NUMBERS = 4 };
enum { FILE_VERSION = 1 };

/* >>interface */
/* Memory for texts and files of JavaScript; NULL: there is none. A size of 2^31 bytes or more arrives below 0. */
WEB_EXPORT(web_alloc) void *web_alloc(int size);
WEB_EXPORT(web_free) void web_free(void *p);
/* The newest reason, answer or piece of text. */
WEB_EXPORT(web_text) const char *web_text(void);
/* Loads the model, whose bytes must stay, and creates three empty caches. `budget` is in bytes. Returns the tokens that
 * the window holds. */
WEB_EXPORT(web_start) int web_start(const void *gguf, int size, int budget);
/* Most tokens of a talk. */
WEB_EXPORT(web_context) int web_context(void);
/* Adds a text to a sequence. Returns the number of its tokens; -1 if the context has no room for them. */
WEB_EXPORT(web_hear) int web_hear(int seq, const char *text, int size);
/* Takes tokens back that no side has read: the talk has n tokens. */
WEB_EXPORT(web_unhear) void web_unhear(int n);
/* Sets the random numbers of a sequence. */
WEB_EXPORT(web_seed) void web_seed(int seq, int seed);
/* Adds the next token of a speech to a sequence that TIERED has read to its end. `temperature` is above 0. A speech tells
 * no secret number by itself: the model would do so in every other line, as its training text does. Returns the token. */
WEB_EXPORT(web_speak) int web_speak(int seq, float temperature);
/* The bytes of a token's text are in web_text(). Returns their number. */
WEB_EXPORT(web_piece) int web_piece(int seq, int i);
/* A side reads at most `most` tokens that it has not read. Returns their number. */
WEB_EXPORT(web_read) int web_read(int side, int seq, int most);
/* Adds the divergences of the tokens that all sides have just read. */
WEB_EXPORT(web_compare) void web_compare(void);
/* Returns the mean KL divergence of PLAIN or TIERED from EXACT, in nats, over web_compared() positions. */
WEB_EXPORT(web_divergence) double web_divergence(int side);
WEB_EXPORT(web_compared) int web_compared(void);
/* Begins new means. */
WEB_EXPORT(web_forget_divergence) void web_forget_divergence(void);
/* Asks a side a question, takes its likeliest answer of n_digits characters, and takes both back. web_text() is the
 * answer. Returns its length. */
WEB_EXPORT(web_ask) int web_ask(int side, const char *question, int size, int n_digits);
/* Begins two endings of the talk, which share its past. Returns the tokens of the past. */
WEB_EXPORT(web_fork) int web_fork(void);
/* The talk goes on with an ending; TALK: with none. The other sides have not read it yet. Returns the tokens
 * of the talk. */
WEB_EXPORT(web_keep) int web_keep(int ending);
/* Saves the talk as TIERED knows it. Returns the bytes, which the caller frees; web_saved_bytes() is their number. */
WEB_EXPORT(web_save) void *web_save(void);
WEB_EXPORT(web_saved_bytes) int web_saved_bytes(void);
/* Loads a saved talk. The other sides have read nothing of it yet. After a failure the present talk goes on. Returns
 * the tokens of the talk. */
WEB_EXPORT(web_load) int web_load(const void *bytes, int size);
/* Begins a new talk. */
WEB_EXPORT(web_reset) int web_reset(void);
/* The visitor's level: old tokens take at most its bits, now and later. */
WEB_EXPORT(web_set_level) int web_set_level(int level);
/* The present level of TIERED, 0 the loosest. */
WEB_EXPORT(web_level) int web_level(void);
/* Bits of a value of the oldest tokens at a level of TIERED, with metadata. */
WEB_EXPORT(web_level_bits) double web_level_bits(int level);
/* Tokens of a sequence, read or not. */
WEB_EXPORT(web_length) int web_length(int seq);
/* Bytes of a side: of PLAIN those of the tokens alone, of the others all that the cache holds. */
WEB_EXPORT(web_bytes) double web_bytes(int side);
/* Bytes of an ending that it has alone (shared 0), or that it shares with the talk. */
WEB_EXPORT(web_ending_bytes) double web_ending_bytes(int ending, int shared);
/* Writes what each token read is: a tkv_tier, or TKV_TOKEN_GONE; of TIERED in its first layer. Returns their number. */
WEB_EXPORT(web_cells) int web_cells(int side, uint8_t *cells);
/* A checksum of the bits of TIERED's logits behind the last token, as 16 digits in web_text(). */
WEB_EXPORT(web_fingerprint) const char *web_fingerprint(int seq);

/* >>state */
typedef struct window { /* keys and values in FP16: [layer][slot][KV head][channel] */
    uint16_t *k, *v;
    int slots;   /* tokens that it holds */
    int row;     /* values of K in a slot */
    float *work; /* rows and weights of attention */
} window;

typedef struct side_state {
    tkv_cache *kv; /* of TIERED and EXACT */
    float *logits; /* [CHUNK][vocab] of the last tokens read */
    int n_logits;  /* rows of `logits`; the last one belongs to the last token read */
    int n_read;    /* tokens of the talk */
} side_state;

static struct web {
    llama_model model;
    tkv_config cfg[SIDES];
    tkv_level ladder[LEVELS];
    window plain;
    window aside; /* a copy of `plain` while a question is asked */
    side_state of[SIDES];
    int *tokens[SEQS], n[SEQS];
    int n_read[SEQS];     /* tokens of the endings that TIERED has read */
    float *next[SEQS];    /* logits behind the last token of TIERED's sequences */
    double divergence[2]; /* of PLAIN and TIERED: sums over n_compared positions */
    int n_compared;       /* positions since web_forget_divergence */
    int pos;              /* of the first token that a forward pass reads */
    int wanted_level;     /* least level, set by the visitor */
    uint64_t rng[SEQS];   /* random numbers of the speeches */
    uint64_t model_name;  /* a checksum of the model, for saved files */
    int secret;           /* the token behind "The" in a line that tells a secret number */
    size_t n_saved;       /* bytes of the last saved file */
    char text[512];       /* a reason, an answer or a piece of text */
} web;

static int fail(const char *what, const char *why) {
    snprintf(web.text, sizeof web.text, "%s: %s", what, why);
    return -1;
}

static int fail_call(const char *what, int side, tkv_status status) {
    const tkv_cache *kv = web.of[side].kv;
    return fail(what, kv && *tkv_get_last_error(kv) ? tkv_get_last_error(kv) : tkv_get_status_text(status));
}

/* >>the window */
/* Tokens behind the sinks take turns in the slots behind the sinks. */
static int slot_of(const window *w, int token) {
    return token < SINKS ? token : SINKS + (token - SINKS) % (w->slots - SINKS);
}

/* Rounds to nearest even. Keys and values are far below the largest value of FP16. */
static uint16_t float_to_half(float x) {
    uint32_t bits, sign;
    memcpy(&bits, &x, sizeof bits);
    sign = bits >> 16 & 0x8000;
    float scaled = fabsf(x) * 1.92592994438723585305597794258492732e-34f; /* 2^-112: the exponent of FP16 */
    memcpy(&bits, &scaled, sizeof bits);
    return (uint16_t)(sign | (bits + 0xfff + (bits >> 13 & 1)) >> 13);
}

static void halves_to_floats(const uint16_t *from, int n, float *to) { /* finite values */
    for (int i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)(from[i] & 0x7fff) << 13;
        float x;
        memcpy(&x, &bits, sizeof x);
        x *= 5192296858534827628530496329220096.0f; /* 2^112 */
        memcpy(&bits, &x, sizeof bits);
        bits |= (uint32_t)(from[i] & 0x8000) << 16;
        memcpy(&to[i], &bits, sizeof bits);
    }
}

static int create_window(window *w, int slots) {
    const llama_model *m = &web.model;
    w->slots = slots;
    w->row = m->n_kv_heads * m->head_dim;
    const size_t n = (size_t)(m->n_layers * slots * w->row);
    w->k = (uint16_t *)malloc(2 * n * sizeof *w->k);
    w->work = (float *)malloc((size_t)(m->n_heads * slots + w->row) * sizeof *w->work);
    if (!w->k || !w->work) return 0;
    w->v = w->k + n;
    return 1;
}

static void copy_window(window *to, const window *from) {
    memcpy(to->k, from->k, (size_t)(web.model.n_layers * from->slots * from->row) * 2 * sizeof *to->k);
}

static float dot(const float *a, const float *b, int n) { /* n is a multiple of LLAMA_LANES */
    llama_vec sum = LLAMA_VEC(a) * LLAMA_VEC(b);
    for (int i = LLAMA_LANES; i < n; i += LLAMA_LANES) sum += LLAMA_VEC(a + i) * LLAMA_VEC(b + i);
    float lanes[LLAMA_LANES], all = 0;
    memcpy(lanes, &sum, sizeof lanes);
    for (int i = 0; i < LLAMA_LANES; i++) all += lanes[i];
    return all;
}

/* Attention of one query [n_heads][head_dim] over n slots of a layer. Each slot is converted once for all heads. */
static void attend_window(window *w, int layer, const float *q, int n, float *out) {
    const llama_model *m = &web.model;
    const int dim = m->head_dim, group = m->n_heads / m->n_kv_heads;
    const float scale = 1.0f / sqrtf((float)dim);
    const uint16_t *k = w->k + (size_t)(layer * w->slots) * (size_t)w->row;
    const uint16_t *v = w->v + (size_t)(layer * w->slots) * (size_t)w->row;
    float *row = w->work, *weights = row + w->row;
    for (int i = 0; i < n; i++) {
        halves_to_floats(k + (size_t)i * (size_t)w->row, w->row, row);
        for (int h = 0; h < m->n_heads; h++)
            weights[h * n + i] = scale * dot(q + h * dim, row + h / group * dim, dim);
    }
    for (int h = 0; h < m->n_heads; h++) {
        float *x = weights + h * n, high = x[0], sum = 0;
        for (int i = 1; i < n; i++) high = x[i] > high ? x[i] : high;
        for (int i = 0; i < n; i++) sum += x[i] = expf(x[i] - high);
        for (int i = 0; i < n; i++) x[i] /= sum;
    }
    memset(out, 0, (size_t)(m->n_heads * dim) * sizeof *out);
    for (int i = 0; i < n; i++) {
        halves_to_floats(v + (size_t)i * (size_t)w->row, w->row, row);
        for (int h = 0; h < m->n_heads; h++) {
            const float weight = weights[h * n + i], *b = row + h / group * dim;
            float *to = out + h * dim;
            for (int c = 0; c < dim; c++) to[c] += weight * b[c];
        }
    }
}

/* The llama_attention of a window. Each query sees the slots as they are at its own token. */
static tkv_status read_window(void *ctx, int layer, const float *q, const float *k, const float *v, int n,
                              float *out) {
    window *w = (window *)ctx;
    const int q_size = web.model.n_heads * web.model.head_dim;
    for (int i = 0; i < n; i++, q += q_size, out += q_size) {
        const int token = web.pos + i;
        const size_t at = (size_t)(layer * w->slots + slot_of(w, token)) * (size_t)w->row;
        for (int c = 0; c < w->row; c++) {
            w->k[at + (size_t)c] = float_to_half(*k++);
            w->v[at + (size_t)c] = float_to_half(*v++);
        }
        attend_window(w, layer, q, token < w->slots ? token + 1 : w->slots, out);
    }
    return TKV_OK;
}

/* >>the talk */
/* Each level codes old tokens in fewer bits than the one before. WARM has 4 bits at all levels, and ARCHIVE the bits of
 * the level. So the tier of a token says how it is stored. */
static void make_ladder(tkv_level *ladder) {
    static const tkv_format archives[LEVELS][2] = {{TKV_FORMAT_DEFAULT, TKV_FORMAT_DEFAULT},
                                                   {TKV_A40, TKV_R40},
                                                   {TKV_A30, TKV_R30},
                                                   {TKV_A25, TKV_R20},
                                                   {TKV_A20, TKV_R15},
                                                   {TKV_A15, TKV_R10}};
    memset(ladder, 0, LEVELS * sizeof *ladder);
    ladder[0].hot_tokens = TKV_UNLIMITED;
    for (int i = 1; i < LEVELS; i++) {
        ladder[i].hot_tokens = RECENT;
        ladder[i].warm_tokens = i == 1 ? TKV_UNLIMITED : i < 4 ? 128 : TKV_OFF;
        ladder[i].warm.k = TKV_A40;
        ladder[i].warm.v = TKV_R40;
        ladder[i].archive.k = archives[i][0];
        ladder[i].archive.v = archives[i][1];
    }
}

static int create_cache(int side, tkv_cache **kv) {
    char reason[256];
    const tkv_status status = tkv_create_ex(&web.cfg[side], NULL, 0, kv, reason, sizeof reason);
    return status == TKV_OK ? 1 : fail("the cache", *reason ? reason : tkv_get_status_text(status));
}

void *web_alloc(int size) { return size < 0 ? NULL : malloc(size ? (size_t)size : 1); }

void web_free(void *p) { free(p); }

const char *web_text(void) { return web.text; }

int web_start(const void *gguf, int size, int budget) {
    llama_model *m = &web.model;
    char reason[256];
    if (!llama_load_memory(gguf, (size_t)size, NULL, 0, m, reason, sizeof reason))
        return fail("the model", reason);
    web.model_name = llama_add_to_checksum((uint64_t)size, gguf, (size_t)size);
    for (int side = 0; side < SIDES; side++) {
        web.cfg[side] = tkv_default_config();
        llama_kv_config(m, &web.cfg[side]);
        web.cfg[side].limits.max_append = CHUNK;
        web.cfg[side].tiers.sink_tokens = SINKS;
        web.of[side].logits = (float *)malloc((size_t)(CHUNK * m->vocab) * sizeof(float));
        if (!web.of[side].logits) return fail("the logits", "out of memory");
    }
    tkv_config *tiered = &web.cfg[TIERED], *exact = &web.cfg[EXACT];
    make_ladder(web.ladder);
    tiered->limits.max_seqs = SEQS;
    tiered->budget.bytes = (size_t)budget;
    tiered->budget.ladder = web.ladder;
    tiered->budget.n_levels = LEVELS;
    tiered->budget.pressure.hysteresis = 0.79f; /* the controller raises the level; the visitor lowers it */
    exact->tiers.hot_tokens = TKV_UNLIMITED;
    exact->tiers.hot.k = exact->tiers.hot.v = TKV_F32;
    if (create_cache(TIERED, &web.of[TIERED].kv) < 0 || create_cache(EXACT, &web.of[EXACT].kv) < 0) return -1;
    const int token_bytes = 2 * m->n_layers * m->n_kv_heads * (m->head_dim + m->v_head_dim);
    if (!create_window(&web.plain, budget / token_bytes) || !create_window(&web.aside, budget / token_bytes))
        return fail("the window", "out of memory");
    for (int seq = 0; seq < SEQS; seq++) {
        web.tokens[seq] = (int *)malloc((size_t)m->context * sizeof(int));
        web.next[seq] = (float *)malloc((size_t)m->vocab * sizeof(float));
        if (!web.tokens[seq] || !web.next[seq]) return fail("the talk", "out of memory");
        web.rng[seq] = 1;
    }
    int tokens[9];
    (void)llama_tokenize(m, " secret", 7, 0, tokens);
    web.secret = tokens[0];
    return web.plain.slots;
}

int web_context(void) { return web.model.context; }

int web_hear(int seq, const char *text, int size) {
    int *tokens = (int *)malloc(((size_t)size + 4) * sizeof *tokens);
    if (!tokens) return fail("the text", "out of memory");
    const int n = llama_tokenize(&web.model, text, (size_t)size, 0, tokens);
    const int has_room = n <= web.model.context - web.n[seq];
    if (has_room) {
        memcpy(web.tokens[seq] + web.n[seq], tokens, (size_t)n * sizeof *tokens);
        web.n[seq] += n;
    }
    free(tokens);
    return has_room ? n : fail("the text", "the model has read as many tokens as it can");
}

void web_unhear(int n) {
    if (n >= web.of[TIERED].n_read && n <= web.n[TALK]) web.n[TALK] = n;
}

static float next_random(uint64_t *state) { /* xorshift*, as in llama2.c: 0 to 1 */
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (float)(*state * 0x2545f4914f6cdd1du >> 40) / 16777216.0f;
}

void web_seed(int seq, int seed) { web.rng[seq] = ((uint64_t)(unsigned)seed + 1) * 0x9e3779b97f4a7c15u; }

static int is_piece(int seq, int i, const char *text) {
    int len = 0;
    const char *piece = i < 0 ? "" : llama_piece(&web.model, -1, web.tokens[seq][i], &len);
    return len == (int)strlen(text) && memcmp(piece, text, (size_t)len) == 0;
}

int web_speak(int seq, float temperature) {
    const int vocab = web.model.vocab;
    if (web.n[seq] >= web.model.context)
        return fail("the speech", "the model has read as many tokens as it can");
    float *weights = (float *)malloc((size_t)vocab * sizeof *weights);
    if (!weights) return fail("the speech", "out of memory");
    memcpy(weights, web.next[seq], (size_t)vocab * sizeof *weights);
    if (is_piece(seq, web.n[seq] - 1, "The")) weights[web.secret] = -1e30f;
    const float high = weights[llama_argmax(weights, vocab)];
    float sum = 0;
    for (int i = 0; i < vocab; i++) sum += weights[i] = expf((weights[i] - high) / temperature);
    float left = next_random(&web.rng[seq]) * sum;
    int token = 0;
    while (token + 1 < vocab && (left -= weights[token]) > 0) token++;
    free(weights);
    web.tokens[seq][web.n[seq]++] = token;
    return token;
}

int web_piece(int seq, int i) {
    int len = 0;
    const char *piece = llama_piece(&web.model, i ? web.tokens[seq][i - 1] : -1, web.tokens[seq][i], &len);
    if (len >= (int)sizeof web.text) len = (int)sizeof web.text - 1;
    memcpy(web.text, piece, (size_t)len);
    web.text[len] = 0;
    return len;
}

/* >>reading */
static tkv_status forward(int side, int seq, const int *tokens, int n, int pos, float *logits, int n_logits) {
    web.pos = pos;
    if (side == PLAIN)
        return llama_forward_with(&web.model, tokens, n, pos, read_window, &web.plain, logits, n_logits);
    return llama_forward(&web.model, web.of[side].kv, seq, tokens, n, logits, n_logits);
}

/* Codes what the wanted level asks for. A level alone codes old tokens when bytes are needed, so the budget is lowered
 * in small steps, and then set again. */
static void follow_level(void) {
    tkv_cache *kv = web.of[TIERED].kv;
    const size_t budget = web.cfg[TIERED].budget.bytes;
    tkv_budget_info now;
    if (!web.wanted_level || tkv_get_budget(kv, &now) != TKV_OK || now.level != web.wanted_level) return;
    for (size_t limit = now.used; now.pending && now.level == web.wanted_level && limit > 4096; limit -= 4096)
        if (tkv_set_budget(kv, limit) != TKV_OK || tkv_get_budget(kv, &now) != TKV_OK) break;
    (void)tkv_set_budget(kv, budget); /* cannot fail: the blocks took no more bytes before */
}

static int *read_count(int side, int seq) { return seq == TALK ? &web.of[side].n_read : &web.n_read[seq]; }

int web_read(int side, int seq, int most) {
    side_state *s = &web.of[side];
    int *n_read = read_count(side, seq), n = web.n[seq] - *n_read;
    const int vocab = web.model.vocab;
    if (n > most) n = most;
    if (n > CHUNK) n = CHUNK;
    if (n < 1) return 0;
    const tkv_status status =
        forward(side, seq, web.tokens[seq] + *n_read, n, *n_read, s->logits, seq == TALK ? n : 1);
    if (status != TKV_OK) return fail_call("a token", side, status);
    *n_read += n;
    s->n_logits = seq == TALK ? n : 0;
    if (side == TIERED)
        memcpy(web.next[seq], s->logits + (size_t)(seq == TALK ? n - 1 : 0) * (size_t)vocab,
               (size_t)vocab * sizeof(float));
    if (side == TIERED) follow_level();
    return n;
}

void web_compare(void) {
    int n = CHUNK;
    for (int side = 0; side < SIDES; side++) {
        if (web.of[side].n_read != web.of[EXACT].n_read) return;
        if (web.of[side].n_logits < n) n = web.of[side].n_logits;
    }
    const size_t vocab = (size_t)web.model.vocab;
    for (int i = 1; i <= n; i++) {
        const float *exact = web.of[EXACT].logits + (size_t)(web.of[EXACT].n_logits - i) * vocab;
        for (int side = PLAIN; side <= TIERED; side++)
            web.divergence[side] += measure_divergence(
                exact, web.of[side].logits + (size_t)(web.of[side].n_logits - i) * vocab, (int)vocab);
    }
    web.n_compared += n;
}

double web_divergence(int side) { return web.n_compared ? web.divergence[side] / web.n_compared : 0; }

int web_compared(void) { return web.n_compared; }

void web_forget_divergence(void) {
    web.divergence[PLAIN] = web.divergence[TIERED] = 0;
    web.n_compared = 0;
}

/* >>questions */
int web_ask(int side, const char *question, int size, int n_digits) {
    const int vocab = web.model.vocab, before = web.of[side].n_read;
    int *tokens = (int *)malloc(((size_t)size + 4 + ANSWER) * sizeof *tokens), used = 0;
    float *logits = (float *)malloc((size_t)vocab * sizeof *logits);
    char answer[ANSWER + 1] = "";
    tkv_status status = tokens && logits ? TKV_OK : TKV_ERR_NOMEM;
    int n = status == TKV_OK ? llama_tokenize(&web.model, question, (size_t)size, 0, tokens) : 0;
    if (n_digits > ANSWER) n_digits = ANSWER;
    if (before + n + ANSWER > web.model.context) status = TKV_ERR_CAPACITY;
    if (side == PLAIN) copy_window(&web.aside, &web.plain);
    for (int i = 0; i < n && status == TKV_OK; i += CHUNK)
        status = forward(side, TALK, tokens + i, n - i < CHUNK ? n - i : CHUNK, before + i, logits, 1);
    for (int i = 0; used < n_digits && i < ANSWER && status == TKV_OK; i++, n++) {
        int len;
        tokens[n] = llama_argmax(logits, vocab);
        const char *piece = llama_piece(&web.model, tokens[n - 1], tokens[n], &len);
        for (int j = 0; j < len && used < n_digits; j++)
            if (used > 0 || piece[j] != ' ')
                answer[used++] = piece[j] < 32 || piece[j] > 126 ? '?' : piece[j];
        if (used < n_digits) status = forward(side, TALK, tokens + n, 1, before + n, logits, 1);
    }
    const tkv_status asked = status;
    if (side == PLAIN) copy_window(&web.plain, &web.aside);
    else if (tokens && logits) status = tkv_seq_truncate(web.of[side].kv, TALK, before);
    free(tokens);
    free(logits);
    if (asked != TKV_OK || status != TKV_OK) return fail_call("the question", side, asked ? asked : status);
    snprintf(web.text, sizeof web.text, "%s", answer);
    return used;
}

/* >>endings */
int web_fork(void) {
    tkv_cache *kv = web.of[TIERED].kv;
    for (int seq = ENDING_A; seq <= ENDING_B; seq++) {
        tkv_status status = tkv_seq_reset(kv, seq);
        if (status == TKV_OK) status = tkv_seq_fork(kv, TALK, seq, TKV_UNLIMITED);
        if (status != TKV_OK) return fail_call("the fork", TIERED, status);
        web.n[seq] = web.n_read[seq] = web.n[TALK];
        memcpy(web.tokens[seq], web.tokens[TALK], (size_t)web.n[TALK] * sizeof(int));
        memcpy(web.next[seq], web.next[TALK], (size_t)web.model.vocab * sizeof(float));
    }
    return web.n[TALK];
}

int web_keep(int ending) {
    tkv_cache *kv = web.of[TIERED].kv;
    int sources[SEQS] = {TALK, ENDING_A, ENDING_B};
    sources[TALK] = ending; /* both change places, which takes no memory */
    sources[ending] = TALK;
    tkv_status status = tkv_seq_reorder(kv, 0, sources, SEQS);
    if (status == TKV_OK && ending != TALK) {
        web.n[TALK] = web.n[ending];
        web.of[TIERED].n_read = web.n_read[ending];
        memcpy(web.tokens[TALK], web.tokens[ending], (size_t)web.n[ending] * sizeof(int));
        memcpy(web.next[TALK], web.next[ending], (size_t)web.model.vocab * sizeof(float));
        web.rng[TALK] = web.rng[ending];
    }
    for (int seq = ENDING_A; seq <= ENDING_B && status == TKV_OK; seq++) status = tkv_seq_reset(kv, seq);
    return status == TKV_OK ? web.n[TALK] : fail_call("the ending", TIERED, status);
}

/* >>saving */
static tkv_status attend_only(void *ctx, int layer, const float *q, const float *k, const float *v, int n,
                              float *out) {
    (void)k;
    (void)v;
    return tkv_attend((tkv_cache *)ctx, TALK, layer, q, n, out);
}

/* Computes the logits behind the last of n tokens of a talk again: as a token by itself, whatever chunk it came in. */
static tkv_status think_again(tkv_cache *kv, const int *tokens, int n) {
    if (n == 0) return TKV_OK;
    web.of[TIERED].n_logits = 0;
    return llama_forward_with(&web.model, tokens + n - 1, 1, n - 1, attend_only, kv, web.next[TALK], 1);
}

void *web_save(void) {
    tkv_save_params p;
    const int n = web.of[TIERED].n_read;
    int *numbers = (int *)malloc((size_t)(FIRST_NUMBERS + n) * sizeof *numbers);
    void *bytes = NULL;
    memset(&p, 0, sizeof p);
    p.seq = TKV_ALL_SEQS;
    p.model = &web.model_name;
    p.model_bytes = sizeof web.model_name;
    tkv_status status = numbers ? think_again(web.of[TIERED].kv, web.tokens[TALK], n) : TKV_ERR_NOMEM;
    if (status == TKV_OK) {
        numbers[0] = FILE_VERSION;
        numbers[1] = web.wanted_level;
        memcpy(&numbers[2], &web.rng[TALK], sizeof web.rng[TALK]);
        memcpy(&numbers[FIRST_NUMBERS], web.tokens[TALK], (size_t)n * sizeof *numbers);
        p.tokens = numbers;
        p.n_tokens = FIRST_NUMBERS + n;
        status = tkv_seq_save(web.of[TIERED].kv, &p, NULL, 0, &web.n_saved);
    }
    if (status == TKV_OK && !(bytes = malloc(web.n_saved))) status = TKV_ERR_NOMEM;
    if (status == TKV_OK) status = tkv_seq_save(web.of[TIERED].kv, &p, bytes, web.n_saved, NULL);
    free(numbers);
    if (status == TKV_OK) return bytes;
    (void)fail_call("saving", TIERED, status);
    free(bytes);
    return NULL;
}

int web_saved_bytes(void) { return (int)web.n_saved; }

static int are_numbers_of_a_talk(const int *numbers, const tkv_load_info *info, const tkv_cache *kv) {
    if (tkv_get_length(kv, TALK, TKV_ALL_LAYERS) != info->n_tokens) return 0; /* endings have some of them */
    if (info->n_saved_tokens != FIRST_NUMBERS + info->n_tokens || numbers[0] != FILE_VERSION) return 0;
    if (numbers[1] < 0 || numbers[1] >= LEVELS) return 0;
    for (int i = FIRST_NUMBERS; i < info->n_saved_tokens; i++)
        if (numbers[i] < 0 || numbers[i] >= web.model.vocab) return 0;
    return 1;
}

static void forget_window_and_exact(void) {
    (void)tkv_seq_reset(web.of[EXACT].kv, TALK); /* cannot fail: there is this sequence */
    web.of[PLAIN].n_read = web.of[EXACT].n_read = 0;
    web.of[PLAIN].n_logits = web.of[EXACT].n_logits = 0;
    web_forget_divergence();
}

int web_load(const void *bytes, int size) {
    const int capacity = FIRST_NUMBERS + web.model.context;
    int *numbers = (int *)malloc((size_t)capacity * sizeof *numbers);
    tkv_load_params p;
    tkv_load_info info;
    tkv_cache *kv = NULL;
    memset(&p, 0, sizeof p);
    p.seq = TKV_ALL_SEQS;
    p.model = &web.model_name;
    p.model_bytes = sizeof web.model_name;
    p.tokens = numbers;
    p.token_capacity = capacity;
    if (!numbers) return fail("the file", "out of memory");
    int n = create_cache(TIERED, &kv);
    if (n > 0) {
        tkv_status status = tkv_seq_load(kv, &p, bytes, (size_t)size, &info);
        if (status == TKV_OK && !are_numbers_of_a_talk(numbers, &info, kv))
            n = fail("the file", "it is no talk of this page");
        else if (status == TKV_OK) status = think_again(kv, numbers + FIRST_NUMBERS, info.n_tokens);
        if (status != TKV_OK)
            n = fail("the file",
                     *tkv_get_last_error(kv) ? tkv_get_last_error(kv) : tkv_get_status_text(status));
    }
    if (n > 0) {
        n = info.n_tokens;
        tkv_destroy(web.of[TIERED].kv);
        web.of[TIERED].kv = kv;
        web.of[TIERED].n_read = web.n[TALK] = n;
        web.wanted_level = numbers[1];
        memcpy(&web.rng[TALK], &numbers[2], sizeof web.rng[TALK]);
        memcpy(web.tokens[TALK], &numbers[FIRST_NUMBERS], (size_t)n * sizeof *numbers);
        forget_window_and_exact();
    } else if (kv) tkv_destroy(kv);
    free(numbers);
    return n;
}

int web_reset(void) {
    tkv_cache *kv = NULL;
    if (create_cache(TIERED, &kv) < 0) return -1;
    tkv_destroy(web.of[TIERED].kv);
    web.of[TIERED].kv = kv;
    web.of[TIERED].n_read = web.of[TIERED].n_logits = 0;
    for (int seq = 0; seq < SEQS; seq++) web.n[seq] = web.n_read[seq] = 0;
    web.wanted_level = 0;
    forget_window_and_exact();
    return 0;
}

/* >>reports */
int web_set_level(int level) {
    const tkv_status status = tkv_set_level(web.of[TIERED].kv, level);
    if (status != TKV_OK) return fail_call("the level", TIERED, status);
    web.wanted_level = level;
    follow_level();
    return level;
}

int web_level(void) {
    tkv_budget_info info;
    return tkv_get_budget(web.of[TIERED].kv, &info) == TKV_OK ? info.level : -1;
}

double web_level_bits(int level) {
    tkv_level_info info;
    return tkv_get_level(web.of[TIERED].kv, level, &info) == TKV_OK ? 16 * info.memory_factor : 0;
}

int web_length(int seq) { return web.n[seq]; }

double web_bytes(int side) {
    tkv_memory_info info;
    const int n = web.of[PLAIN].n_read < web.plain.slots ? web.of[PLAIN].n_read : web.plain.slots;
    if (side == PLAIN) return 2.0 * web.model.n_layers * web.plain.row * 2 * n;
    return tkv_get_memory(web.of[side].kv, &info) == TKV_OK ? (double)info.total : 0;
}

double web_ending_bytes(int ending, int shared) {
    tkv_seq_memory_info info;
    if (tkv_seq_get_memory(web.of[TIERED].kv, ending, &info) != TKV_OK) return 0;
    return (double)(shared ? info.shared : info.own);
}

int web_cells(int side, uint8_t *cells) {
    const int n = web.of[side].n_read, first = n - (web.plain.slots - SINKS);
    for (int i = 0; side == PLAIN && i < n; i++)
        cells[i] = i < SINKS || i >= first ? (uint8_t)TKV_TIER_HOT : (uint8_t)TKV_TOKEN_GONE;
    if (side != PLAIN && n > 0 && tkv_get_tiers(web.of[side].kv, TALK, 0, 0, n, cells) != TKV_OK) return 0;
    return n;
}

const char *web_fingerprint(int seq) {
    const uint64_t sum = llama_add_to_checksum(0, web.next[seq], (size_t)web.model.vocab * sizeof(float));
    snprintf(web.text, sizeof web.text, "%08lx%08lx", (unsigned long)(sum >> 32),
             (unsigned long)(sum & 0xffffffffu));
    return web.text;
}
