/* cuDNN: everything is NVIDIA's but the handle, which would need a device of NVIDIA's own cudart. Where a handle is given
   to a descriptor, the card's properties are given in its place, so that graphs, heuristics, engines, plans, workspaces and
   refusals are cuDNN's own. What a descriptor is told is noted on the way, so that a convolution can be executed. */
#include "descriptors.h"
#include <dlfcn.h>
#include <time.h>

enum { ENGINE = 2, HEURISTIC = 4, PLAN = 5, PROPERTIES = 38 };                        /* descriptors */
enum { BAD_PARAM = 2000, NULL_POINTER = 2002, MISALIGNED = 2005, NOT_SUPPORTED = 3000 }; /* statuses */
enum { TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15, TYPE_CHAR = 24 };                       /* types of attributes */
enum { HEURISTIC_GRAPH = 201, HEURISTIC_RESULTS = 202, HEURISTIC_PROPERTIES = 204, CONFIGURATION_ENGINE = 300, PLAN_HANDLE = 400,
       PLAN_CONFIGURATION = 401, PLAN_WORKSPACE = 402, PLAN_TEXT = 405, PLAN_PROPERTIES = 407, GRAPH_HANDLE = 800, GRAPH_OPERATIONS = 801,
       PACK_IDS = 1000, PACK_POINTERS = 1001, PACK_WORKSPACE = 1003, ENGINE_GRAPH = 1300, ENGINE_INDEX = 1301,
       ENGINE_PROPERTIES = 1307, PROPERTIES_HANDLE = 2701, PROPERTIES_TEXT = 2702 };     /* attributes */

struct handle { uint64_t magic; int card; cudaStream_t stream; };
static const uint64_t MAGIC = 0x6c6c756e;

/* ---- NVIDIA's library ---- */
static void *real;
#define REAL(name) ((int (*)())dlsym(real, #name))

static descriptor properties(void)
{
    static descriptor made;
    LOCK;
    if (!made) {
        int status = REAL(cudnnBackendCreateDescriptor)(PROPERTIES, &made);
        if (!status) status = REAL(cudnnBackendSetAttribute)(made, PROPERTIES_TEXT, TYPE_CHAR, (int64_t)strlen(CARD_PROPERTIES), CARD_PROPERTIES);
        if (!status) status = REAL(cudnnBackendFinalize)(made);
        if (status) SAY(0, "cuDNN does not take the card's properties: %d", status);
    }
    UNLOCK;
    return made;
}
/* Torch keeps some convolutions from versions that do not serve them well: what it does then is seen without having them. */
API size_t cudnnGetVersion(void) { return setting("NULL_CARD_CUDNN_VERSION", ((size_t (*)())dlsym(real, "cudnnGetVersion"))()); }
static int is_handle(const struct handle *h) { return h && h->magic == MAGIC; }
API int cudnnCreate(struct handle **h)
{
    *h = malloc(sizeof **h);
    **h = (struct handle){MAGIC, chosen_card(), 0};
    return 0;
}
API int cudnnDestroy(struct handle *h)
{
    if (!is_handle(h)) return BAD_PARAM;
    h->magic = 0;
    free(h);
    return 0;
}
API int cudnnSetStream(struct handle *h, cudaStream_t s) { return is_handle(h) ? (h->stream = s, 0) : BAD_PARAM; }
API int cudnnGetStream(struct handle *h, cudaStream_t *s) { return is_handle(h) ? (*s = h->stream, 0) : BAD_PARAM; }

