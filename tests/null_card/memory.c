/* Memory: that of the card is the host's, mapped when it is asked for and counted in whole blocks of 2 MiB. */
#include "null.h"
#include <sys/mman.h>

static struct block *blocks; /* by address */
static size_t count, room;

static size_t place_of(uintptr_t at) /* of the first block behind the address */
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].at <= at) low = middle + 1;
        else high = middle;
    }
    return low;
}
static struct block *found_at(uintptr_t at)
{
    size_t i = place_of(at);
    return i && at < blocks[i - 1].at + blocks[i - 1].size ? &blocks[i - 1] : 0;
}
int block_of(const void *at, struct block *found)
{
    LOCK;
    struct block *block = found_at((uintptr_t)at);
    if (block) *found = *block;
    UNLOCK;
    return block != 0;
}
int is_on_card(const void *at, size_t size)
{
    struct block block;
    return block_of(at, &block) && block.place == ON_CARD && (uintptr_t)at + size <= block.at + block.size;
}

static void keep(struct block block)
{
    if (count == room) blocks = realloc(blocks, (room = room ? 2 * room : 256) * sizeof *blocks);
    size_t i = place_of(block.at);
    memmove(blocks + i + 1, blocks + i, (count++ - i) * sizeof *blocks);
    blocks[i] = block;
}
static size_t whole(size_t size) { return (size + 2 * MIB - 1) / (2 * MIB) * (2 * MIB); }

static cudaError_t take(void **at, size_t size, enum place place)
{
    *at = 0;
    if (!size) return 0;
    size_t align = place == ON_CARD ? 2 * MIB : 4096, raw_size = whole(size) + align;
    LOCK;
    if (place == ON_CARD && counted.used + whole(size) > card_memory()) { UNLOCK; return failing(cudaErrorMemoryAllocation); }
    char *raw = mmap(0, raw_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) { UNLOCK; return failing(cudaErrorMemoryAllocation); }
    *at = (void *)(((uintptr_t)raw + align - 1) / align * align);
    keep((struct block){(uintptr_t)*at, size, place, chosen_card(), raw, raw_size});
    if (place == ON_CARD) {
        counted.allocations++;
        counted.used += whole(size);
        if (counted.used > counted.peak) counted.peak = counted.used;
    }
    UNLOCK;
    return 0;
}
static cudaError_t drop(void *at)
{
    if (!at) return 0;
    LOCK;
    struct block *block = found_at((uintptr_t)at);
    if (!block || block->at != (uintptr_t)at) { UNLOCK; return failing(cudaErrorInvalidValue); }
    order_forget(block->at, block->size);
    if (block->place == ON_CARD) { counted.frees++; counted.used -= whole(block->size); }
    if (block->raw) munmap(block->raw, block->raw_size);
    memmove(block, block + 1, (--count - (block - blocks)) * sizeof *blocks);
    UNLOCK;
    return 0;
}

API void null_card_reset_peak(void) { counted.peak = counted.used; }
API cudaError_t cudaMalloc(void **at, size_t n) { return take(at, n, ON_CARD); }
API cudaError_t cudaMallocAsync(void **at, size_t n, cudaStream_t s) { return take(at, n, ON_CARD); }
API cudaError_t cudaFree(void *at) { waited(); order_host_waits_for_all(); return drop(at); } /* CUDA's waits for the card */
API cudaError_t cudaFreeAsync(void *at, cudaStream_t s) { return drop(at); }
API cudaError_t cudaHostAlloc(void **at, size_t n, unsigned flags) { return take(at, n, PINNED); }
API cudaError_t cudaFreeHost(void *at) { return drop(at); }
API cudaError_t cudaHostRegister(void *at, size_t n, unsigned flags)
{
    LOCK;
    keep((struct block){(uintptr_t)at, n, REGISTERED, chosen_card(), 0, 0});
    UNLOCK;
    return 0;
}
API cudaError_t cudaHostUnregister(void *at) { return drop(at); }
API cudaError_t cudaMemGetInfo(size_t *free, size_t *all) { *all = card_memory(); *free = *all - counted.used; return 0; }
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *at)
{
    struct block block;
    memset(a, 0, sizeof *a);
    a->device = -2;
    if (!block_of(at, &block)) { a->type = cudaMemoryTypeUnregistered; return 0; }
    a->type = block.place == ON_CARD ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    a->device = block.card;
    a->devicePointer = (void *)at;
    if (block.place != ON_CARD) a->hostPointer = (void *)at;
    return 0;
}

static char pools[MOST_CARDS];
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int card) { *pool = (cudaMemPool_t)&pools[card]; return 0; }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *value) { *(uint64_t *)value = 0; return 0; }
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *value) { return 0; }
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t p, const struct cudaMemAccessDesc *d, size_t n) { return 0; }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t p, size_t n) { return 0; }

/* Variables of the programs that are on the card: memory that is not counted. */
static struct { const void *symbol; void *at; } *symbols;
static size_t symbol_count;
void *symbol_memory(const void *symbol)
{
    LOCK;
    size_t i = 0;
    while (i < symbol_count && symbols[i].symbol != symbol) i++;
    if (i == symbol_count) {
        symbols = realloc(symbols, (i + 1) * sizeof *symbols);
        symbols[symbol_count++].symbol = symbol;
        take(&symbols[i].at, 65536, PINNED);
        found_at((uintptr_t)symbols[i].at)->place = ON_CARD;
    }
    UNLOCK;
    return symbols[i].at;
}
API cudaError_t cudaGetSymbolAddress(void **at, const void *symbol) { *at = symbol_memory(symbol); return 0; }
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t offset, enum cudaMemcpyKind kind)
{
    memcpy((char *)symbol_memory(symbol) + offset, from, n);
    return 0;
}
