/*
 * village_sdl.c - the village, drawn with SDL2 in letters and houses of pixels. village.c computes it: the model, its
 * cache and the people. main.lua is the same scene in LOVE.
 *
 * cc -O2 examples/love/village_sdl.c examples/love/village.c examples/tieredkv.c -o village -lSDL2 -lm -pthread
 *
 * ./village [--model FILE] [--script FILE] [--log FILE] [--folder FOLDER] [--silent]
 *
 * A picture is drawn of 640 x 360 points and shown twice as large. In this order: pencils, the map, the panel, main.
 */
#include <SDL2/SDL.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "font.h"
#include "village.h"

enum { WIDTH = 640, HEIGHT = 360, PANEL = 450, PANEL_WIDTH = 178, LETTER = 6, LINE = 9 };
enum { LIMIT_US = 1000 }; /* of a frame's work on the cache; the promise is 2 ms */
static const float map_x = 12, map_y = 23, map_width = 415, map_height = 320;

/* Colours of the map, of the panel, and of the five families. */
enum { NIGHT, MEADOW, ROAD, SQUARE, TREE, LEAVES, WALL, DOOR, PAPER, INK, WHITE, GREY };
enum { SHARED = GREY + 1, ARCHIVE, WARM, HOT, FILE_GREEN, WORK, YOURS, TAKEN_BACK, PANEL_COLOR, FAMILY };
static const unsigned colors[] = {0x0f141b, 0x1f3429, 0x4a4438, 0x4d463c, 0x162a1d, 0x203c29, 0x998a73,
                                  0x42332a, 0xf7edd6, 0x1f1a14, 0xf5f0e6, 0x9ea8ad, 0x7a8794, 0x407de0,
                                  0xedb83d, 0xf55c42, 0x6bb37a, 0x4dccb3, 0x8cd1f2, 0x736b6b, 0x161b20,
                                  0xb85445, 0x5780ad, 0x9e7ab8, 0x61946b, 0xbd8f4d};

/* >>pencils */
static void set_color(SDL_Renderer *r, int which, float light, float alpha) {
    const unsigned c = colors[which];
    SDL_SetRenderDrawColor(r, (Uint8)((float)(c >> 16 & 255) * light), (Uint8)((float)(c >> 8 & 255) * light),
                           (Uint8)((float)(c & 255) * light), (Uint8)(255 * alpha));
}

static void fill(SDL_Renderer *r, float x, float y, float w, float h) {
    const SDL_FRect box = {x, y, w, h};
    SDL_RenderFillRectF(r, &box);
}

static void box(SDL_Renderer *r, int which, float x, float y, float w, float h) {
    set_color(r, which, 1, 1);
    fill(r, x, y, w, h);
}

static void ellipse(SDL_Renderer *r, float x, float y, float rx, float ry) {
    for (float i = -floorf(ry); i <= ry; i++) {
        const float half = floorf(rx * sqrtf(1 - i * i / (ry * ry)));
        fill(r, x - half, floorf(y + i), 2 * half, 1);
    }
}

/* Light of a window or a fire: circles that add up. */
static void glow(SDL_Renderer *r, float x, float y, float size, unsigned c, int strength) {
    SDL_SetRenderDrawBlendMode(r, SDL_BLENDMODE_ADD);
    for (int i = 1; i <= 5; i++) {
        SDL_SetRenderDrawColor(r, (Uint8)(c >> 16), (Uint8)(c >> 8), (Uint8)c, (Uint8)strength);
        ellipse(r, x, y, size * (float)i / 5, size * (float)i / 5);
    }
    SDL_SetRenderDrawBlendMode(r, SDL_BLENDMODE_BLEND);
}

static void write_letters(SDL_Renderer *r, int which, float x, float y, const char *text, int n) {
    set_color(r, which, 1, 1);
    for (int i = 0; i < n && text[i]; i++) {
        const unsigned char c = (unsigned char)text[i];
        for (int column = 0; c > 32 && c < 127 && column < 5; column++)
            for (int row = 0; row < 7; row++)
                if (font[c - 32][column] >> row & 1)
                    fill(r, x + (float)(i * LETTER + column), y + (float)row, 1, 1);
    }
}

static void write_text(SDL_Renderer *r, int which, float x, float y, const char *text) {
    write_letters(r, which, x, y, text, (int)strlen(text));
}

