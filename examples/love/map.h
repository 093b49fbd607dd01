/*
 * map.h - where houses, roads and trees stand, and who lives where. Part of village.c.
 *
 * Houses are seeds of a sunflower around the square, numbered outwards. Each family has a sector. A road leads from a
 * house to the nearest one of a lower number.
 */
#ifndef MAP_H
#define MAP_H

static const double golden_angle = 2.399963;

static void set_place(double radius, double angle, float *x, float *y) {
    *x = (float)(.5 + .46 * radius * cos(angle));
    *y = (float)(.5 + .45 * radius * sin(angle));
}

/* Orders numbers from the least on: `order` gets their indices. */
static void sort_numbers(const float *number, int *order) {
    for (int i = 0; i < PEOPLE; i++) {
        int k = i;
        for (; k > 0 && number[order[k - 1]] > number[i]; k--) order[k] = order[k - 1];
        order[k] = i;
    }
}

static void build_roads(village *v) {
    village_person *person = v->view.person;
    for (int i = 0; i < PEOPLE; i++) {
        float least = 9;
        person[i].road_to = -1;
        for (int k = 0; k < PEOPLE; k++) {
            const float x = person[k].x - person[i].x, y = person[k].y - person[i].y, d = x * x + y * y;
            if (v->of[k].order >= v->of[i].order || v->of[i].order < 5 || d >= least) continue;
            least = d;
            person[i].road_to = k;
        }
    }
}

/* Gives each person a house, a family and a name. People are numbered from the back of the picture to its front. */
static void place_people(village *v) {
    float x[PEOPLE], y[PEOPLE], angle[PEOPLE];
    int by_y[PEOPLE], by_angle[PEOPLE], family[PEOPLE], n_of[5] = {0, 0, 0, 0, 0};
    for (int i = 0; i < PEOPLE; i++) {
        const double turn = golden_angle * (i + 4);
        set_place(sqrt((i + 4.0) / (PEOPLE + 4)), turn, &x[i], &y[i]);
        angle[i] = (float)atan2(sin(turn), cos(turn));
    }
    sort_numbers(y, by_y);
    sort_numbers(angle, by_angle);
    for (int i = 0; i < PEOPLE; i++) family[by_angle[i]] = i / 20;
    for (int i = 0; i < PEOPLE; i++) {
        villager *p = &v->of[i];
        village_person *to = &v->view.person[i];
        p->order = by_y[i];
        to->x = x[p->order];
        to->y = y[p->order];
        to->family = family[p->order];
        p->soul = to->family * 20 + n_of[to->family]++;
        full_name(p->soul, p->name, sizeof p->name);
        memcpy(to->name, p->name, sizeof p->name);
        if (p->order == 0) v->view.selected = i;
    }
    build_roads(v);
}

static void plant_trees(village *v) { /* 24 between the houses, and others around them */
    for (int i = 0; i < VILLAGE_TREES; i++) {
        const double seed = i * 4 + 6.5;
        float *tree = v->view.tree[i];
        if (i < 24) set_place(sqrt(seed / (PEOPLE + 4)), golden_angle * seed, &tree[0], &tree[1]);
        else
            set_place(1.04 + .022 * ((i * 7) % 5), 6.2831853 * (i - 24) / (VILLAGE_TREES - 24), &tree[0],
                      &tree[1]);
    }
}

#endif /* MAP_H */
