/*
 * npc.c - characters of a game talk, and all they remember lies in one arena of fixed size.
 *
 * cc -O2 -o npc examples/npc.c examples/tieredkv.c -lm && ./npc examples/data/demo.gguf --seed 5 -t 0.7
 *
 * The world is read once. Each character is a fork of it and adds a few lines of its own. The program prints a scene:
 *   - characters answer a stranger, and one is interrupted: the speech is cut in the middle (tkv_seq_truncate)
 *   - one forgets what was said about a number (tkv_seq_remove); the others still know it
 *   - one forgets a speech and closes the gap (tkv_seq_shift), so its newest words are near its oldest again
 *   - questions are put to a fork of a character, so the character never hears them and keeps its memory as it is
 * Then it prints the bytes of each character, shared ones apart (tkv_seq_get_memory). At last it runs a loop of 60
 * frames a second: a frame computes at most one token, and the rest of it belongs to tkv_maintain.
 *
 * `./npc MODEL --save NAME` saves each character in a file after the scene, and loads them into an empty arena. The
 * logits of their next words have the same bits. Then they speak once more. `./npc MODEL --load NAME` loads them in
 * another run, where they say the same words. Loaded characters share nothing, so their arena is larger. One that was
 * never saved may say other words: the arena was full, and blocks that it shares age later than its own.
 *
 * The model has 3 million weights. It knows Shakespeare by the sound alone, but it remembers numbers. Another --seed
 * plays another scene. In this order: the world, speaking, the scene, memory, saving, frames, main.
 */
#define PROGRAM "npc"
#include "program.h" /* before system headers */

enum {
    CHARACTERS = 6,
    MEMORY = 1024, /* tokens that a character can remember */
    CHUNK = 64,
    REPLY = 48, /* most tokens of a reply */
    FRAMES = 600,
    QUEUE = 128
};
enum { ARENA = 2 << 20 }; /* bytes of the cache: fixed, whatever the characters do */
enum {
    LOADED_ARENA = 3 << 20,
    SCRATCH = 1 << 20
}; /* loaded characters share nothing; for saving and loading */
static const double frame_seconds = 1.0 / 60.0;

/* >>the world */
static const char world[] = "\nPRINCE:\n"
                            "Good people of Verona, hear me speak:\n"
                            "The gates are shut tonight, and none shall pass\n"
                            "But he that knows the number of the watch.\n"
                            "Our ancient quarrel sleeps, and shall not wake;\n"
                            "Who draws his sword within these walls shall die.\n"
                            "The secret number of Lucentio is 58213.\n"
                            "\nFRIAR LAURENCE:\n"
                            "My gracious lord, the night is come upon us,\n"
                            "And in the churchyard walks a stranger yet,\n"
                            "A man of honest face, that asks of all\n"
                            "What news there is of love, of death, of war.\n"
                            "The secret number of Richard is 40697.\n"
                            "\nPRINCE:\n"
                            "Then give him answer, as becomes the time,\n"
                            "And let him know that Verona is no place\n"
                            "For traitors, nor for such as come to spy.\n"
                            "The secret number of Claudio is 93154.\n"
                            "\nFRIAR LAURENCE:\n"
                            "I will, my lord; and here he comes. Good night.\n"
                            "\nSTRANGER:\n"
                            "God save you all. I am a stranger here,\n"
                            "And I would know what manner of men you are.\n";

typedef struct character {
    const char *name, *persona;
    float *logits;    /* of its next token */
    uint64_t rng;     /* state of its random numbers */
    int queue[QUEUE]; /* words that it hears in the next frames */
    int n_queued, n_heard, n_spoken;
    int last; /* its newest token */
} character;

static const char *const cast[CHARACTERS][2] = {
    {"ROMEO", "I am young Romeo, that do sigh for love,\nAnd all my thoughts are but of Juliet.\n"},
    {"JULIET", "I am the daughter of old Capulet,\nAnd love the man whom I was born to hate.\n"},
    {"MERCUTIO", "I am Mercutio, kinsman to the prince;\nI jest with death, and mock at them that love.\n"},
    {"KATHARINA", "They call me Katharina the curst;\nI will be angry: what hast thou to do?\n"},
    {"PETRUCHIO", "I come to wive it wealthily in Padua;\nIf wealthily, then happily in Padua.\n"},
    {"MENENIUS", "I am known to be a humorous patrician,\nAnd one that loves a cup of burning wine.\n"}};