/* Writes a text in lines of `most` letters, or only counts them. Returns the number of lines. */
static int write_lines(SDL_Renderer *r, int which, float x, float y, const char *text, int most) {
    int n_lines = 0;
    while (*text) {
        int n = 0, cut = 0;
        while (text[n] && text[n] != '\n' && n < most) {
            n++;
            if (text[n] == ' ' || text[n] == '\n' || !text[n]) cut = n;
        }
        if (n == most && cut && text[n] && text[n] != '\n') n = cut;
        if (r) write_letters(r, which, x, y + (float)(n_lines * LINE), text, n);
        n_lines++;
        text += n;
        while (*text == ' ' || *text == '\n') text++;
    }
    return n_lines;
}

/* >>the map */
static float x_of(const village_person *p) { return floorf(map_x + p->x * map_width); }
static float y_of(const village_person *p) { return floorf(map_y + p->y * map_height); }

/* Draws what a person remembers as a line of tiers, `width` points for 2,048 tokens. */
static void draw_tiers(SDL_Renderer *r, const village_person *p, float x, float y, float width,
                       float height) {
    const int n[4] = {p->n_shared, p->n_own[2], p->n_own[1], p->n_own[0]}; /* from the oldest words on */
    set_color(r, NIGHT, .3f, 1);
    fill(r, x, y, width, height);
    for (int i = 0, from = 0; i < 4; i++) {
        const float a = floorf((float)from * width / 2048 + .5f);
        from += n[i];
        box(r, SHARED + i, x + a, y, floorf((float)from * width / 2048 + .5f) - a, height);
    }
}

static void draw_road(SDL_Renderer *r, float x, float y, float to_x, float to_y) {
    const int n = (int)(fabsf(to_x - x) + fabsf(to_y - y)) + 1;
    for (int i = 0; i <= n; i++)
        fill(r, floorf(x + (to_x - x) * (float)i / (float)n) - 1,
             floorf(y + (to_y - y) * (float)i / (float)n) - 1, 3, 2);
}

/* Draws what does not change. */
static void draw_ground(SDL_Renderer *r, const village_view *view) {
    const float x = map_x + map_width / 2, y = map_y + map_height / 2;
    box(r, NIGHT, 0, 0, WIDTH, HEIGHT);
    for (int i = 1; i <= 6; i++) {
        set_color(r, MEADOW, 1, .35f);
        ellipse(r, x, y, map_width * (.62f - .02f * (float)i), map_height * (.62f - .02f * (float)i));
    }
    set_color(r, ROAD, 1, 1);
    for (int i = 0; i < VILLAGE_PEOPLE; i++) {
        const village_person *p = &view->person[i], *to = p->road_to < 0 ? NULL : &view->person[p->road_to];
        draw_road(r, x_of(p), y_of(p), to ? x_of(to) : x, to ? y_of(to) : y);
    }
    set_color(r, SQUARE, 1, 1);
    ellipse(r, x, y, 27, 17);
    for (int i = 0; i < VILLAGE_TREES; i++) {
        const float at_x = floorf(map_x + view->tree[i][0] * map_width),
                    at_y = floorf(map_y + view->tree[i][1] * map_height);
        set_color(r, TREE, 1, 1);
        ellipse(r, at_x, at_y, 5, 5);
        set_color(r, LEAVES, 1, 1);
        ellipse(r, at_x - 1, at_y - 2, 3, 3);
    }
}

static void draw_fire(SDL_Renderer *r, double time) {
    const float x = map_x + map_width / 2, y = map_y + map_height / 2;
    for (int i = 0; i < 3; i++) {
        static const unsigned flames[3] = {0xf25a1f, 0xff9e33, 0xffe080};
        const float w = (float)(5 - 2 * i) - .5f,
                    h = (float)(11 - 3 * i) + 2 * sinf((float)time * 9 + (float)i);
        SDL_SetRenderDrawColor(r, (Uint8)(flames[i] >> 16), (Uint8)(flames[i] >> 8 & 255),
                               (Uint8)(flames[i] & 255), 255);
        for (float k = 0; k < h; k++)
            fill(r, floorf(x - w * (1 - k / h)), floorf(y - k), ceilf(2 * w * (1 - k / h)), 1);
    }
    glow(r, x, y - 3, 46 + 3 * sinf((float)time * 5), 0xff8026, 14);
}

