/*
 * persist/end.h - the last part: undefines internal macros that would otherwise reach the program that includes the
 * implementation. Functions and types stay: they are static and begin with tkvi_.
 */
#ifndef TKVI_PERSIST_END_H
#define TKVI_PERSIST_END_H

#undef TKVI_IS_HIDDEN

#endif /* TKVI_PERSIST_END_H */