enum { ROMEO, JULIET, MERCUTIO, KATHARINA, PETRUCHIO, MENENIUS };
enum { ASIDE = CHARACTERS, SEQUENCES }; /* a fork of the character that is asked */

typedef struct game {
    options opt;
    llama_model model;
    tkv_config cfg;
    void *arena, *scratch;
    tkv_cache *kv;
    character of[SEQUENCES];
    int speaking;            /* the sequence whose layers are computed */
    double cache;            /* seconds in the cache, of the present frame */
    int secret_token;        /* begins the word after "The" in a line that tells a secret number */
    choice *space;           /* for sample() */
    const char *save, *load; /* NULL, or the beginning of the characters' files */
    char model_name[MODEL_NAME];
} game;

static void check(const game *g, tkv_status status, const char *what) {
    if (status == TKV_OK) return;
    fail("%s: %s%s%s", what, tkv_get_status_text(status), *tkv_get_last_error(g->kv) ? ": " : "",
         tkv_get_last_error(g->kv));
}

/* The position of a character's next token: behind its last one, which may have moved. */
static int next_position(const game *g, int seq) {
    const int n = tkv_get_length(g->kv, seq, TKV_ALL_LAYERS);
    int position = -1;
    if (n > 0) check(g, tkv_get_positions(g->kv, seq, 0, n - 1, 1, &position), "position");
    return position + 1;
}

/* The attention of llama_forward_with, and its time. */
static tkv_status attend(void *ctx, int layer, const float *q, const float *k, const float *v, int n,
                         float *out) {
    game *g = (game *)ctx;
    const double start = seconds();
    tkv_status status = tkv_append(g->kv, g->speaking, layer, k, v, n);
    if (status == TKV_OK) status = tkv_attend(g->kv, g->speaking, layer, q, n, out);
    g->cache += seconds() - start;
    return status;
}

/* The same without the append. */
static tkv_status attend_only(void *ctx, int layer, const float *q, const float *k, const float *v, int n,
                              float *out) {
    game *g = (game *)ctx;
    (void)k;
    (void)v;
    return tkv_attend(g->kv, g->speaking, layer, q, n, out);
}

/* A character hears or says n tokens. */
static void remember(game *g, int seq, const int *tokens, int n) {
    while (n > 0) {
        const int chunk = n < CHUNK ? n : CHUNK;
        const double start = seconds();
        check(g, tkv_seq_begin(g->kv, seq), "step");
        g->cache += seconds() - start;
        g->speaking = seq;
        tkv_status status = llama_forward_with(&g->model, tokens, chunk, next_position(g, seq), attend, g,
                                               g->of[seq].logits, 1);
        if (status == TKV_OK) status = tkv_seq_commit(g->kv, seq);
        check(g, status, "a token; give the arena more bytes (ARENA)");
        tokens += chunk;
        n -= chunk;
        g->of[seq].last = tokens[-1];
    }
}

static int tokens_of(const game *g, const char *text, int *tokens, int most) {
    if ((int)strlen(text) > most) fail("a text is longer than %d bytes", most);
    return llama_tokenize(&g->model, text, strlen(text), 0, tokens);
}

static void hear(game *g, int seq, const char *text) {
    int tokens[2000];
    remember(g, seq, tokens, tokens_of(g, text, tokens, 2000));
}

static void empty_arena(game *g) {
    char reason[256];
    memset(g->arena, 0, g->cfg.budget.bytes);
    tkv_status status =
        tkv_create_in_place(&g->cfg, g->arena, g->cfg.budget.bytes, &g->kv, reason, sizeof reason);
    if (status != TKV_OK) fail("the arena: %s", reason[0] ? reason : tkv_get_status_text(status));
}

