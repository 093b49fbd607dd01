/*
 * people.h - who lives in the village: names, the prompt that all share, and a past for each. Part of village.c.
 *
 * The demo model has read Shakespeare and Tolstoy, and learned to remember numbers. So pasts are written in the
 * manner of plays, and each has a line `The secret number of NAME is 12345.`
 */
#ifndef PEOPLE_H
#define PEOPLE_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

static const char *const given_names[20] = {"Anna",   "Natasha",  "Pierre",   "Nicholas", "Sonya",
                                            "Boris",  "Vera",     "Julie",    "Marya",    "Andrew",
                                            "Juliet", "Romeo",    "Viola",    "Orlando",  "Rosalind",
                                            "Henry",  "Margaret", "Isabella", "Antonio",  "Miranda"};
static const char *const families[5] = {"Rostov", "Warwick", "Barclay", "Bolkonski", "Gloucester"};

static const char village_prompt[] = "\nPRINCE:\n"
                                     "Good people of the village, hear me speak:\n"
                                     "The winter comes, and we have bread enough,\n"
                                     "If each man keep the peace with his own neighbour.\n"
                                     "Five houses built this village by the river:\n"
                                     "The house of Rostov keeps the mill and wheel,\n"
                                     "The house of Warwick keeps the horse and sword,\n"
                                     "The house of Barclay keeps the books and bells,\n"
                                     "The house of Bolkonski keeps the hill and wood,\n"
                                     "The house of Gloucester keeps the boats and nets.\n"
                                     "Our ancient quarrel sleeps, and shall not wake;\n"
                                     "Who draws his sword within these walls shall die.\n"
                                     "\nFRIAR LAURENCE:\n"
                                     "My gracious lord, the night is come upon us,\n"
                                     "And on the road there walks a stranger yet,\n"
                                     "A man of honest face, that asks of all\n"
                                     "What news there is of love, of death, of war.\n"
                                     "\nPRINCE:\n"
                                     "Then give him answer, as becomes the time,\n"
                                     "And tell him who we are, and what we do;\n"
                                     "But let him know this village is no place\n"
                                     "For traitors, nor for such as come to spy.\n"
                                     "And every man and woman of the five\n"
                                     "Hath one thing that he must not tell: a number.\n"
                                     "Keep it in your heart, and speak it when you die.\n"
                                     "\nFRIAR LAURENCE:\n"
                                     "I will, my lord; and here he comes. Good night.\n"
                                     "The lamps are lit, the dogs are in the yard,\n"
                                     "The river sings, the miller shuts the door,\n"
                                     "And in the windows there is light and talk.\n"
                                     "\nSTRANGER:\n"
                                     "God save you all. I am a stranger here,\n"
                                     "And I would know what manner of men you are.\n"
                                     "I come from far, from cities by the sea,\n"
                                     "And I have walked for seven days and nights.\n"
                                     "\nPRINCE:\n"
                                     "Thou art welcome, if thy heart be honest.\n"
                                     "Sit by the fire, and ask what thou wilt ask.\n"
                                     "Our people love to talk when work is done.\n"
                                     "\nSTRANGER:\n"
                                     "I thank you, sir. I will go from door to door.\n"
                                     "Let every house tell me its own tale tonight.\n";

/* Lines of a past. $o: another person; $p: a place; $t: a thing; $s: a season. */
static const char *const past_lines[] = {"I was born beside the $p in the $s.",
                                         "My father gave me a $t, and I have kept it.",
                                         "In $s I walk with $o to the $p.",
                                         "I lost my $t, and found it by the $p.",
                                         "They say that $o loves me; I believe it not.",
                                         "My mother sang to us when the $s was cold.",
                                         "I have not forgiven $o for the $t.",
                                         "Once in the $s I saw a ghost by the $p.",
                                         "The prince himself did praise my $t that day.",
                                         "I would not leave the $p for all the world.",
                                         "When I was young I fought with $o in the $s.",
                                         "Give me my $t, and let the great men talk.",
                                         "I dream at night of ships beyond the $p.",
                                         "My brother went to war, and came not home.",
                                         "Speak not to me of $o, nor of the $t.",
                                         "I owe three crowns to $o since the $s.",
                                         "There is no better $t from here to the sea.",
                                         "At the $p I first did kiss my love.",
                                         "The friar knows what I have done in $s.",
                                         "I laughed with $o until the lamps were out.",
                                         "A wise man hides his $t and holds his tongue.",
                                         "The snow lay deep that $s upon the $p.",
                                         "I sold a $t to $o, and was deceived.",
                                         "What is a name, if no man keep his word?",
                                         "I have a garden by the $p, and bees.",
                                         "My heart was broken in the $s; it healed.",
                                         "We danced all night, $o and I, at the $p.",
                                         "God keep the $t, and him that made it well."};
