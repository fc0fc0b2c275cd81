/* Order: whether every use of memory had to come after those that it depends on, as ThreadSanitizer asks of threads.

   Work is done at once, so a missing wait changes no number here, as it would on a card. Therefore each stream, and the
   host as one more, keeps how far it knows that every other has come: a vector of clocks. Waiting for an event, a stream
   or the card joins two of them. Each byte that a copy, a fill, a convolution or an operator touched keeps who wrote it
   last, who has read it since, and when by that one's clock. Whoever touches it later must know of that time. All threads
   of the host are one: what they tell each other is not seen. A query whose answer is that an event has come counts as a
   wait, and here that is always the answer. */
#include "order.h"

enum { HOST, MOST_ACTORS = 256, MOST_READERS = 8 };

struct segment { uintptr_t at, end; struct access write, reads[MOST_READERS]; int readers; };
struct memory { uintptr_t at; uint64_t given, freed; int stack; }; /* of torch's allocator: when, by `sequence` */

static uint32_t known[MOST_ACTORS][MOST_ACTORS]; /* known[a][b]: how far a knows that b has come */
static cudaStream_t streams[MOST_ACTORS];
static int actors = 1, is_on;
static uint64_t sequence;
static struct segment **segments; /* by address, none over another */
static size_t count, room;
static struct memory *memories; /* by address */
static size_t memory_count, memory_room;
static order_stack stack_of;
static order_tell tell;

__attribute__((constructor)) static void begin(void) { is_on = setting("NULL_CARD_ORDER", 0) != 0; known[HOST][HOST] = 1; }
API void null_card_order(order_stack stack, order_tell told) { stack_of = stack; tell = told; }

/* ---- clocks; whoever calls these holds the lock ---- */
static int actor_of(cudaStream_t s)
{
    if (!s->actor) {
        if (actors == MOST_ACTORS) { SAY(0, "order: more than %d streams", MOST_ACTORS - 1); abort(); }
        s->actor = actors++;
        streams[s->actor] = s;
        known[s->actor][s->actor] = 1;
    }
    return s->actor;
}
static void join(uint32_t *to, const uint32_t *from)
{
    for (int i = 0; i < actors; i++) if (from[i] > to[i]) to[i] = from[i];
}
/* `to` learns all that `from` knows until now, and not what it does next. */
static void tell_clock(int from, int to) { join(known[to], known[from]); known[from][from]++; }
static int is_default(cudaStream_t s) { return s == stream_of(0); }
/* Work comes after all that the host knows, and the default stream waits for streams that block, and they for it. */
static int enqueue(cudaStream_t s)
{
    int actor = actor_of(s);
    tell_clock(HOST, actor);
    if (s->flags & cudaStreamNonBlocking) return actor;
    if (!is_default(s)) tell_clock(actor_of(stream_of(0)), actor);
    else for (int i = 1; i < actors; i++)
        if (i != actor && streams[i] && streams[i]->card == s->card && !(streams[i]->flags & cudaStreamNonBlocking)) tell_clock(i, actor);
    return actor;
}
void order_forget_stream(cudaStream_t s) { if (s->actor) streams[s->actor] = 0; }
void order_record(cudaEvent_t e, cudaStream_t s)
{
    if (!is_on) return;
    LOCK;
    int actor = enqueue(s);
    if (!e->known) e->known = calloc(MOST_ACTORS, sizeof *e->known);
    memcpy(e->known, known[actor], sizeof known[actor]);
    known[actor][actor]++;
    UNLOCK;
}
void order_wait(cudaStream_t s, cudaEvent_t e)
{
    if (!is_on || !e->known) return;
    LOCK;
    join(known[enqueue(s)], e->known);
    UNLOCK;
}
void order_host_waits_for_event(cudaEvent_t e)
{
    if (!is_on || !e->known) return;
    LOCK;
    join(known[HOST], e->known);
    pinned_release();
    UNLOCK;
}
void order_host_waits(cudaStream_t s)
{
    if (!is_on) return;
    LOCK;
    tell_clock(enqueue(s), HOST);
    pinned_release();
    UNLOCK;
}
void order_host_waits_for_all(void)
{
    if (!is_on) return;
    LOCK;
    for (int i = 1; i < actors; i++) tell_clock(i, HOST);
    pinned_release();
    UNLOCK;
}
int order_knows(int actor, const struct access *a) { return a->epoch <= known[actor][a->actor]; }