/* Begins the game: reads the world once, forks the characters from it, and gives each its own lines. */
static void begin_game(game *g) {
    empty_arena(g);
    hear(g, 0, world);
    for (int i = 0; i < CHARACTERS; i++) {
        character *c = &g->of[i];
        c->rng = rng_seed(&g->opt) + (uint64_t)i * 0x9e3779b97f4a7c15u;
        c->n_queued = c->n_heard = c->n_spoken = 0;
        if (i > 0) check(g, tkv_seq_fork(g->kv, 0, i, TKV_UNLIMITED), "fork");
    }
    for (int i = 0; i < CHARACTERS; i++) {
        char text[256];
        snprintf(text, sizeof text, "\n%s:\n%s", g->of[i].name, g->of[i].persona);
        hear(g, i, text);
    }
}

/* >>speaking */
static int choose_token(game *g, int seq) {
    return sample(g->of[seq].logits, g->model.vocab, &g->opt, &g->of[seq].rng, g->space);
}

static int ends_line(const game *g, int token) {
    int len;
    const char *piece = llama_piece(&g->model, -1, token, &len);
    return len > 0 && piece[len - 1] == '\n';
}

/* A character composes a speech of at most REPLY tokens, which it remembers. It ends with an empty line, or with a line
 * behind the middle. Returns the number of tokens. */
static int compose(game *g, int seq, int *tokens) {
    character *c = &g->of[seq];
    char line[REPLY * 32] = "";
    int used = 0, n = 0;
    while (n < REPLY) {
        int len;
        /* Without this the model tells a secret in every other line, as its training text does. */
        if (strcmp(line, "The") == 0) c->logits[g->secret_token] = -1e30f;
        tokens[n] = choose_token(g, seq);
        const char *piece = llama_piece(&g->model, c->last, tokens[n], &len);
        remember(g, seq, &tokens[n], 1);
        if (len < 0 || len >= 32) fail("the model's tokens are too long for this program");
        memcpy(line + used, piece, (size_t)len);
        used += len;
        line[used] = 0;
        if (!ends_line(g, tokens[n++])) continue;
        if (n > REPLY / 2 || (n > 1 && (used == len || len > 1))) break;
        line[used = 0] = 0;
    }
    return n;
}

/* Prints tokens of a speech, without its empty lines. */
static void print_tokens(const game *g, const int *tokens, int n) {
    int at_line_start = 1;
    for (int i = 0; i < n; i++) {
        int len;
        const char *piece = llama_piece(&g->model, i ? tokens[i - 1] : -1, tokens[i], &len);
        for (int k = 0; k < len; k++) {
            if (piece[k] != '\n' || !at_line_start) putchar(piece[k]);
            at_line_start = piece[k] == '\n';
        }
    }
    fflush(stdout);
}

static void say(game *g, int seq) {
    int tokens[REPLY];
    const int n = compose(g, seq, tokens);
    print_tokens(g, tokens, n);
    if (!ends_line(g, tokens[n - 1])) printf("\n"); /* too long a speech */
}

/* Prints a line of the stranger, which a character hears, and the name of the one who answers. */
static void address(game *g, int seq, const char *line) {
    char text[256];
    snprintf(text, sizeof text, "\nSTRANGER:\n%s\n\n%s:\n", line, g->of[seq].name);
    printf("%s", text);
    hear(g, seq, text);
}

enum { DIGITS = 5 };

/* Asks a character for a secret number, and takes its likeliest answer. A fork of it hears the question and answers.
 * Without a fork, tkv_seq_truncate would take question and answer back, and the character's newest tokens would stay in
 * fewer bits than before (manual, recipe R22). */
