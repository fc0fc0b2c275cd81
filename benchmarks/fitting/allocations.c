/* Counts the bytes of all blocks that torch and its kernels' libraries ask of the C library for tensors and scratch
 * (posix_memalign): preloaded, beneath everything. */
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define SLOTS (1 << 20)
#define LEAST 1024 /* Smaller blocks are not counted. */
#define GONE ((void *)1)

extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *blocks[SLOTS]; /* A hash table without chains: the next free slot is taken. */
static long sizes[SLOTS], now, most;

static unsigned slot_of(const void *block) {
    return (unsigned)(((uintptr_t)block >> 6) * 2654435761u) & (SLOTS - 1);
}

static void add(void *block, size_t size) {
    if (size < LEAST) return;
    pthread_mutex_lock(&lock);
    unsigned slot = slot_of(block);
    while (blocks[slot] != NULL && blocks[slot] != GONE) slot = (slot + 1) & (SLOTS - 1);
    blocks[slot] = block;
    sizes[slot] = (long)size;
    now += (long)size;
    if (now > most) most = now;
    pthread_mutex_unlock(&lock);
}

static void drop(void *block) {
    if (block == NULL || malloc_usable_size(block) < LEAST) return;
    pthread_mutex_lock(&lock);
    unsigned slot = slot_of(block);
    while (blocks[slot] != NULL && blocks[slot] != block) slot = (slot + 1) & (SLOTS - 1);
    if (blocks[slot] == block) {
        now -= sizes[slot];
        blocks[slot] = blocks[(slot + 1) & (SLOTS - 1)] != NULL ? GONE : NULL;
    }
    pthread_mutex_unlock(&lock);
}

int posix_memalign(void **result, size_t alignment, size_t size) {
    void *block = __libc_memalign(alignment, size);
    if (block == NULL) return ENOMEM;
    add(block, size);
    *result = block;
    return 0;
}

void *realloc(void *block, size_t size) {
    drop(block);
    return __libc_realloc(block, size);
}

void free(void *block) {
    drop(block);
    __libc_free(block);
}

long counted_now(void) { return now; }
long counted_most(void) { return most; }
void count_anew(void) { most = now; }