static const char *const past_replies[] = {"Is it so? I never heard of it.",
                                           "I pray thee, speak no more of $o.",
                                           "And what became of the $t, good friend?",
                                           "I remember well the $s at the $p.",
                                           "Thou art too sad. Come, let us to the $p.",
                                           "That is the truth; I saw it with these eyes."};
static const char *const places[] = {"mill", "river", "bridge",  "church",  "market",
                                     "hill", "well",  "old oak", "harbour", "wall"};
static const char *const things[] = {"sword", "horse",  "book", "ring", "lamp",
                                     "boat",  "letter", "coat", "dog",  "drum"};
static const char *const seasons[] = {"spring", "summer", "autumn", "winter"};
#define PEOPLE_COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static const char *const ready_questions[] = {
    "What dost thou know of love?", "What news is in the village?",       "What dost thou fear?",
    "Who is thy friend?",           "Tell me of the river and the mill.", "Wilt thou go with me to the war?"};
static const char *const gossip[] = {"Good morrow! What news?",        "Hast thou heard of the stranger?",
                                     "How fares thy house?",           "I saw thee at the river yesterday.",
                                     "The prince is angry, they say.", "Come, tell me a tale."};

static uint32_t people_random(uint64_t *rng) { /* xorshift64, Marsaglia 2003 */
    *rng ^= *rng << 13;
    *rng ^= *rng >> 7;
    *rng ^= *rng << 17;
    return (uint32_t)(*rng >> 32);
}

static int people_below(uint64_t *rng, int n) { return (int)(people_random(rng) % (uint32_t)n); }

static uint64_t people_seed(int who) { return (uint64_t)(who + 1) * 0x9e3779b97f4a7c15u; }

static int secret_number(int who) {
    uint64_t rng = people_seed(who) ^ 0x5eed;
    for (int i = 0; i < 8; i++) (void)people_random(&rng);
    return 10000 + people_below(&rng, 90000);
}

static void full_name(int who, char *text, size_t size) {
    snprintf(text, size, "%s %s", given_names[who % 20], families[who / 20]);
}

/* Writes a line with its $ filled in. Returns the number of characters, which fit. */
static int fill_line(const char *line, uint64_t *rng, char *to, size_t size) {
    size_t n = 0;
    for (; *line && n + 24 < size; line++) {
        const char *word = NULL;
        if (*line == '$') {
            line++;
            if (*line == 'o') word = given_names[people_below(rng, PEOPLE_COUNT(given_names))];
            else if (*line == 'p') word = places[people_below(rng, PEOPLE_COUNT(places))];
            else if (*line == 't') word = things[people_below(rng, PEOPLE_COUNT(things))];
            else word = seasons[people_below(rng, PEOPLE_COUNT(seasons))];
        }
        if (word) n += (size_t)snprintf(to + n, size - n, "%s", word);
        else to[n++] = *line;
    }
    to[n++] = '\n';
    to[n] = 0;
    return (int)n;
}

static int write_speaker(const char *name, char *to, size_t size) { /* "\nANNA:\n" */
    char upper[24];
    size_t n = 0;
    for (; name[n] && name[n] != ' ' && n + 1 < sizeof upper; n++)
        upper[n] = (char)(name[n] >= 'a' && name[n] <= 'z' ? name[n] - 32 : name[n]);
    upper[n] = 0;
    return snprintf(to, size, "\n%s:\n", upper);
}

/* Writes the past of a person: `size` characters at most. Its number stands near the beginning. */
static void write_past(int who, char *to, size_t size) {
    uint64_t rng = people_seed(who);
    char name[24];
    size_t n = 0;
    full_name(who, name, sizeof name);
    n += (size_t)write_speaker(name, to, size);
    n += (size_t)snprintf(to + n, size - n, "They call me %s, of the house of %s.\n", name,
                          families[who / 20]);
    for (int speech = 0; n + 400 < size; speech++) {
        if (speech > 0) n += (size_t)write_speaker(name, to + n, size - n);
        for (int i = 0; i < 3; i++)
            n += (size_t)fill_line(past_lines[people_below(&rng, PEOPLE_COUNT(past_lines))], &rng, to + n,
                                   size - n);
        if (speech == 1)
            n += (size_t)snprintf(to + n, size - n, "The secret number of %s is %d.\n", name,
                                  secret_number(who));
        n += (size_t)write_speaker(given_names[people_below(&rng, 20)], to + n, size - n);
        n += (size_t)fill_line(past_replies[people_below(&rng, PEOPLE_COUNT(past_replies))], &rng, to + n,
                               size - n);
    }
    to[n] = 0;
}

#endif /* PEOPLE_H */