static void ask_number(game *g, int seq, const char *name, char *answer) {
    int n = 0;
    char text[128];
    snprintf(text, sizeof text, "\nThe secret number of %s is", name);
    check(g, tkv_seq_fork(g->kv, seq, ASIDE, TKV_UNLIMITED), "fork");
    hear(g, ASIDE, text);
    while (n < DIGITS) {
        int len;
        const int token = llama_argmax(g->of[ASIDE].logits, g->model.vocab);
        const char *piece = llama_piece(&g->model, g->of[ASIDE].last, token, &len);
        for (int i = 0; i < len && n < DIGITS; i++)
            if (piece[i] != ' ') answer[n++] = piece[i] < 32 || piece[i] > 126 ? '?' : piece[i];
        if (len == 0) break;
        remember(g, ASIDE, &token, 1);
    }
    answer[n] = 0;
    check(g, tkv_seq_reset(g->kv, ASIDE), "reset");
}

/* >>the scene */
/* The positions of a part of the world: *first .. *end - 1, in every character that has not lost or moved it. */
static void find_words(const game *g, const char *text, int *first, int *end) {
    int all[2000], words[1000], n, k;
    n = tokens_of(g, world, all, 2000);
    k = tokens_of(g, text, words, 1000);
    for (*first = 0; *first + k <= n; ++*first)
        if (memcmp(all + *first, words, (size_t)k * sizeof *words) == 0) break;
    if (*first + k > n) fail("the world does not say: %s", text);
    *end = *first + k;
}

static void print_answers(game *g, const char *name, int a, int b) {
    char answer[2][DIGITS + 1];
    ask_number(g, a, name, answer[0]);
    ask_number(g, b, name, answer[1]);
    printf("  The secret number of %s: %s says %s, %s says %s.\n", name, g->of[a].name, answer[0],
           g->of[b].name, answer[1]);
}

static void play_scene(game *g) {
    static const char *const questions[][2] = {{"What dost thou know of love?", "Wilt thou die for it?"},
                                               {"What dost thou fear?", "And whom dost thou trust?"},
                                               {"They say thou art a scold.", "Wilt thou be my wife?"}};
    static const int who[] = {ROMEO, JULIET, KATHARINA};
    int first, end, n, tokens[REPLY];
    const double start = seconds();
    printf("\nSTRANGER:\nGod save you all. I am a stranger here,\nAnd I would know what manner of men you "
           "are.\n");
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 2; k++) {
            address(g, who[i], questions[i][k]);
            say(g, who[i]);
        }

    address(g, MERCUTIO, "What is a sword?");
    n = compose(g, MERCUTIO, tokens); /* the game shows it word by word */
    const int length = tkv_get_length(g->kv, MERCUTIO, TKV_ALL_LAYERS);
    int shown = (n + 1) / 2;
    while (shown > 1 && ends_line(g, tokens[shown - 1])) shown--;
    print_tokens(g, tokens, shown);
    /* of a speech of REPLY tokens a cut loses little: the tail of exact tokens is shorter by what was cut */
    check(g, tkv_seq_truncate(g->kv, MERCUTIO, length - n + shown), "truncate");
    g->of[MERCUTIO].last = tokens[shown - 1];
    hear(g, MERCUTIO, "--\n");
    printf("--\n\n[MERCUTIO is interrupted: %d of %d tokens were never said.]\n", n - shown, n);
    address(g, MERCUTIO, "Peace, no more of swords! Speak of the prince.");
    say(g, MERCUTIO);

    printf("\n[JULIET forgets a number that all have heard. The others share the bytes, and keep it.]\n");
    print_answers(g, "Claudio", JULIET, ROMEO);
    find_words(g, "The secret number of Claudio is 93154.", &first, &end);
    check(g, tkv_seq_remove(g->kv, JULIET, first, end), "remove");
    printf("  Positions %d to %d of JULIET are removed.\n", first, end - 1);
    print_answers(g, "Claudio", JULIET, ROMEO);

    printf("\n[KATHARINA forgets the friar's first speech. What came later moves to its place.]\n");
    find_words(g,
               "My gracious lord, the night is come upon us,\nAnd in the churchyard walks a stranger yet,\n"
               "A man of honest face, that asks of all\nWhat news there is of love, of death, of war.",
               &first, &end);
    n = next_position(g, KATHARINA);
    check(g, tkv_seq_remove(g->kv, KATHARINA, first, end), "remove");
    check(g, tkv_seq_shift(g->kv, KATHARINA, end, TKV_UNLIMITED, first - end), "shift");
    printf("  Her next word has position %d, before %d. No key was touched.\n", next_position(g, KATHARINA),
           n);
    print_answers(g, "Lucentio", KATHARINA, ROMEO);
    print_answers(g, "Richard", KATHARINA, ROMEO);
    address(g, KATHARINA, "Art thou angry still?");
    say(g, KATHARINA);
    printf("\n[%.2f s of processor time]\n", seconds() - start);
}