API int cudnnBackendCreateDescriptor(int kind, descriptor *d)
{
    int status = REAL(cudnnBackendCreateDescriptor)(kind, d);
    if (status) return status;
    LOCK;
    struct known **place = place_of(*d);
    if (*place) forget_values(*place);
    else *place = calloc(1, sizeof **place);
    (*place)->at = *d;
    (*place)->kind = kind;
    (*place)->convolution.kind = 0;
    UNLOCK;
    return 0;
}
API int cudnnBackendDestroyDescriptor(descriptor d)
{
    LOCK;
    struct known **place = place_of(d), *dead = *place;
    if (dead) {
        *place = dead->next;
        forget_values(dead);
        free(dead);
    }
    UNLOCK;
    return REAL(cudnnBackendDestroyDescriptor)(d);
}
static int set_properties(descriptor d, int name)
{
    descriptor p = properties();
    LOCK;
    note(d, name, TYPE_DESCRIPTOR, 1, &p);
    UNLOCK;
    return REAL(cudnnBackendSetAttribute)(d, name, TYPE_DESCRIPTOR, (int64_t)1, &p);
}
API int cudnnBackendSetAttribute(descriptor d, int name, int type, int64_t count, const void *bytes)
{
    if (name == GRAPH_HANDLE || name == PLAN_HANDLE || name == PROPERTIES_HANDLE) {
        if (type || count != 1 || !is_handle(*(struct handle *const *)bytes)) return BAD_PARAM;
        if (name == GRAPH_HANDLE) return 0;
        if (name == PLAN_HANDLE) return set_properties(d, PLAN_PROPERTIES);
        return REAL(cudnnBackendSetAttribute)(d, PROPERTIES_TEXT, TYPE_CHAR, (int64_t)strlen(CARD_PROPERTIES), CARD_PROPERTIES);
    }
    int status = REAL(cudnnBackendSetAttribute)(d, name, type, count, bytes);
    if (status) return status;
    LOCK;
    note(d, name, type, count, bytes);
    if (count == 1 && (name == GRAPH_OPERATIONS || name == HEURISTIC_GRAPH || name == ENGINE_GRAPH || name == CONFIGURATION_ENGINE || name == PLAN_CONFIGURATION)) {
        struct known *to = known_of(d), *from = known_of(*(const descriptor *)bytes);
        if (to && from) to->convolution = from->convolution;
    }
    if (name == PLAN_TEXT && known_of(d)) {
        char *text = strndup(bytes, count);
        read_serialized(text, &known_of(d)->convolution);
        free(text);
    }
    UNLOCK;
    return 0;
}

static double thread_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}
API int cudnnBackendFinalize(descriptor d)
{
    LOCK;
    struct known *known = known_of(d);
    int kind = known ? known->kind : 0, name = kind == ENGINE ? ENGINE_PROPERTIES : kind == HEURISTIC ? HEURISTIC_PROPERTIES : kind == PLAN ? PLAN_PROPERTIES : 0;
    int is_missing = name && !value_of(d, name);
    UNLOCK;
    if (is_missing) set_properties(d, name);
    double from = thread_seconds();
    int status = REAL(cudnnBackendFinalize)(d);
    LOCK;
    int is_restored = kind == PLAN && value_of(d, PLAN_TEXT);
    counted.restored += is_restored;
    if (kind == PLAN && !is_restored) {
        counted.plans++;
        counted.failed += status != 0;
        counted.plan_nanoseconds += (uint64_t)(1e9 * (thread_seconds() - from));
    }
    if (!status && kind >= FORWARD && kind <= BACKWARD_DATA) read_convolution(d, &known->convolution);
    if (!status && kind == ENGINE && value_of(d, ENGINE_INDEX)) known->convolution.engine = *(int64_t *)value_of(d, ENGINE_INDEX)->bytes;
    UNLOCK;
    return status;
}
API int cudnnBackendGetAttribute(descriptor d, int name, int type, int64_t most, int64_t *count, void *to)
{
    int status = REAL(cudnnBackendGetAttribute)(d, name, type, most, count, to);
    if (status || name != HEURISTIC_RESULTS || !to) return status;
    LOCK;
    for (int64_t i = 0; i < most && i < *count; i++) {
        struct known *result = known_of(((descriptor *)to)[i]);
        if (result && known_of(d)) result->convolution = known_of(d)->convolution;
    }
    UNLOCK;
    return 0;
}

/* ---- execution ---- */
static int refuse(int status, const char *why)
{
    counted.refused++;
    SAY(0, "cudnnBackendExecute refused: %s", why);
    return status;
}
static int bind(struct convolution *c, descriptor pack, int64_t need)
{
    struct value *ids = value_of(pack, PACK_IDS), *at = value_of(pack, PACK_POINTERS);
    char *workspace = c->workspace = child_of(pack, PACK_WORKSPACE);
    c->need = need;
    if (!ids || !at || ids->count != at->count) return refuse(BAD_PARAM, "a pack without addresses");
    if (need && !workspace) return refuse(NULL_POINTER, "no workspace");
    if (need && !is_on_card(workspace, need)) return refuse(BAD_PARAM, "a workspace that is not the card's, or too small");
    if (need && (uintptr_t)workspace % 16) return refuse(MISALIGNED, "a workspace at an odd address");
    for (int i = 0; i < 3 && c->kind; i++) {
        struct tensor *t = &c->t[i];
        int64_t size = extent_of(t) * element_bytes(t->type);
        for (int64_t j = 0; j < ids->count; j++) if (((int64_t *)ids->bytes)[j] == t->uid) t->at = ((char **)at->bytes)[j];
        if (!t->at) return refuse(NULL_POINTER, "a tensor without address");
        if ((uintptr_t)t->at % t->alignment) return refuse(MISALIGNED, "a tensor at an address that is not as aligned as was promised");
        if (!is_on_card(t->at, size)) return refuse(BAD_PARAM, "a tensor that is not within the card's memory");
        if (need && t->at < workspace + need && workspace < t->at + size) return refuse(BAD_PARAM, "a workspace over a tensor");
    }
    return 0;
}
static __thread int is_only_timed; /* this thread's convolutions are not computed, as nobody reads their results */
API void null_card_only_time(int on) { is_only_timed = on; }

