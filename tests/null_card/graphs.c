/* Graphs: the work that streams were given while they were captured, done again in that order. */
#include "null.h"

void add_to_graph(struct CUgraph_st *graph, double cost, work run, const void *data, size_t bytes)
{
    struct CUgraphNode_st *node = calloc(1, sizeof *node);
    node->run = run;
    if (bytes) node->data = memcpy(malloc(bytes), data, bytes);
    if (graph->count == graph->room) graph->nodes = realloc(graph->nodes, (graph->room = 2 * graph->room + 64) * sizeof *graph->nodes);
    graph->nodes[graph->count++] = node;
    graph->cost += cost;
}
API int null_card_is_capturing(cudaStream_t s) { return capture_of(stream_of(s)) != 0; }
/* Puts a function of the host, which stands for a kernel, into the graph that is captured on a stream. */
struct kernel { void (*function)(void *data, cudaStream_t stream); void *data; };
static void kernel_now(const void *data, cudaStream_t stream) { const struct kernel *k = data; k->function(k->data, stream); }
API void null_card_capture(cudaStream_t s, void (*function)(void *, cudaStream_t), void *data)
{
    struct kernel k = {function, data};
    counted.launches++;
    submit(s, 5e-6, kernel_now, &k, sizeof k);
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
{
    if (stream_of(s) != s) return failing(cudaErrorStreamCaptureUnsupported);
    if (capture_of(s)) return failing(cudaErrorIllegalState);
    LOCK;
    s->capture = calloc(1, sizeof *s->capture);
    s->capture->id = next_id();
    s->is_origin = 1;
    UNLOCK;
    return 0;
}
API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t s, cudaGraph_t g, const cudaGraphNode_t *d, const cudaGraphEdgeData *e, size_t n, enum cudaStreamCaptureMode mode)
{
    s->capture = g;
    s->is_origin = 1;
    return 0;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph)
{
    if (!capture_of(s) || !s->is_origin) return failing(cudaErrorIllegalState);
    *graph = s->capture;
    s->capture->has_ended = 1;
    s->capture = 0;
    return 0;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status)
{
    *status = capture_of(stream_of(s)) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return 0;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n)
{
    struct CUgraph_st *captured = capture_of(stream_of(s));
    cudaStreamIsCapturing(s, status);
    if (id) *id = captured ? captured->id : 0;
    if (graph) *graph = captured;
    if (nodes) *nodes = captured && captured->count ? (const cudaGraphNode_t *)&captured->nodes[captured->count - 1] : 0;
    if (edges) *edges = 0;
    if (n) *n = captured && captured->count;
    return 0;
}
API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t s, cudaGraphNode_t *d, const cudaGraphEdgeData *e, size_t n, unsigned flags) { return 0; }
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    static __thread enum cudaStreamCaptureMode held;
    enum cudaStreamCaptureMode before = held;
    held = *mode;
    *mode = before;
    return 0;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long flags) { *e = (cudaGraphExec_t)g; return 0; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *to, size_t *n)
{
    if (to) memcpy(to, g->nodes, (*n < g->count ? *n : g->count) * sizeof *to);
    *n = g->count;
    return 0;
}
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *to, cudaGraphEdgeData *e, size_t *n) { *n = 0; return 0; }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s)
{
    struct CUgraph_st *graph = (struct CUgraph_st *)e;
    submit(s, graph->cost + 5e-6, 0, 0, 0);
    s = stream_of(s);
    for (size_t i = 0; i < graph->count; i++)
        if (graph->nodes[i]->run) graph->nodes[i]->run(graph->nodes[i]->data, s);
    return 0;
}
/* A graph is what its instances are, so neither is freed. */
API cudaError_t cudaGraphDestroy(cudaGraph_t g) { return 0; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { return 0; }
API cudaError_t cudaGraphRetainUserObject(cudaGraph_t g, cudaUserObject_t o, unsigned n, unsigned flags) { return 0; }
API cudaError_t cudaUserObjectCreate(cudaUserObject_t *o, void *p, cudaHostFn_t f, unsigned n, unsigned flags) { *o = malloc(8); return 0; }
API cudaError_t cudaUserObjectRelease(cudaUserObject_t o, unsigned n) { return 0; }