/* >>memory */
static void print_memory(const game *g) {
    tkv_memory_info mem;
    tkv_budget_info budget;
    double apart = 0, once = 0;
    size_t tokens = 0;
    check(g, tkv_get_memory(g->kv, &mem), "memory");
    check(g, tkv_get_budget(g->kv, &budget), "budget");
    printf("\n  character     tokens          own       shared   its part of shared\n");
    for (int i = 0; i < CHARACTERS; i++) {
        tkv_seq_memory_info m;
        check(g, tkv_seq_get_memory(g->kv, i, &m), "memory of a character");
        const int n = tkv_get_length(g->kv, i, TKV_ALL_LAYERS);
        printf("  %-10s %9d %12s %12s %12s\n", g->of[i].name, n, commas((double)m.own),
               commas((double)m.shared), commas((double)m.share));
        apart += (double)(m.own + m.shared);
        once += (double)(m.own + m.share);
        tokens += (size_t)n;
    }
    const double fp16 = 2.0 * g->model.n_layers * g->model.n_kv_heads *
                        (g->model.head_dim + g->model.v_head_dim) * (double)tokens;
    printf("\n  blocks      %s bytes; without sharing %s, in FP16 %s\n", commas(once), commas(apart),
           commas(fp16));
    printf("  arena       %s bytes: %s used, level %d of %d. The cache allocated nothing.\n",
           commas((double)g->cfg.budget.bytes), commas((double)budget.used), budget.level,
           budget.n_levels - 1);
}

/* >>saving */
/* A file has the character's memory, with what it shared, and in numbers of the program its newest token and the state
 * of its random numbers. */
enum { NUMBERS = 3 };

static saved file_of(const game *g, const char *name, int seq, char *path, size_t size) {
    if (snprintf(path, size, "%s-%s.tkv", name, g->of[seq].name) >= (int)size)
        fail("%s: too long a name", name);
    saved s = saved_at(path, g->model_name, seq);
    s.scratch = g->scratch;
    s.scratch_bytes = SCRATCH;
    return s;
}

static saved save_character(game *g, const char *name, int seq) {
    const character *c = &g->of[seq];
    const uint32_t low = (uint32_t)(c->rng & 0xffffffffu), high = (uint32_t)(c->rng >> 32);
    char path[1024];
    int numbers[NUMBERS];
    saved s = file_of(g, name, seq, path, sizeof path);
    numbers[0] = c->last;
    memcpy(&numbers[1], &low, sizeof low);
    memcpy(&numbers[2], &high, sizeof high);
    s.numbers = numbers;
    s.n_numbers = NUMBERS;
    const tkv_status status = save_sequence(g->kv, &s);
    if (status != TKV_OK) fail("cannot save to %s: %s", path, saved_fault(g->kv, status));
    return s;
}

static saved load_character(game *g, const char *name, int seq) {
    character *c = &g->of[seq];
    char path[1024];
    uint32_t low, high;
    saved s = file_of(g, name, seq, path, sizeof path);
    const tkv_status status = load_sequence(g->kv, &s);
    if (status != TKV_OK) fail("cannot load %s: %s", path, saved_fault(g->kv, status));
    if (s.n_numbers != NUMBERS || !are_tokens(&g->model, s.numbers, 1))
        fail("%s has a sequence that npc did not save", path);
    memcpy(&low, &s.numbers[1], sizeof low);
    memcpy(&high, &s.numbers[2], sizeof high);
    c->last = s.numbers[0];
    c->rng = (uint64_t)high << 32 | low;
    free(s.numbers);
    return s;
}

