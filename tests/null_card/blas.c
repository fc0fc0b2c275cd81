/* cuBLAS's products in single precision, which are asked for where nothing computes torch's operators: launched in form,
   as kernels are. What is not here is refused. */
#include "null.h"

struct products { cudaStream_t stream; int math, place; };
API int cublasCreate_v2(struct products **p) { *p = calloc(1, sizeof **p); return 0; }
API int cublasDestroy_v2(struct products *p) { free(p); return 0; }
API int cublasSetStream_v2(struct products *p, cudaStream_t s) { p->stream = s; return 0; }
API int cublasGetStream_v2(struct products *p, cudaStream_t *s) { *s = p->stream; return 0; }
API int cublasSetWorkspace_v2(struct products *p, void *at, size_t size) { return 0; }
API int cublasSetMathMode(struct products *p, int mode) { p->math = mode; return 0; }
API int cublasGetMathMode(struct products *p, int *mode) { *mode = p->math; return 0; }
API int cublasSetPointerMode_v2(struct products *p, int place) { p->place = place; return 0; }
API int cublasGetPointerMode_v2(struct products *p, int *place) { *place = p->place; return 0; }
static int launch(struct products *p)
{
    LOCK;
    counted.launches++;
    counted.uncomputed++;
    UNLOCK;
    submit(p->stream, 4e-6, 0, 0, 0);
    return 0;
}
API int cublasSgemv_v2(struct products *p) { return launch(p); }
API int cublasSdot_v2(struct products *p) { return launch(p); }
API int cublasSgemm_v2(struct products *p) { return launch(p); }
API int cublasGemmEx(struct products *p) { return launch(p); }
