/*
 * end.h - the last part: internal macros that would leak into the program that includes the implementation
 * are undefined here. Functions and types stay, all static, all tkvi_.
 */
#ifndef TKVI_END_H
#define TKVI_END_H

#undef TKVI_IS_HIDDEN

#endif /* TKVI_END_H */