/* Computes the logits of a character's next token: its newest one is evaluated again, and not appended. Returns a hash
 * of their bits. */
static uint64_t think(game *g, int seq) {
    character *c = &g->of[seq];
    g->speaking = seq;
    check(g,
          llama_forward_with(&g->model, &c->last, 1, next_position(g, seq) - 1, attend_only, g, c->logits, 1),
          "attention");
    return llama_add_to_checksum(0, c->logits, (size_t)g->model.vocab * sizeof *c->logits);
}

/* Saves all characters, loads them into an empty arena, and compares what they would say next. */
static void save_and_load(game *g) {
    saved s[CHARACTERS];
    uint64_t thought[CHARACTERS];
    int same = 0;
    for (int i = 0; i < CHARACTERS; i++) {
        thought[i] = think(g, i);
        s[i] = save_character(g, g->save, i);
    }
    tkv_destroy(g->kv);
    g->cfg.budget.bytes = LOADED_ARENA;
    empty_arena(g);
    printf("\n  saved and loaded    bytes      a token     ms, saved    ms, loaded\n");
    for (int i = 0; i < CHARACTERS; i++) {
        const saved loaded = load_character(g, g->save, i);
        same += think(g, i) == thought[i];
        printf("  %-10s %14s %12s %13.1f %13.1f\n", g->of[i].name, commas((double)s[i].bytes),
               commas((double)s[i].bytes / s[i].n_tokens), 1e3 * s[i].seconds, 1e3 * loaded.seconds);
    }
    printf("  In an empty arena %d of %d go on with the same bits.\n", same, CHARACTERS);
    if (same < CHARACTERS) exit(1);
}

/* The loaded characters talk. They do so in the same words each time that they are loaded. */
static void play_epilogue(game *g) {
    for (int i = 0; i < CHARACTERS; i++) {
        address(g, i, "And what sayst thou?");
        say(g, i);
    }
}

/* >>frames */
typedef struct frame_times {
    double whole[FRAMES], cache[FRAMES], maintain[FRAMES];
    int n_tokens, n_recoded, n_over; /* n_over: frames that took longer than they may */
} frame_times;

static int is_time_up(void *user) { return seconds() >= *(const double *)user; }

/* Fills the queue of a character with a cue, one token for each of its next frames. */
static void give_cue(game *g, int seq) {
    static const char *const cues[] = {"What news?", "Speak on.", "And then?", "Why so?",
                                       "Is that the truth?"};
    character *c = &g->of[seq];
    char text[128];
    snprintf(text, sizeof text, "\nSTRANGER:\n%s\n\n%s:\n", cues[(c->n_spoken + seq) % 5], c->name);
    c->n_queued = tokens_of(g, text, c->queue, QUEUE);
    c->n_heard = 0;
}

/* A loop of a game, with a new game in the arena. Characters take turns. with_maintain 0: a frame's rest is idle. */
static void run_frames(game *g, int with_maintain, frame_times *t) {
    int seq = 0, said = 0;
    memset(t, 0, sizeof *t);
    begin_game(g);
    give_cue(g, seq);
    for (int frame = 0; frame < FRAMES; frame++) {
        const double start = seconds();
        double deadline = start + frame_seconds;
        character *c = &g->of[seq];
        g->cache = 0;
        int token = c->n_heard < c->n_queued ? c->queue[c->n_heard++] : -1;
        if (token < 0) {
            token = choose_token(g, seq);
            said++;
        }
        remember(g, seq, &token, 1);
        t->n_tokens++;
        const double spoken = seconds();
        int done = 0;
        if (with_maintain) check(g, tkv_maintain(g->kv, INT_MAX, is_time_up, &deadline, &done), "maintain");
        t->n_recoded += done;
        t->maintain[frame] = seconds() - spoken;
        t->cache[frame] = g->cache + t->maintain[frame];
        t->whole[frame] = spoken - start + t->maintain[frame];
        t->n_over += t->whole[frame] > frame_seconds;
        if (said < REPLY / 2) continue;
        said = 0; /* the next character's turn; the others are silent */
        c->n_spoken++;
        seq = (seq + 1) % CHARACTERS;
        give_cue(g, seq);
    }
    tkv_destroy(g->kv);
}

