/*
 * report/end.h - the last part: internal macros that would leak into the program that includes the implementation
 * are undefined here. Functions and types stay, all static, all tkvi_.
 */
#ifndef TKVI_REPORT_END_H
#define TKVI_REPORT_END_H

#undef TKVI_IS_HIDDEN

#endif /* TKVI_REPORT_END_H */
