/* What the two files share that watch the order in which memory is used. */
#pragma once
#include "null.h"

struct access { int actor, writes, stack; uint32_t epoch; uint64_t sequence; const char *what; };
/* Two uses that nothing has put in order. A stream is 0 for the host, 1 for a default stream. */
struct fault { uintptr_t at; struct access before, after; uint64_t before_stream, after_stream; int is_freed, freed_stack; };
typedef int (*order_stack)(void);                /* a number for the caller's Python stack */
typedef void (*order_tell)(const struct fault *);

/* Whoever calls these holds the lock. */
int order_knows(int actor, const struct access *a);
struct fault order_fault(const struct access *before, const struct access *after, uintptr_t at);
void pinned_touched(uintptr_t at, size_t size, const struct access *a);
void pinned_release(void);                       /* what the host has waited for */
void pinned_forget(uintptr_t at, size_t size);

/* Without the lock. */
void order_report(const struct fault *fault);
int order_stack_here(void);
