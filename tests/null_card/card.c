/* The imagined card, an H100 SXM: its properties, which card is current, errors, and what is counted. */
#include "null.h"

pthread_mutex_t null_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
struct counts counted;
static __thread int chosen;
static __thread cudaError_t last;

size_t setting(const char *name, size_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, 0, 0) : otherwise;
}

int cards(void)
{
    size_t n = setting("NULL_CARD_COUNT", 1);
    return n < MOST_CARDS ? (int)n : MOST_CARDS;
}

size_t card_memory(void) { return setting("NULL_CARD_MIB", 81078) * MIB; }
int chosen_card(void) { return chosen; }

cudaError_t failing(cudaError_t error)
{
    if (error) last = error;
    return error;
}

API uint64_t null_card_counted(const char *name)
{
#define COUNT(field) if (!strcmp(name, #field)) return counted.field;
    COUNT(launches) COUNT(uncomputed) COUNT(copies) COUNT(fills) COUNT(allocations) COUNT(frees) COUNT(waits) COUNT(executed)
    COUNT(computed) COUNT(refused) COUNT(plans) COUNT(restored) COUNT(failed) COUNT(plan_nanoseconds) COUNT(workspace) COUNT(used) COUNT(peak)
#undef COUNT
    return UINT64_MAX;
}

API cudaError_t cudaGetDeviceCount(int *n) { *n = cards(); return 0; }
API cudaError_t cudaGetDevice(int *card) { *card = chosen; return 0; }
API cudaError_t cudaSetDevice(int card)
{
    if (card < 0 || card >= cards()) return failing(cudaErrorInvalidDevice);
    chosen = card;
    return 0;
}
API cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
API cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
API cudaError_t cudaGetLastError(void) { cudaError_t error = last; last = 0; return error; }
API cudaError_t cudaPeekAtLastError(void) { return last; }
API const char *cudaGetErrorName(cudaError_t error)
{
    static __thread char text[32];
    snprintf(text, sizeof text, "cudaError %d", error);
    return error ? text : "cudaSuccess";
}
API const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "out of memory" : error ? "an error of the null card" : "no error";
}

int card_attribute(enum cudaDeviceAttr name, int card)
{
    switch (name) {
#define A(name, value) case cudaDevAttr##name: return value;
    A(MaxThreadsPerBlock, 1024) A(MaxBlockDimX, 1024) A(MaxBlockDimY, 1024) A(MaxBlockDimZ, 64) A(MaxGridDimX, 2147483647)
    A(MaxGridDimY, 65535) A(MaxGridDimZ, 65535) A(MaxSharedMemoryPerBlock, 49152) A(TotalConstantMemory, 65536) A(WarpSize, 32)
    A(MaxPitch, 2147483647) A(MaxRegistersPerBlock, 65536) A(ClockRate, 1980000) A(TextureAlignment, 512)
    A(MultiProcessorCount, 132) A(CanMapHostMemory, 1) A(ConcurrentKernels, 1) A(EccEnabled, 1) A(PciBusId, 16 + card)
    A(MemoryClockRate, 2619000) A(GlobalMemoryBusWidth, 5120) A(L2CacheSize, 52428800) A(MaxThreadsPerMultiProcessor, 2048)
    A(AsyncEngineCount, 3) A(UnifiedAddressing, 1) A(ComputeCapabilityMajor, 9) A(StreamPrioritiesSupported, 1)
    A(MaxSharedMemoryPerMultiprocessor, 233472) A(MaxRegistersPerMultiprocessor, 65536) A(ManagedMemory, 1)
    A(CooperativeLaunch, 1) A(MaxSharedMemoryPerBlockOptin, 232448) A(MaxBlocksPerMultiprocessor, 32)
    A(ReservedSharedMemoryPerBlock, 1024) A(MemoryPoolsSupported, 1)
#undef A
    default: return 0;
    }
}
API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int card) { *value = card_attribute(name, card); return 0; }
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int card)
{
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H100 80GB HBM3");
    memset(&p->uuid, 0x11 + card, sizeof p->uuid);
    p->totalGlobalMem = card_memory();
#define P(field, name) p->field = card_attribute(cudaDevAttr##name, card);
    P(sharedMemPerBlock, MaxSharedMemoryPerBlock) P(regsPerBlock, MaxRegistersPerBlock) P(warpSize, WarpSize) P(memPitch, MaxPitch)
    P(maxThreadsPerBlock, MaxThreadsPerBlock) P(maxThreadsDim[0], MaxBlockDimX) P(maxThreadsDim[1], MaxBlockDimY)
    P(maxThreadsDim[2], MaxBlockDimZ) P(maxGridSize[0], MaxGridDimX) P(maxGridSize[1], MaxGridDimY) P(maxGridSize[2], MaxGridDimZ)
    P(totalConstMem, TotalConstantMemory) P(major, ComputeCapabilityMajor) P(minor, ComputeCapabilityMinor)
    P(textureAlignment, TextureAlignment) P(multiProcessorCount, MultiProcessorCount) P(canMapHostMemory, CanMapHostMemory)
    P(concurrentKernels, ConcurrentKernels) P(ECCEnabled, EccEnabled) P(pciBusID, PciBusId) P(asyncEngineCount, AsyncEngineCount)
    P(unifiedAddressing, UnifiedAddressing) P(memoryBusWidth, GlobalMemoryBusWidth) P(l2CacheSize, L2CacheSize)
    P(maxThreadsPerMultiProcessor, MaxThreadsPerMultiProcessor) P(streamPrioritiesSupported, StreamPrioritiesSupported)
    P(sharedMemPerMultiprocessor, MaxSharedMemoryPerMultiprocessor) P(regsPerMultiprocessor, MaxRegistersPerMultiprocessor)
    P(managedMemory, ManagedMemory) P(cooperativeLaunch, CooperativeLaunch) P(sharedMemPerBlockOptin, MaxSharedMemoryPerBlockOptin)
    P(maxBlocksPerMultiProcessor, MaxBlocksPerMultiprocessor) P(reservedSharedMemPerBlock, ReservedSharedMemoryPerBlock)
    P(memoryPoolsSupported, MemoryPoolsSupported)
#undef P
    return 0;
}
API cudaError_t cudaDeviceGetPCIBusId(char *to, int n, int card) { snprintf(to, n, "0000:%02X:00.0", 16 + card); return 0; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return 0; }
API cudaError_t cudaDeviceEnablePeerAccess(int card, unsigned flags) { return 0; }
API cudaError_t cudaProfilerStart(void) { return 0; }
API cudaError_t cudaProfilerStop(void) { return 0; }
