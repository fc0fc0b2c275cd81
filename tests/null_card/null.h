/* What the parts of the null card share: settings, memory, streams and the work that they are given. */
#pragma once
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define MIB ((size_t)1 << 20)
#define MOST_CARDS 8

/* ---- settings, from the environment ---- */
size_t setting(const char *name, size_t otherwise);
#define SAY(level, ...) \
    do { if (setting("NULL_CARD_LOG", 0) >= (level)) { fprintf(stderr, "null card: " __VA_ARGS__); fputc('\n', stderr); } } while (0)

/* ---- one lock for everything; work is done without it ---- */
extern pthread_mutex_t null_lock;
#define LOCK pthread_mutex_lock(&null_lock)
#define UNLOCK pthread_mutex_unlock(&null_lock)

/* ---- what is counted: `null_card_counted(name)` reads it ---- */
struct counts {
    uint64_t launches, uncomputed, copies, fills, allocations, frees, waits, executed, computed, refused, plans, restored, failed,
        plan_nanoseconds, workspace, used, peak;
};
extern struct counts counted;

/* ---- the card of this thread ---- */
int chosen_card(void);
int cards(void);
size_t card_memory(void);
int card_attribute(enum cudaDeviceAttr name, int card);
cudaError_t failing(cudaError_t error); /* notes the thread's last error, and returns it */

/* ---- memory: every block that the runtime gave out ---- */
enum place { ON_CARD, PINNED, REGISTERED };
struct block { uintptr_t at; size_t size; enum place place; int card; void *raw; size_t raw_size; };
int block_of(const void *at, struct block *found); /* whether there is one; a copy of it */
int is_on_card(const void *at, size_t size);
void *symbol_memory(const void *symbol); /* memory of the card for a variable of a program */

/* ---- streams, events and graphs ---- */
typedef void (*work)(const void *data, cudaStream_t stream);
struct CUstream_st { int card; unsigned flags; int priority; uint64_t id; double clock, busy_until; struct CUgraph_st *capture; int is_origin, actor; };
struct CUevent_st { unsigned flags; int recorded; double clock, busy_until; struct CUgraph_st *capture; uint32_t *known; };
struct CUgraphNode_st { work run; void *data; };
struct CUgraph_st { uint64_t id; int has_ended; size_t count, room; struct CUgraphNode_st **nodes; double cost; };
cudaStream_t stream_of(cudaStream_t given);                 /* the default stream for 0 and its other names */
struct CUgraph_st *capture_of(cudaStream_t stream);         /* the graph that its work goes into, or null */
uint64_t next_id(void);
double now(void);
/* Does work on a stream now, or puts it, with a copy of its data, into the graph that is captured there. The cost, in
   seconds of the imagined card, advances the stream's clock. */
void submit(cudaStream_t stream, double cost, work run, const void *data, size_t bytes);
void add_to_graph(struct CUgraph_st *graph, double cost, work run, const void *data, size_t bytes);
void keep_busy(cudaStream_t stream, double seconds);         /* of the host's time */
void waited(void);                                          /* the host waits for the card */

/* ---- the order in which memory is used, watched where NULL_CARD_ORDER is set ---- */
void order_record(cudaEvent_t e, cudaStream_t s);
void order_wait(cudaStream_t s, cudaEvent_t e);
void order_host_waits(cudaStream_t s);
void order_host_waits_for_event(cudaEvent_t e);
void order_host_waits_for_all(void);
void order_forget_stream(cudaStream_t s);
void order_forget(uintptr_t at, size_t size);               /* memory that the runtime takes back */
void order_touch(cudaStream_t s, const char *what, const void *at, size_t size, int writes); /* work on a stream uses memory */
void pinned_open(const void *at, size_t size);              /* the card is about to use memory that the host may not */

/* ---- convolutions, in cuDNN's terms ---- */
enum { FORWARD = 10, BACKWARD_FILTER = 11, BACKWARD_DATA = 12 }; /* descriptors of the operations */
enum { FLOAT32 = 0, FLOAT64 = 1, FLOAT16 = 2, BFLOAT16 = 9 };    /* cudnnDataType_t */
struct tensor { int rank, type; int64_t dims[8], strides[8], uid, alignment; char *at; };
struct convolution { int kind, engine, is_computed; char *workspace; int64_t need; struct tensor t[3]; int64_t padding[3], stride[3], dilation[3]; double alpha, beta; };
void compute(const struct convolution *convolution);
int64_t element_bytes(int type);
int64_t extent_of(const struct tensor *tensor); /* elements from its first to its last */