/* ---- what is found ---- */
static size_t memory_after(uintptr_t at)
{
    size_t low = 0, high = memory_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (memories[middle].at <= at) low = middle + 1;
        else high = middle;
    }
    return low;
}
/* Torch's allocator gives a block out, or takes it back. */
API void null_card_memory(uintptr_t at, int is_freed, int stack)
{
    LOCK;
    size_t i = memory_after(at);
    if (!i || memories[i - 1].at != at) {
        if (memory_count == memory_room) memories = realloc(memories, (memory_room = 2 * memory_room + 256) * sizeof *memories);
        memmove(memories + i + 1, memories + i, (memory_count++ - i) * sizeof *memories);
        memories[i++] = (struct memory){at, 0, 0, -1};
    }
    struct memory *memory = &memories[i - 1];
    if (is_freed) { memory->freed = ++sequence; memory->stack = stack; }
    else memory->given = ++sequence;
    UNLOCK;
}
static uint64_t stream_id(int actor) { return actor == HOST ? 0 : streams[actor] ? streams[actor]->id : UINT64_MAX; }
struct fault order_fault(const struct access *before, const struct access *after, uintptr_t at)
{
    size_t i = memory_after(at);
    struct memory *memory = i ? &memories[i - 1] : 0;
    int is_freed = after->actor != HOST && memory && (memory->given > before->sequence || memory->freed > before->sequence);
    return (struct fault){at, *before, *after, stream_id(before->actor), stream_id(after->actor), is_freed, is_freed ? memory->stack : -1};
}
/* Without the lock, as Python is called. */
void order_report(const struct fault *fault)
{
    if (tell) tell(fault);
    else SAY(0, "order: %s after %s at %p", fault->after.what, fault->before.what, (void *)fault->at);
}
int order_stack_here(void) { return stack_of ? stack_of() : -1; }

/* ---- memory that was touched ---- */
static size_t segment_at(uintptr_t at) /* the first that ends behind the address */
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (segments[middle]->end <= at) low = middle + 1;
        else high = middle;
    }
    return low;
}
static struct segment *insert(size_t i, struct segment from)
{
    if (count == room) segments = realloc(segments, (room = 2 * room + 256) * sizeof *segments);
    memmove(segments + i + 1, segments + i, (count++ - i) * sizeof *segments);
    segments[i] = malloc(sizeof from);
    *segments[i] = from;
    return segments[i];
}
static void split(uintptr_t at)
{
    size_t i = segment_at(at);
    if (i == count || segments[i]->at >= at) return;
    struct segment first = *segments[i];
    first.end = segments[i]->at = at;
    insert(i, first);
}
static void drop(size_t from, size_t to)
{
    for (size_t i = from; i < to; i++) free(segments[i]);
    memmove(segments + from, segments + to, (count - to) * sizeof *segments);
    count -= to - from;
}
void order_forget(uintptr_t at, size_t size)
{
    if (!is_on) return;
    LOCK;
    split(at);
    split(at + size);
    drop(segment_at(at), segment_at(at + size));
    pinned_forget(at, size);
    UNLOCK;
}
/* Compares with what a segment keeps; true where a fault is found. */
static int compare(const struct segment *s, const struct access *a, struct fault *found)
{
    if (s->write.actor >= 0 && !order_knows(a->actor, &s->write)) { *found = order_fault(&s->write, a, s->at); return 1; }
    for (int i = 0; a->writes && i < s->readers; i++)
        if (!order_knows(a->actor, &s->reads[i])) { *found = order_fault(&s->reads[i], a, s->at); return 1; }
    return 0;
}
static void add_reader(struct segment *s, const struct access *a)
{
    int kept = 0; /* who is known to have read before need not be asked any more: whoever knows of this read knows of those */
    for (int i = 0; i < s->readers; i++) if (!order_knows(a->actor, &s->reads[i])) s->reads[kept++] = s->reads[i];
    if (kept == MOST_READERS) { SAY(0, "order: more than %d streams read at once: one is forgotten", MOST_READERS); kept--; }
    s->reads[kept++] = *a;
    s->readers = kept;
}
void order_touch(cudaStream_t s, const char *what, const void *start, size_t size, int writes)
{
    struct block block;
    if (!is_on || !size || !block_of(start, &block)) return;
    uintptr_t at = (uintptr_t)start, end = at + size;
    int stack = order_stack_here(), is_faulty = 0;
    struct fault fault;
    LOCK;
    s = stream_of(s);
    struct access a = {.actor = enqueue(s), .writes = writes, .stack = stack, .what = what, .sequence = ++sequence};
    a.epoch = known[a.actor][a.actor];
    split(at);
    split(end);
    size_t i = segment_at(at);
    while (at < end) {
        if (i == count || segments[i]->at > at) { /* nobody has touched what lies before the next segment */
            uintptr_t next = i < count && segments[i]->at < end ? segments[i]->at : end;
            insert(i, (struct segment){.at = at, .end = next, .write.actor = -1});
        }
        struct segment *each = segments[i++];
        if (!is_faulty) is_faulty = compare(each, &a, &fault);
        if (!writes) add_reader(each, &a);
        at = each->end;
    }
    if (writes) {
        drop(segment_at((uintptr_t)start) + 1, i);
        *segments[segment_at((uintptr_t)start)] = (struct segment){.at = (uintptr_t)start, .end = end, .write = a};
    }
    if (block.place == PINNED) pinned_touched((uintptr_t)start, size, &a);
    UNLOCK;
    if (is_faulty) order_report(&fault);
}
API void null_card_touch(cudaStream_t s, const char *what, const void *at, size_t size, int writes) { order_touch(s, what, at, size, writes); }
