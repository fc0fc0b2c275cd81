/* The arithmetic of a convolution, from its definition: target = alpha * sum + beta * target, summed in double. */
#include "null.h"

int64_t element_bytes(int type) { return type == FLOAT64 ? 8 : type == FLOAT32 || type == 4 ? 4 : type == FLOAT16 || type == BFLOAT16 ? 2 : 1; }
int64_t extent_of(const struct tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->rank; i++) n += (t->dims[i] - 1) * t->strides[i];
    return n;
}

static double read_at(const struct tensor *t, int64_t i)
{
    if (t->type == FLOAT32) return ((float *)t->at)[i];
    if (t->type == FLOAT64) return ((double *)t->at)[i];
    if (t->type == FLOAT16) return ((_Float16 *)t->at)[i];
    uint32_t bits = (uint32_t)((uint16_t *)t->at)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static void write_at(const struct tensor *t, int64_t i, double value)
{
    if (t->type == FLOAT32) ((float *)t->at)[i] = value;
    else if (t->type == FLOAT64) ((double *)t->at)[i] = value;
    else if (t->type == FLOAT16) ((_Float16 *)t->at)[i] = value;
    else {
        float narrow = value;
        uint32_t bits;
        memcpy(&bits, &narrow, 4);
        ((uint16_t *)t->at)[i] = narrow != narrow ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to nearest even */
    }
}

/* A tensor as a dense array of doubles with three dims of space. */
struct dense { int64_t n, c, dims[3]; double *at; };
static int64_t offset_of(const struct tensor *t, const struct dense *d, int64_t i)
{
    int64_t found = 0, rest = i;
    for (int dim = t->rank - 1; dim >= 0; dim--) {
        int64_t extent = dim == 0 ? d->n : dim == 1 ? d->c : t->dims[dim];
        found += rest % extent * t->strides[dim];
        rest /= extent;
    }
    return found;
}
static int64_t elements(const struct dense *d) { return d->n * d->c * d->dims[0] * d->dims[1] * d->dims[2]; }
static struct dense dense_of(const struct tensor *t, int is_target)
{
    struct dense d = {t->dims[0], t->dims[1], {1, 1, 1}, 0};
    for (int i = 2; i < t->rank; i++) d.dims[5 - t->rank + i - 2] = t->dims[i]; /* the last dims of space */
    d.at = calloc(elements(&d), sizeof *d.at);
    if (!is_target)
        for (int64_t i = 0; i < elements(&d); i++) d.at[i] = read_at(t, offset_of(t, &d, i));
    return d;
}

/* The outputs that one tap reads within the inputs: from `first` up to `last`. */
static void range(int64_t tap, int64_t padding, int64_t stride, int64_t dilation, int64_t inputs, int64_t outputs, int64_t *first, int64_t *last)
{
    int64_t shift = padding - tap * dilation; /* input = output * stride - shift */
    *first = shift > 0 ? (shift + stride - 1) / stride : 0;
    *last = inputs + shift > 0 ? (inputs + shift - 1) / stride + 1 : 0;
    if (*last > outputs) *last = outputs;
}

/* One channel and one filter of one sample: x is read and y summed, x summed, or w summed. Where the last stride is known to
   be 1 the compiler computes several outputs at once. */
static inline __attribute__((always_inline)) void plane(int kind, int64_t step, double *restrict x, const int64_t *X, double *restrict w, const int64_t *W, double *restrict y, const int64_t *Y, const int64_t *padding, const int64_t *stride, const int64_t *dilation)
{
    for (int64_t p = 0; p < W[0]; p++) for (int64_t q = 0; q < W[1]; q++) for (int64_t r = 0; r < W[2]; r++) {
        int64_t a0, a1, b0, b1, c0, c1;
        range(p, padding[0], stride[0], dilation[0], X[0], Y[0], &a0, &a1);
        range(q, padding[1], stride[1], dilation[1], X[1], Y[1], &b0, &b1);
        range(r, padding[2], stride[2], dilation[2], X[2], Y[2], &c0, &c1);
        double *tap = &w[(p * W[1] + q) * W[2] + r], weight = *tap, sum = 0;
        for (int64_t a = a0; a < a1; a++) for (int64_t b = b0; b < b1; b++) {
            int64_t i = a * stride[0] - padding[0] + p * dilation[0], j = b * stride[1] - padding[1] + q * dilation[1];
            double *from = &x[(i * X[1] + j) * X[2] - padding[2] + r * dilation[2]], *to = &y[(a * Y[1] + b) * Y[2]];
            if (kind == FORWARD) for (int64_t c = c0; c < c1; c++) to[c] += weight * from[c * step];
            else if (kind == BACKWARD_DATA) for (int64_t c = c0; c < c1; c++) from[c * step] += weight * to[c];
            else for (int64_t c = c0; c < c1; c++) sum += from[c * step] * to[c];
        }
        if (kind == BACKWARD_FILTER) *tap += sum;
    }
}

void compute(const struct convolution *given)
{
    int kind = given->kind, spatial = given->t[0].rank - 2;
    struct dense x = dense_of(&given->t[0], kind == BACKWARD_DATA), w = dense_of(&given->t[1], kind == BACKWARD_FILTER), y = dense_of(&given->t[2], kind == FORWARD);
    int64_t padding[3] = {0, 0, 0}, stride[3] = {1, 1, 1}, dilation[3] = {1, 1, 1};
    for (int i = 0; i < spatial; i++) {
        padding[3 - spatial + i] = given->padding[i];
        stride[3 - spatial + i] = given->stride[i];
        dilation[3 - spatial + i] = given->dilation[i];
    }
    int64_t per_x = x.dims[0] * x.dims[1] * x.dims[2], per_w = w.dims[0] * w.dims[1] * w.dims[2], per_y = y.dims[0] * y.dims[1] * y.dims[2];
    int64_t filters_per_group = w.n / (x.c / w.c);
#define PLANES(kind, step) \
    for (int64_t n = 0; n < x.n; n++) for (int64_t k = 0; k < w.n; k++) for (int64_t c = 0; c < w.c; c++) \
        plane(kind, step, x.at + (n * x.c + k / filters_per_group * w.c + c) * per_x, x.dims, w.at + (k * w.c + c) * per_w, w.dims, \
              y.at + (n * y.c + k) * per_y, y.dims, padding, stride, dilation)
    if (stride[2] != 1) PLANES(kind, stride[2]);
    else if (kind == FORWARD) PLANES(FORWARD, 1);
    else if (kind == BACKWARD_DATA) PLANES(BACKWARD_DATA, 1);
    else PLANES(BACKWARD_FILTER, 1);
#undef PLANES
    const struct dense *target = kind == FORWARD ? &y : kind == BACKWARD_DATA ? &x : &w;
    const struct tensor *to = &given->t[kind == FORWARD ? 2 : kind == BACKWARD_DATA ? 0 : 1];
    for (int64_t i = 0; i < elements(target); i++) {
        int64_t at = offset_of(to, target, i);
        write_at(to, at, given->alpha * target->at[i] + (given->beta ? given->beta * read_at(to, at) : 0));
    }
    free(x.at);
    free(w.at);
    free(y.at);
    __atomic_add_fetch(&counted.computed, 1, __ATOMIC_RELAXED);
}
