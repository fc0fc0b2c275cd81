/* Streams and events. Work is done when it is asked for. A clock counts its cost, which is what events measure; for the
   host nothing is pending but what torch.cuda._sleep keeps busy, and what comes after that. */
#include "null.h"
#include <time.h>

static struct CUstream_st default_streams[MOST_CARDS];
static uint64_t ids = 16;

uint64_t next_id(void) { return __atomic_add_fetch(&ids, 1, __ATOMIC_RELAXED); }
double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}
cudaStream_t stream_of(cudaStream_t given)
{
    if (given && given != cudaStreamLegacy && given != cudaStreamPerThread) return given;
    struct CUstream_st *stream = &default_streams[chosen_card()];
    stream->card = chosen_card();
    stream->id = 1;
    return stream;
}
struct CUgraph_st *capture_of(cudaStream_t stream)
{
    if (stream->capture && stream->capture->has_ended) stream->capture = 0; /* it had joined by an event */
    return stream->capture;
}
void submit(cudaStream_t given, double cost, work run, const void *data, size_t bytes)
{
    LOCK;
    cudaStream_t stream = stream_of(given);
    struct CUgraph_st *graph = capture_of(stream);
    if (graph) add_to_graph(graph, cost, run, data, bytes);
    else stream->clock += cost;
    UNLOCK;
    if (!graph && run) run(data, stream);
}
void keep_busy(cudaStream_t given, double seconds)
{
    LOCK;
    cudaStream_t stream = stream_of(given);
    stream->busy_until = (stream->busy_until > now() ? stream->busy_until : now()) + seconds;
    UNLOCK;
}
void waited(void) { __atomic_add_fetch(&counted.waits, 1, __ATOMIC_RELAXED); }
static void wait_until(double time)
{
    double left = time - now();
    waited();
    if (left > 0) nanosleep(&(struct timespec){(time_t)left, (long)((left - (time_t)left) * 1e9)}, 0);
}
API void null_card_work(cudaStream_t stream, double cost) { counted.launches++; submit(stream, cost, 0, 0, 0); }

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority)
{
    *s = calloc(1, sizeof **s);
    **s = (struct CUstream_st){.card = chosen_card(), .flags = flags, .priority = priority, .id = next_id()};
    return 0;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s) { order_forget_stream(s); free(s); return 0; }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = stream_of(s)->priority; return 0; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
API cudaError_t cudaStreamQuery(cudaStream_t s)
{
    s = stream_of(s);
    if (capture_of(s)) return failing(cudaErrorStreamCaptureUnsupported);
    if (s->busy_until > now()) return cudaErrorNotReady;
    order_host_waits(s);
    return 0;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    s = stream_of(s);
    if (capture_of(s)) return failing(cudaErrorStreamCaptureUnsupported);
    wait_until(s->busy_until);
    order_host_waits(s);
    return 0;
}
API cudaError_t cudaDeviceSynchronize(void)
{
    if (capture_of(stream_of(0))) return failing(cudaErrorStreamCaptureUnsupported);
    wait_until(stream_of(0)->busy_until);
    order_host_waits_for_all();
    return 0;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    LOCK;
    s = stream_of(s);
    if (e->capture && !e->capture->has_ended) {
        if (!capture_of(s)) { s->capture = e->capture; s->is_origin = 0; }
    } else {
        if (e->clock > s->clock) s->clock = e->clock;
        if (e->busy_until > s->busy_until) s->busy_until = e->busy_until;
        order_wait(s, e);
    }
    UNLOCK;
    return 0;
}
struct callback { cudaHostFn_t function; void *data; };
static void call_now(const void *data, cudaStream_t stream) { const struct callback *c = data; c->function(c->data); }
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void *data)
{
    struct callback c = {function, data};
    submit(s, 5e-6, call_now, &c, sizeof c);
    return 0;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t function, void *data, unsigned flags) { function(s, 0, data); return 0; }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    *e = calloc(1, sizeof **e);
    (*e)->flags = flags;
    return 0;
}
API cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e->known); free(e); return 0; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags)
{
    LOCK;
    s = stream_of(s);
    e->capture = capture_of(s);
    if (!e->capture) { s->clock += 5e-7; order_record(e, s); }
    e->clock = s->clock;
    e->busy_until = s->busy_until;
    e->recorded = 1;
    UNLOCK;
    return 0;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API cudaError_t cudaEventQuery(cudaEvent_t e)
{
    if (e->capture && !e->capture->has_ended) return failing(cudaErrorCapturedEvent);
    if (e->busy_until > now()) return cudaErrorNotReady;
    order_host_waits_for_event(e);
    return 0;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    if (e->capture && !e->capture->has_ended) return failing(cudaErrorCapturedEvent);
    wait_until(e->busy_until);
    order_host_waits_for_event(e);
    return 0;
}
API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to)
{
    if ((from->flags | to->flags) & cudaEventDisableTiming || !from->recorded || !to->recorded) return failing(cudaErrorInvalidResourceHandle);
    if (from->busy_until > now() || to->busy_until > now()) return cudaErrorNotReady;
    order_host_waits_for_event(to);
    *milliseconds = (float)((to->clock - from->clock) * 1e3);
    return 0;
}
