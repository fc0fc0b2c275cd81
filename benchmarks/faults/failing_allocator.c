/* The memory of tensors, counted, with allocations that fail when asked to.

   Loaded before the C library (LD_PRELOAD; glibc). Torch's allocator takes memory by posix_memalign, from libc10.so, and
   only that is counted: oneDNN, in libtorch_cpu.so, does not look whether it got what it asked for, and dies (torch 2.13,
   without mucudnn too). */

#define _GNU_SOURCE
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

enum { PLACES = 1 << 18, TENSORS = 64 }; /* at multiples of so many bytes lie those of torch */

static struct { void *block; size_t size; } held[PLACES]; /* open addressing; a free place holds NULL */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t bytes, least = SIZE_MAX;
static long count, failures, failing;
static int lasting;

static uintptr_t first = 1, last; /* of the addresses at which libc10.so lies, once it does */

static int look(struct dl_phdr_info *library, size_t unused, void *none) {
    (void)unused, (void)none;
    if (!library->dlpi_name || !strstr(library->dlpi_name, "libc10.so")) return 0;
    uintptr_t low = UINTPTR_MAX, high = 0;
    for (int i = 0; i < library->dlpi_phnum; i++) {
        uintptr_t start = library->dlpi_addr + library->dlpi_phdr[i].p_vaddr;
        if (library->dlpi_phdr[i].p_type != PT_LOAD) continue;
        if (start < low) low = start;
        if (start + library->dlpi_phdr[i].p_memsz > high) high = start + library->dlpi_phdr[i].p_memsz;
    }
    first = low, last = high;
    return 1;
}

static int is_a_tensors(uintptr_t caller) {
    if (!last) dl_iterate_phdr(look, NULL);
    return first <= caller && caller < last;
}

static size_t place_of(const void *block) { return (((uintptr_t)block >> 6) * 0x9E3779B97F4A7C15u) >> 46; }

/* From here on the number-th allocation fails (0: none); if `later`, so do all later ones of at least its size. */
void failing_begin(long number, int later) {
    pthread_mutex_lock(&lock);
    count = failures = 0, failing = number, lasting = later, least = SIZE_MAX;
    pthread_mutex_unlock(&lock);
}

/* No allocation fails any more. Returns how many there were since the beginning. */
long failing_end(void) {
    pthread_mutex_lock(&lock);
    failing = 0, least = SIZE_MAX;
    pthread_mutex_unlock(&lock);
    return count;
}

long failing_failures(void) { return failures; }

/* Bytes that are allocated now. */
size_t failing_held(void) { return bytes; }

int posix_memalign(void **result, size_t alignment, size_t size) {
    void *block;
    if (!is_a_tensors((uintptr_t)__builtin_return_address(0)))
        return (*result = __libc_memalign(alignment, size)) ? 0 : ENOMEM;
    pthread_mutex_lock(&lock);
    int fails = ++count == failing || size >= least;
    failures += fails;
    if (count == failing && lasting) least = size;
    pthread_mutex_unlock(&lock);
    if (fails || !(block = __libc_memalign(alignment, size))) return ENOMEM;
    pthread_mutex_lock(&lock);
    size_t at = place_of(block);
    while (held[at].block) at = (at + 1) % PLACES;
    held[at].block = block, held[at].size = size, bytes += size;
    pthread_mutex_unlock(&lock);
    *result = block;
    return 0;
}

void free(void *block) {
    if (block && !((uintptr_t)block % TENSORS)) {
        pthread_mutex_lock(&lock);
        size_t at = place_of(block);
        while (held[at].block && held[at].block != block) at = (at + 1) % PLACES;
        if (held[at].block) {
            bytes -= held[at].size, held[at].block = NULL;
            /* What was put further on for want of this place comes closer. */
            for (size_t next = (at + 1) % PLACES; held[next].block; next = (next + 1) % PLACES) {
                size_t wanted = place_of(held[next].block);
                if ((next - wanted) % PLACES >= (next - at) % PLACES) {
                    held[at] = held[next], held[next].block = NULL, at = next;
                }
            }
        }
        pthread_mutex_unlock(&lock);
    }
    __libc_free(block);
}