static void draw_house(SDL_Renderer *r, const village_person *p) {
    static const unsigned lights[5] = {0x21242b, 0xf2f2d9, 0x21242b, 0x9ed9ff, 0xffdb73};
    const float x = x_of(p), y = y_of(p), light = p->state == VILLAGE_AWAY ? .55f : 1;
    const unsigned c = lights[p->state];
    set_color(r, WALL, light, 1);
    fill(r, x - 5, y - 6, 11, 7);
    set_color(r, FAMILY + p->family, light, 1);
    for (int i = 0; i < 7; i++) fill(r, x - (float)i, y - 13 + (float)i, (float)(2 * i + 1), 1);
    set_color(r, DOOR, light, 1);
    fill(r, x + 1, y - 4, 3, 5);
    SDL_SetRenderDrawColor(r, (Uint8)(c >> 16), (Uint8)(c >> 8 & 255), (Uint8)(c & 255), 255);
    fill(r, x - 4, y - 4, 3, 3);
    if (c != 0x21242b) glow(r, x - 2, y - 3, p->state == VILLAGE_SPEAKING ? 21 : 15, c, 18);
    draw_tiers(r, p, x - 11, y + 3, 23, 2);
}

static void draw_map(SDL_Renderer *r, SDL_Texture *ground, const village_view *view, double time) {
    const village_person *chosen = &view->person[view->selected];
    SDL_RenderCopy(r, ground, NULL, NULL);
    draw_fire(r, time);
    for (int i = 0; i < VILLAGE_PEOPLE; i++) draw_house(r, &view->person[i]);
    const SDL_FRect frame = {x_of(chosen) - 13, y_of(chosen) - 15, 27, 22};
    const float width = (float)(LETTER * (int)strlen(chosen->name)), left = x_of(chosen) - floorf(width / 2);
    set_color(r, WHITE, 1, 1);
    SDL_RenderDrawRectF(r, &frame);
    set_color(r, NIGHT, 1, .8f);
    fill(r, left - 2, y_of(chosen) + 8, width + 3, 11);
    write_text(r, WHITE, left, y_of(chosen) + 10, chosen->name);
    for (int i = 0; i < VILLAGE_PEOPLE; i++) {
        const village_person *p = &view->person[i];
        const float w = (float)(LETTER * (int)strlen(p->words));
        float x = x_of(p) - floorf(w / 2);
        if (strlen(p->words) < 2) continue;
        if (x < 4) x = 4;
        if (x + w > PANEL - 16) x = PANEL - 16 - w;
        box(r, PAPER, x - 2, y_of(p) - 26, w + 3, 10);
        box(r, PAPER, x_of(p) - 1, y_of(p) - 16, 3, 2);
        write_text(r, INK, x, y_of(p) - 24, p->words);
    }
}

/* >>the panel */
static void draw_bar(SDL_Renderer *r, int which, float y, const char *label, int bytes, int most) {
    char text[32];
    write_text(r, GREY, PANEL, y, label);
    snprintf(text, sizeof text, "%5d KB", bytes / 1024);
    write_text(r, WHITE, PANEL + PANEL_WIDTH - 8 * LETTER, y, text);
    set_color(r, NIGHT, .3f, 1);
    fill(r, PANEL + 54, y + 1, 72, 5);
    box(r, which, PANEL + 54, y + 1, 72 * (float)bytes / (float)(most > bytes ? most : bytes + 1), 5);
}

static void draw_memory(SDL_Renderer *r, const village_view *view) {
    const float share = (float)(view->used / view->budget);
    char text[80];
    write_text(r, WHITE, PANEL, 10, "A VILLAGE IN 64 MB");
    set_color(r, NIGHT, .3f, 1);
    fill(r, PANEL, 21, PANEL_WIDTH, 11);
    box(r, share > .95f ? HOT : ARCHIVE, PANEL, 21, PANEL_WIDTH * share, 11);
    snprintf(text, sizeof text, "%.1f of %.0f MB", view->used / 1048576, view->budget / 1048576);
    write_text(r, WHITE, PANEL + 54, 23, text);
    snprintf(text, sizeof text, "FP16 %.0f, not shared %.0f MB", view->fp16 / 1048576,
             view->unshared / 1048576);
    write_text(r, GREY, PANEL, 36, text);
    snprintf(text, sizeof text, "%d of 100 awake, %.0f tok/s", view->n_read, view->tokens_per_second);
    write_text(r, GREY, PANEL, 45, text);
    snprintf(text, sizeof text, "compression %d of %d", view->level, view->n_levels - 1);
    write_text(r, GREY, PANEL, 54, text);
}

