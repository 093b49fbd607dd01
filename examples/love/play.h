/*
 * play.h - the keys of the village, and scripts that press them. Part of village.c.
 *
 * A script has one command a line; # begins a comment:
 *     wait SECONDS | frames NUMBER
 *     until read | until done             all pasts are read or refused; all wishes are served
 *     until silent | until speaking       the selected person is
 *     key NAME | type TEXT                                      as a player does
 *     next                                                      writes the selected person's next token to the log
 *     shot FILE | quit
 */
#ifndef PLAY_H
#define PLAY_H

const char *village_help(void) {
    return "arrows: choose   return: ask   tab: a question   i: interrupt   n: number   s: save   l: load   "
           "a: save all   "
           "c: all numbers   g: gossip   esc: quit";
}

void village_pick(village *v, float x, float y) {
    float least = 9;
    for (int i = 0; i < PEOPLE; i++) {
        const village_person *p = &v->view.person[i];
        const float d = (p->x - x) * (p->x - x) + (p->y - y) * (p->y - y);
        if (d >= least) continue;
        least = d;
        v->view.selected = i;
    }
}

/* Selects the nearest person in a direction. A step aside counts twice. */
static void step_to(village *v, float dx, float dy) {
    const village_person *from = &v->view.person[v->view.selected];
    float least = 9;
    for (int i = 0; i < PEOPLE; i++) {
        const float x = v->view.person[i].x - from->x, y = v->view.person[i].y - from->y;
        const float ahead = x * dx + y * dy, aside = x * dy - y * dx;
        const float d = ahead + 2 * (aside < 0 ? -aside : aside);
        if (ahead < .01f || d >= least) continue;
        least = d;
        v->view.selected = i;
    }
}

void village_type(village *v, const char *text) {
    if (v->view.is_typing) add_bytes(v->view.typed, sizeof v->view.typed, text, (int)strlen(text));
}

static void type_key(village *v, const char *key) {
    village_view *view = &v->view;
    const size_t n = strlen(view->typed);
    if (strcmp(key, "backspace") == 0 && n) view->typed[n - 1] = 0;
    if (strcmp(key, "return") == 0 && n) add_request(v, view->selected, 0, 0, view->typed);
    if (strcmp(key, "return") != 0 && strcmp(key, "escape") != 0) return;
    view->typed[0] = 0;
    view->is_typing = 0;
}

void village_key(village *v, const char *key) {
    village_view *view = &v->view;
    const int who = view->selected;
    if (view->is_typing) type_key(v, key);
    else if (strcmp(key, "left") == 0) step_to(v, -1, 0);
    else if (strcmp(key, "right") == 0) step_to(v, 1, 0);
    else if (strcmp(key, "up") == 0) step_to(v, 0, -1);
    else if (strcmp(key, "down") == 0) step_to(v, 0, 1);
    else if (strcmp(key, "return") == 0) view->is_typing = 1;
    else if (strcmp(key, "tab") == 0)
        add_request(v, who, 0, 0, ready_questions[(view->n_frames + who) % PEOPLE_COUNT(ready_questions)]);
    else if (strcmp(key, "i") == 0) add_request(v, who, 0, 1, "");
    else if (strcmp(key, "n") == 0) add_request(v, who, WISH_NUMBER, 0, "");
    else if (strcmp(key, "c") == 0) add_request(v, -1, WISH_NUMBER, 0, "");
    else if (strcmp(key, "s") == 0) add_request(v, who, WISH_SAVE, 0, "");
    else if (strcmp(key, "a") == 0) add_request(v, -1, WISH_SAVE, 0, "");
    else if (strcmp(key, "l") == 0) add_request(v, who, WISH_LOAD, 0, "");
    else if (strcmp(key, "g") == 0) v->is_silent = !v->is_silent;
    else if (strcmp(key, "escape") == 0) view->quits = 1;
}

static int begin_script(village *v, const char *path, char *reason, size_t size) {
    size_t n;
    char *text = (char *)llama_read_file(path, &n);
    if (!text) return snprintf(reason, size, "cannot read %s", path), 0;
    text[n] = 0; /* llama_read_file has a byte more */
    v->play.script = v->play.at = text;
    return 1;
}

static int is_reached(const village *v, const char *what) {
    if (strcmp(what, "read") == 0) return v->view.n_read + v->view.n_refused == PEOPLE;
    if (strcmp(what, "silent") == 0)
        return !v->n_requests && v->view.person[v->view.selected].state == VILLAGE_SILENT;
    if (strcmp(what, "speaking") == 0) return v->view.person[v->view.selected].state == VILLAGE_SPEAKING;
    return !v->n_requests && !v->n_wishes;
}

/* Runs commands of the script until one has to wait. */
static void play_script(village *v, double now) {
    struct play *play = &v->play;
    while (play->at && *play->at && now >= play->resume && v->view.n_frames >= play->resume_frame) {
        char line[256], *rest = line, *end = strchr(play->at, '\n');
        const size_t n = end ? (size_t)(end - play->at) : strlen(play->at);
        snprintf(line, sizeof line, "%.*s", (int)n, play->at);
        while (*rest && *rest != ' ') rest++;
        if (*rest) *rest++ = 0;
        if (strcmp(line, "until") == 0 && !is_reached(v, rest)) return;
        play->at += n + (end != NULL);
        if (strcmp(line, "wait") == 0) play->resume = now + atof(rest);
        else if (strcmp(line, "frames") == 0) play->resume_frame = v->view.n_frames + atoi(rest);
        else if (strcmp(line, "key") == 0) village_key(v, rest);
        else if (strcmp(line, "type") == 0) village_type(v, rest);
        else if (strcmp(line, "next") == 0) add_request(v, v->view.selected, WISH_NEXT, 0, "");
        else if (strcmp(line, "quit") == 0) v->view.quits = 1;
        else if (strcmp(line, "shot") == 0) {
            snprintf(v->view.shot, sizeof v->view.shot, "%.199s", rest);
            return;
        }
        /* what a key asks for is seen by the next frame */
        if (strcmp(line, "key") == 0 || strcmp(line, "next") == 0) return;
    }
}

#endif /* PLAY_H */
