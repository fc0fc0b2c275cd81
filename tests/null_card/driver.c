/* The driver, as far as torch asks for its functions by name and cuDNN for those by which it takes up what it compiles.
   Programs are accepted and never looked at; whatever else is asked for is refused. */
#include "null.h"
#include <dlfcn.h>

#define NOT_SUPPORTED 801
static int refuse_driver_call(void) { return NOT_SUPPORTED; }

#define MADE(name) API int name(void **made) { *made = malloc(16); return 0; }
#define ACCEPTED(name) API int name(void) { return 0; }
MADE(cuModuleLoadData) MADE(cuModuleGetFunction) MADE(cuLibraryLoadData) MADE(cuLibraryLoadFromFile) MADE(cuLibraryGetKernel)
MADE(cuKernelGetFunction)
ACCEPTED(cuModuleUnload) ACCEPTED(cuLibraryUnload) ACCEPTED(cuLinkAddData) ACCEPTED(cuLinkDestroy) ACCEPTED(cuCtxPopCurrent)
ACCEPTED(cuCtxPushCurrent) ACCEPTED(cuKernelSetAttribute) ACCEPTED(cuLaunchKernel) ACCEPTED(cuLaunchKernelEx)
ACCEPTED(cuLaunchCooperativeKernel) ACCEPTED(cuTensorMapEncodeTiled) ACCEPTED(cuTensorMapEncodeIm2col)
API int cuLinkCreate(unsigned n, void *options, void *values, void **state) { *state = malloc(64); return 0; }
API int cuLinkComplete(void *state, void **code, size_t *size) { *code = state; *size = 64; return 0; }
API int cuKernelGetAttribute(int *value) { *value = 0; return 0; }
API int cuOccupancyMaxPotentialClusterSize(int *size) { *size = 8; return 0; }
API int cuCtxGetLimit(size_t *value) { *value = MIB; return 0; }
API int cuStreamGetCtx(void *stream, void **context) { *context = (char *)&counted + chosen_card(); return 0; }
API int cuGetErrorName(int error, const char **text) { *text = cudaGetErrorName(error); return 0; }
API int cuInit(unsigned flags) { return 0; }
API int cuDriverGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
API int cuGetErrorString(int error, const char **text) { *text = cudaGetErrorString(error); return 0; }
API int cuDevicePrimaryCtxGetState(int card, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
API int cuCtxGetCurrent(void **context) { *context = (char *)&counted + chosen_card(); return 0; }
API int cuCtxSetCurrent(void *context) { return 0; }
API int cuDeviceGet(int *card, int index) { *card = index; return index < cards() ? 0 : 101; }
API int cuDeviceGetCount(int *n) { *n = cards(); return 0; }
API int cuDeviceGetAttribute(int *value, int name, int card) { *value = card_attribute(name, card); return 0; } /* the same numbers */
API int cuPointerGetAttribute(void *to, int name, uintptr_t at)
{
    struct block block;
    if (!block_of((void *)at, &block)) return 1;
    if (name == 9) *(int *)to = block.card; /* CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL */
    else if (name == 1) cuCtxGetCurrent(to);
    else return NOT_SUPPORTED;
    return 0;
}
static void *driver_function(const char *name)
{
    static void *self;
    Dl_info info;
    if (!self && dladdr((void *)cuInit, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    void *found = dlsym(self, name);
    SAY(3, "the driver's %s: %s", name, found ? "here" : "refused");
    return found ? found : (void *)refuse_driver_call;
}
/* cudart, of which cuDNN has a copy, asks for a table by which it knows NVIDIA's driver: there is none, and that copy
   stays without a device, as it must. */
API int cuGetExportTable(const void **table, const void *id) { *table = 0; return 500; }
API int cuGetProcAddress_v2(const char *name, void **to, int version, uint64_t flags, int *status)
{
    *to = driver_function(name);
    if (status) *status = 0;
    return 0;
}
API int cuGetProcAddress(const char *name, void **to, int version, uint64_t flags) { return cuGetProcAddress_v2(name, to, version, flags, 0); }
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **to, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result)
{
    *to = driver_function(name);
    if (result) *result = cudaDriverEntryPointSuccess;
    return 0;
}
