/* What torch asks of cuBLAS, and of cuDNN beside convolutions. Torch's operators come here only where the host does not
   compute them (NULL_CARD_ARITHMETIC=0): products and norms are then accepted like kernels, and compute nothing. Workspaces
   are torch's own for cuBLAS; those of cuDNN's norms are not known and taken for 0. */
#include "null.h"

static char object; /* what stands for handles and descriptors that nobody looks into */

static int accepted(const char *name)
{
    if (setting("NULL_CARD_ARITHMETIC", 1)) {
        fprintf(stderr, "null card: refused: %s\n", name);
        return 801;
    }
    SAY(2, "%s", name);
    return 0;
}
static int launched(const char *name)
{
    int status = accepted(name);
    if (status) return status;
    LOCK;
    counted.launches++;
    counted.uncomputed++;
    UNLOCK;
    return 0;
}
static int made(const char *name, void **object_at)
{
    *object_at = &object;
    return accepted(name);
}
#define MADE(name) API int name(void **at) { return made(#name, at); }
#define ACCEPTED(name) API int name(void) { return accepted(#name); }
#define LAUNCHED(name) API int name(void) { return launched(#name); }

/* Torch keeps a workspace for each handle of cuBLAS and stream, and takes a handle for each thread. */
API int cublasCreate_v2(void **at) { *at = malloc(1); return accepted("cublasCreate_v2"); }
API int cublasDestroy_v2(void *handle) { free(handle); return accepted("cublasDestroy_v2"); }
MADE(cublasLtMatmulDescCreate)
MADE(cublasLtMatmulPreferenceCreate)
MADE(cublasLtMatrixLayoutCreate)
ACCEPTED(cublasSetStream_v2)
ACCEPTED(cublasSetWorkspace_v2)
ACCEPTED(cublasSetMathMode)
ACCEPTED(cublasSetPointerMode_v2)
ACCEPTED(cublasLtMatmulDescDestroy)
ACCEPTED(cublasLtMatmulDescSetAttribute)
ACCEPTED(cublasLtMatmulPreferenceDestroy)
ACCEPTED(cublasLtMatmulPreferenceSetAttribute)
ACCEPTED(cublasLtMatrixLayoutDestroy)
ACCEPTED(cublasLtMatrixLayoutSetAttribute)
LAUNCHED(cublasLtMatmul)
LAUNCHED(cublasGemmEx)
LAUNCHED(cublasGemmStridedBatchedEx)
LAUNCHED(cublasSgemm_v2)
LAUNCHED(cublasSgemmEx)
LAUNCHED(cublasSgemmStridedBatched)
LAUNCHED(cublasSgemv_v2)
LAUNCHED(cublasDgemm_v2)
LAUNCHED(cublasDgemmStridedBatched)
LAUNCHED(cublasDgemv_v2)
LAUNCHED(cudnnBatchNormalizationForwardInference)
LAUNCHED(cudnnBatchNormalizationForwardTrainingEx)
LAUNCHED(cudnnBatchNormalizationBackwardEx)

API int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return accepted("cublasGetMathMode"); }
API int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return accepted("cublasGetPointerMode_v2"); }
struct found { uint64_t algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; }; /* cublasLtMatmulHeuristicResult_t */
API int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int most, struct found *found, int *count)
{
    *found = (struct found){.waves = 1};
    *count = 1;
    return accepted("cublasLtMatmulAlgoGetHeuristic");
}
API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int m, int o, void *x, void *z, void *y, void *n, void *a, size_t *size)
{
    *size = 0;
    return 0;
}
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int m, int o, void *x, void *y, void *dy, void *dz, void *dx, void *n, void *a, size_t *size)
{
    *size = 0;
    return 0;
}
API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int m, int o, void *a, void *x, size_t *size) { *size = 0; return 0; }
