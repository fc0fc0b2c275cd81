/* What cuDNN's descriptors were told. Whoever calls these holds the lock. */
#pragma once
#include "null.h"

typedef void *descriptor;
struct value { int name, type; int64_t count; void *bytes; struct value *next; };
struct known { descriptor at; int kind; struct value *values; struct convolution convolution; struct known *next; };

struct known **place_of(descriptor d); /* where it is kept, or would be */
struct known *known_of(descriptor d);
struct value *value_of(descriptor d, int name);
descriptor child_of(descriptor d, int name);
void note(descriptor d, int name, int type, int64_t count, const void *bytes);
void forget_values(struct known *known);
/* What an operation computes. It is read when the operation is finalized, as callers free descriptors early, and handed
   on with each reference: to the graph, the heuristic or the engine, the configuration and the plan. */
void read_convolution(descriptor operation, struct convolution *c);
void read_serialized(const char *text, struct convolution *c); /* the same of a plan that is restored from its text */