static int by_time(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_times(const char *what, double *times) {
    qsort(times, FRAMES, sizeof *times, by_time);
    printf("  %-34s %8.3f %8.3f %8.3f\n", what, 1e3 * times[FRAMES / 2], 1e3 * times[FRAMES * 99 / 100],
           1e3 * times[FRAMES - 1]);
}

static void print_frames(game *g) {
    static frame_times t;
    printf("\n  %d frames of 1/60 s, ms of processor time      median      99 %%    worst\n", FRAMES);
    for (int with = 1; with >= 0; with--) {
        run_frames(g, with, &t);
        print_times(with ? "frame, the rest to tkv_maintain" : "frame, the rest idle", t.whole);
        print_times("  of it the cache", t.cache);
        if (with) print_times("  of it tkv_maintain", t.maintain);
        if (with)
            printf("  %d tokens, %d blocks recoded ahead, %d frames too long\n", t.n_tokens, t.n_recoded,
                   t.n_over);
    }
}

/* >>main */
static parsed parse_own_option(void *ctx, const char *name, const char *value) {
    game *g = (game *)ctx;
    if (!value) return UNKNOWN;
    if (strcmp(name, "--save") == 0) g->save = value;
    else if (strcmp(name, "--load") == 0) g->load = value;
    else return UNKNOWN;
    return *value ? WITH_VALUE : BAD_VALUE;
}

int main(int argc, char **argv) {
    static const char usage[] =
        "npc MODEL [options]\n" PROGRAM_HELP
        "  --save NAME        saves each character after the scene: NAME-ROMEO.tkv, ...\n"
        "  --load NAME        plays no scene, and goes on with saved characters\n"
        "\nThe plan of the cache:\n";
    game g;
    memset(&g, 0, sizeof g);
    g.cfg = tkv_default_config();
    parse_options(argc, argv, usage, &g.opt, &g.cfg, parse_own_option, &g);
    if (!g.opt.model) fail("no model; try: npc examples/data/demo.gguf");
    load(&g.opt, &g.model, &g.cfg);
    if (!g.cfg.model.rope.dim) fail("the model's RoPE is of a kind that tkv_seq_shift does not know");
    g.cfg.limits.max_seqs = SEQUENCES;
    g.cfg.limits.max_tokens = MEMORY;
    g.cfg.limits.max_append = CHUNK;
    g.cfg.budget.bytes = ARENA;
    if (g.load) g.cfg.budget.bytes = LOADED_ARENA;
    g.arena = allocate(LOADED_ARENA, 1); /* of the game; the cache allocates nothing */
    g.scratch = allocate(SCRATCH, 1);
    g.space = (choice *)allocate((size_t)g.model.vocab, sizeof *g.space);
    for (int i = 0; i < CHARACTERS; i++) {
        g.of[i].name = cast[i][0];
        g.of[i].persona = cast[i][1];
    }
    for (int i = 0; i < SEQUENCES; i++)
        g.of[i].logits = (float *)allocate((size_t)g.model.vocab, sizeof(float));
    int tokens[8];
    (void)tokens_of(&g, " secret", tokens, 8);
    g.secret_token = tokens[0];
    name_model(&g.model, g.model_name);
    if (g.load) {
        empty_arena(&g);
        for (int i = 0; i < CHARACTERS; i++) (void)load_character(&g, g.load, i);
    } else {
        begin_game(&g);
        play_scene(&g);
    }
    print_memory(&g);
    if (g.save) save_and_load(&g);
    if (g.save || g.load) play_epilogue(&g);
    tkv_destroy(g.kv);
    g.cfg.budget.bytes = ARENA;
    if (!g.load) print_frames(&g);
    for (int i = 0; i < SEQUENCES; i++) free(g.of[i].logits);
    free(g.space);
    free(g.arena);
    free(g.scratch);
    llama_free(&g.model);
    return 0;
}