static void draw_person(SDL_Renderer *r, const village_person *p) {
    static const char *const states[] = {"asleep", "wakes up", "silent", "listens", "speaks"};
    static const char *const tiers[] = {"shared", "3 bits", "4 bits", "exact"};
    const int counts[4] = {p->n_shared, p->n_own[2], p->n_own[1], p->n_own[0]};
    write_text(r, FAMILY + p->family, PANEL, 70, p->name);
    write_text(r, GREY, PANEL + PANEL_WIDTH - (float)(LETTER * (int)strlen(states[p->state])), 70,
               states[p->state]);
    draw_tiers(r, p, PANEL, 80, PANEL_WIDTH, 7);
    for (int i = 0; i < 4; i++) {
        char text[32];
        const float x = PANEL + (float)(i % 2 * 90), y = 91 + (float)(i / 2 * LINE);
        box(r, SHARED + i, x, y + 1, 5, 5);
        snprintf(text, sizeof text, "%s %d", tiers[i], counts[i]);
        write_text(r, GREY, x + 8, y, text);
    }
    draw_bar(r, TAKEN_BACK, 112, "FP16", p->fp16_bytes, p->fp16_bytes);
    draw_bar(r, ARCHIVE, 121, "own", p->own_bytes, p->fp16_bytes);
    draw_bar(r, SHARED, 130, "shared", p->shared_bytes, p->fp16_bytes);
    draw_bar(r, FILE_GREEN, 139, "file", p->file_bytes, p->fp16_bytes);
}

static void draw_talk(SDL_Renderer *r, const village_view *view) {
    static const int kinds[] = {YOURS, WHITE, GREY, WARM, TAKEN_BACK};
    const int most = PANEL_WIDTH / LETTER;
    char typed[128];
    snprintf(typed, sizeof typed, "> %s_", view->typed);
    float y = 154;
    int first = view->n_lines,
        room = (284 - 154) / LINE - (view->is_typing ? write_lines(NULL, 0, 0, 0, typed, most) : 0);
    while (first > 0) { /* the newest lines that fit */
        const int n = write_lines(NULL, 0, 0, 0, view->line[first - 1].text, most);
        if (n > room) break;
        room -= n;
        first--;
    }
    for (int i = first; i < view->n_lines; i++)
        y += (float)(LINE * write_lines(r, kinds[view->line[i].kind], PANEL, y, view->line[i].text, most));
    if (view->is_typing) (void)write_lines(r, YOURS, PANEL, y, typed, most);
}

static void draw_frames(SDL_Renderer *r, const village_view *view) {
    const float base = 326, scale = 28.0f / 20;
    char text[64];
    snprintf(text, sizeof text, "cache work, 99%%: %.2f of 2 ms", (double)view->cache_p99_ms);
    write_text(r, GREY, PANEL, 287, text);
    set_color(r, NIGHT, .3f, 1);
    fill(r, PANEL, base - 28, PANEL_WIDTH, 28);
    for (int i = 0; i < PANEL_WIDTH; i++) {
        const int at = (view->n_frames + VILLAGE_FRAMES - PANEL_WIDTH + i) % VILLAGE_FRAMES;
        const float frame = view->frame_ms[at] * scale, cache = view->cache_ms[at] * scale;
        box(r, TAKEN_BACK, PANEL + (float)i, base - (frame < 28 ? frame : 28), 1, 1);
        box(r, WORK, PANEL + (float)i, base - (cache < 28 ? cache : 28), 1, cache < 28 ? cache : 28);
    }
    set_color(r, HOT, 1, .8f);
    fill(r, PANEL, base - 2 * scale, PANEL_WIDTH, 1);
    set_color(r, GREY, 1, .5f);
    fill(r, PANEL, base - 1000.0f / 60 * scale, PANEL_WIDTH, 1);
    write_text(r, HOT, PANEL + 2, base - 11, "2 ms");
    write_text(r, GREY, PANEL + 2, base - 22, "17 ms: 60 frames/s");
    (void)write_lines(r, WARM, PANEL, 330, view->message, PANEL_WIDTH / LETTER);
}

static void draw(SDL_Renderer *r, SDL_Texture *ground, const village_view *view, double time) {
    draw_map(r, ground, view, time);
    box(r, PANEL_COLOR, PANEL - 12, 0, WIDTH - PANEL + 12, HEIGHT);
    draw_memory(r, view);
    draw_person(r, &view->person[view->selected]);
    draw_talk(r, view);
    draw_frames(r, view);
    write_text(r, GREY, 4, 350, "arrows return tab  i:interrupt n:number s:save l:load a:save all c:count");
}

