/* Copies and fills: made in the order in which they are asked for. */
#include "null.h"
#include <sys/mman.h>

struct copy { char *to; const char *from; size_t width, height, to_pitch, from_pitch; };
static void move(const struct copy *c)
{
    /* Where nothing is computed, large tensors hold nothing: their pages are not to take the host's memory. */
    if (c->width >= 4 * MIB && !setting("NULL_CARD_ARITHMETIC", 1) && is_on_card(c->to, c->width) && is_on_card(c->from, c->width)) return;
    if (c->height) {
        pinned_open(c->to, (c->height - 1) * c->to_pitch + c->width);
        pinned_open(c->from, (c->height - 1) * c->from_pitch + c->width);
    }
    for (size_t row = 0; row < c->height; row++) memmove(c->to + row * c->to_pitch, c->from + row * c->from_pitch, c->width);
}
static void copy_now(const void *data, cudaStream_t stream)
{
    const struct copy *c = data;
    move(c);
    for (size_t row = 0; row < c->height; row++) {
        order_touch(stream, "a copy", c->from + row * c->from_pitch, c->width, 0);
        order_touch(stream, "a copy", c->to + row * c->to_pitch, c->width, 1);
    }
}
static cudaError_t copy(struct copy c, cudaStream_t stream)
{
    counted.copies++;
    submit(stream, 2e-6 + (double)c.width * c.height / 1e12, copy_now, &c, sizeof c);
    return 0;
}
static cudaError_t line(void *to, const void *from, size_t n, cudaStream_t stream) { return copy((struct copy){to, from, n, 1, 0, 0}, stream); }
/* The host waits for a copy of memory that is not pinned: until it is made, or only read where it goes to the card. */
static cudaError_t waited_for(cudaError_t status, void *to, const void *from, cudaStream_t s)
{
    struct block block;
    int is_read_at_once = !block_of(from, &block), is_ended = !block_of(to, &block);
    if (is_read_at_once || is_ended) waited();
    if (is_ended) order_host_waits(stream_of(s));
    return status;
}
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s) { return waited_for(line(to, from, n, s), to, from, s); }
API cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind)
{
    waited();
    line(to, from, n, 0);
    if (!is_on_card(to, n) || !is_on_card(from, n)) order_host_waits(stream_of(0));
    return 0;
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t s) { return line(to, from, n, s); }
API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t s)
{
    return waited_for(copy((struct copy){to, from, width, height, to_pitch, from_pitch}, s), to, from, s);
}

struct fill { char *to; int value; size_t size; };
static void fill_now(const void *data, cudaStream_t stream)
{
    const struct fill *f = data;
    pinned_open(f->to, f->size);
    uintptr_t first = ((uintptr_t)f->to + 4095) & ~4095ul, last = ((uintptr_t)f->to + f->size) & ~4095ul;
    struct block block;
    if (!f->value && f->size >= 4 * MIB && block_of(f->to, &block) && block.place != REGISTERED) {
        memset(f->to, 0, first - (uintptr_t)f->to); /* whole pages are given back: they read as zero and take no memory */
        madvise((void *)first, last - first, MADV_DONTNEED);
        memset((void *)last, 0, (uintptr_t)f->to + f->size - last);
    } else
        memset(f->to, f->value, f->size);
    order_touch(stream, "a fill", f->to, f->size, 1);
}
static cudaError_t fill(void *to, int value, size_t n, cudaStream_t stream)
{
    struct fill f = {to, value, n};
    counted.fills++;
    submit(stream, 2e-6 + n / 2e12, fill_now, &f, sizeof f);
    return 0;
}
API cudaError_t cudaMemset(void *to, int value, size_t n) { return fill(to, value, n, 0); }
API cudaError_t cudaMemsetAsync(void *to, int value, size_t n, cudaStream_t s) { return fill(to, value, n, s); }