static void execute_now(const void *data, cudaStream_t stream)
{
    const struct convolution *c = data;
    int target = c->kind == FORWARD ? 2 : c->kind == BACKWARD_DATA ? 0 : 1;
    if (c->is_computed) compute(c);
    for (int i = 0; i < 3 && c->kind; i++) order_touch(stream, "a convolution", c->t[i].at, extent_of(&c->t[i]) * element_bytes(c->t[i].type), i == target);
    order_touch(stream, "a convolution's workspace", c->workspace, c->need, 1);
}

API int cudnnBackendExecute(struct handle *h, descriptor plan, descriptor pack)
{
    int64_t need = 0, count;
    if (!is_handle(h)) return refuse(BAD_PARAM, "no handle");
    if (h->card != chosen_card()) return refuse(BAD_PARAM, "another card is current");
    if (REAL(cudnnBackendGetAttribute)(plan, PLAN_WORKSPACE, TYPE_INT64, (int64_t)1, &count, &need)) return refuse(BAD_PARAM, "not a finalized plan");
    LOCK;
    struct known *known = known_of(plan);
    struct convolution c = known ? known->convolution : (struct convolution){0};
    int status = bind(&c, pack, need);
    UNLOCK;
    if (status) return status;
    double operations = 2.0 * c.t[1].dims[1];
    for (int i = 0; i < c.t[2].rank; i++) operations *= c.t[2].dims[i];
    for (int i = 2; i < c.t[1].rank; i++) operations *= c.t[1].dims[i];
    LOCK;
    counted.executed++;
    counted.launches++;
    if ((uint64_t)need > counted.workspace) counted.workspace = need;
    UNLOCK;
    SAY(2, "execute engine %d, workspace %ld, operations %g", c.engine, (long)need, operations);
    c.is_computed = c.kind && !is_only_timed && setting("NULL_CARD_CONVOLUTIONS", 1) && (c.t[0].type <= FLOAT16 || c.t[0].type == BFLOAT16);
    /* Engines differ by a made-up factor, so that planning has something to choose from. On a slow card what is quickly
       computed on the host takes long enough to be planned. */
    operations *= setting("NULL_CARD_SLOWNESS", 1);
    submit(h->stream, 6e-6 + operations / 3e13 * (need ? 1 : 1.6) * (1 + c.engine % 7 / 6.0), execute_now, &c, sizeof c);
    return 0;
}

/* ---- everything else: passed on, or, where it needs a handle, refused ---- */
#define REFUSED(name) API int name(void) { SAY(1, "refused: " #name); return NOT_SUPPORTED; }
#define THREE(before, after) REFUSED(before##Forward##after) REFUSED(before##BackwardData##after) REFUSED(before##BackwardFilter##after)
THREE(cudnnConvolution, ) THREE(cudnnGetConvolution, WorkspaceSize) THREE(cudnnFindConvolution, AlgorithmEx) THREE(cudnnGetConvolution, Algorithm_v7)

#define FORWARD_TO_REAL(name) \
    __asm__(".text\n.globl " #name "\n.type " #name ",@function\n" #name ": jmp *slot_" #name "(%rip)\n" \
            ".bss\n.balign 8\n.globl slot_" #name "\n.hidden slot_" #name "\nslot_" #name ": .skip 8\n.text\n"); \
    extern void *slot_##name __attribute__((visibility("hidden")));
#define F FORWARD_TO_REAL
FORWARDED
#undef F
__attribute__((constructor)) static void open_real(void)
{
    const char *path = getenv("NULL_CARD_CUDNN");
    if (!path) return;
    real = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!real) { SAY(0, "%s", dlerror()); return; }
#define F(name) slot_##name = dlsym(real, #name);
    FORWARDED
#undef F
}