/* >>main */
static void save_shot(SDL_Renderer *r, const char *path) { /* as BMP, which SDL2 writes by itself */
    SDL_Rect all = {0, 0, 0, 0}; /* a window may have another size than it was created with */
    if (SDL_GetRendererOutputSize(r, &all.w, &all.h) != 0) return;
    SDL_Surface *s = SDL_CreateRGBSurfaceWithFormat(0, all.w, all.h, 32, SDL_PIXELFORMAT_ARGB8888);
    if (!s) return;
    if (SDL_RenderReadPixels(r, &all, s->format->format, s->pixels, s->pitch) != 0 ||
        SDL_SaveBMP(s, path) != 0)
        fprintf(stderr, "village: no picture: %s\n", SDL_GetError());
    SDL_FreeSurface(s);
}

static void handle(village *v, const SDL_Event *e) {
    if (e->type == SDL_TEXTINPUT) village_type(v, e->text.text);
    if (e->type == SDL_MOUSEBUTTONDOWN && e->button.x < PANEL - 12) /* in points of the picture */
        village_pick(v, ((float)e->button.x - map_x) / map_width, ((float)e->button.y - map_y) / map_height);
    if (e->type != SDL_KEYDOWN) return;
    char name[32];
    snprintf(name, sizeof name, "%s", SDL_GetKeyName(e->key.keysym.sym));
    for (char *c = name; *c; c++) *c = (char)SDL_tolower(*c);
    village_key(v, name);
}

int main(int argc, char **argv) {
    village_options o;
    char reason[256];
    SDL_Window *window = NULL;
    SDL_Renderer *r = NULL;
    memset(&o, 0, sizeof o);
    o.model = "examples/data/demo.gguf";
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--silent") == 0) o.is_silent = 1;
        else if (value && strcmp(argv[i], "--model") == 0) o.model = argv[++i];
        else if (value && strcmp(argv[i], "--script") == 0) o.script = argv[++i];
        else if (value && strcmp(argv[i], "--log") == 0) o.log = argv[++i];
        else if (value && strcmp(argv[i], "--folder") == 0) o.folder = argv[++i];
        else return fprintf(stderr, "village: %s: unknown option, or its value is missing\n", argv[i]), 1;
    }
    village *v = village_create(&o, reason, sizeof reason);
    if (!v) return fprintf(stderr, "village: %s\n", reason), 1;
    int ok = SDL_Init(SDL_INIT_VIDEO) == 0 &&
             SDL_CreateWindowAndRenderer(2 * WIDTH, 2 * HEIGHT, 0, &window, &r) == 0 &&
             SDL_RenderSetLogicalSize(r, WIDTH, HEIGHT) == 0;
    SDL_Texture *ground =
        ok ? SDL_CreateTexture(r, SDL_PIXELFORMAT_ARGB8888, SDL_TEXTUREACCESS_TARGET, WIDTH, HEIGHT) : NULL;
    ok = ground != NULL;
    if (!ok) fprintf(stderr, "village: %s\n", SDL_GetError());
    for (int n = 0; ok; n++) {
        const Uint32 start = SDL_GetTicks();
        SDL_Event e;
        int is_closed = 0;
        while (SDL_PollEvent(&e)) {
            handle(v, &e);
            is_closed |= e.type == SDL_QUIT;
        }
        const village_view *view = village_frame(v, LIMIT_US);
        SDL_SetRenderDrawBlendMode(r, SDL_BLENDMODE_BLEND);
        if (n == 0) {
            SDL_SetWindowTitle(window, "A village in 64 MB");
            SDL_SetRenderTarget(r, ground);
            draw_ground(r, view);
            SDL_SetRenderTarget(r, NULL);
        }
        draw(r, ground, view, (double)start / 1000);
        if (view->shot[0]) save_shot(r, view->shot);
        SDL_RenderPresent(r);
        ok = !view->quits && !is_closed;
        const Uint32 took = SDL_GetTicks() - start;
        if (took < 16) SDL_Delay(16 - took);
    }
    village_destroy(v);
    SDL_DestroyTexture(ground);
    SDL_DestroyRenderer(r);
    SDL_DestroyWindow(window);
    SDL_Quit();
    return ground == NULL;
}
