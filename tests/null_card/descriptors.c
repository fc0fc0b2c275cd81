/* What cuDNN's descriptors were told, noted on the way to cuDNN, and which convolution an operation is. */
#include "descriptors.h"

static struct known *table[4096];

struct known **place_of(descriptor d)
{
    struct known **place = &table[((uintptr_t)d >> 4) % 4096];
    while (*place && (*place)->at != d) place = &(*place)->next;
    return place;
}
struct known *known_of(descriptor d) { return d ? *place_of(d) : 0; }
struct value *value_of(descriptor d, int name)
{
    struct known *known = known_of(d);
    struct value *value = known ? known->values : 0;
    while (value && value->name != name) value = value->next;
    return value;
}
descriptor child_of(descriptor d, int name)
{
    struct value *value = value_of(d, name);
    return value ? *(descriptor *)value->bytes : 0;
}
static size_t bytes_of(int type)
{
    switch (type) {
    case 0: case 3: case 5: case 6: case 15: return 8; /* handles, int64, double, pointers, descriptors */
    case 2: case 24: return 1;                          /* bool, char */
    default: return 4;                                  /* float and enums */
    }
}
void note(descriptor d, int name, int type, int64_t count, const void *bytes)
{
    struct known *known = known_of(d);
    if (!known || count < 0) return;
    struct value *value = value_of(d, name);
    if (!value) {
        value = calloc(1, sizeof *value);
        *value = (struct value){.name = name, .next = known->values};
        known->values = value;
    }
    free(value->bytes);
    value->type = type;
    value->count = count;
    value->bytes = memcpy(malloc(count * bytes_of(type) + 8), bytes, count * bytes_of(type));
}
void forget_values(struct known *known)
{
    for (struct value *value = known->values, *next; value; value = next) {
        next = value->next;
        free(value->bytes);
        free(value);
    }
    known->values = 0;
}

static int read_tensor(descriptor d, struct tensor *t)
{
    struct value *dims = value_of(d, 902), *strides = value_of(d, 903), *type = value_of(d, 901), *uid = value_of(d, 906), *alignment = value_of(d, 900);
    if (!dims || !strides || !type || !uid || dims->count > 8) return 0;
    *t = (struct tensor){.rank = dims->count, .type = *(int *)type->bytes, .uid = *(int64_t *)uid->bytes, .alignment = alignment ? *(int64_t *)alignment->bytes : 1};
    memcpy(t->dims, dims->bytes, 8 * t->rank);
    memcpy(t->strides, strides->bytes, 8 * t->rank);
    return 1;
}
static double scalar(descriptor d, int name)
{
    struct value *value = value_of(d, name);
    return !value ? 0 : value->type == 5 ? *(double *)value->bytes : *(float *)value->bytes;
}
void read_convolution(descriptor operation, struct convolution *c)
{
    static const int names[3][6] = {{704, 703, 705, 702, 700, 701}, {716, 715, 717, 714, 712, 713}, {710, 709, 711, 708, 706, 707}};
    const int *name = names[known_of(operation)->kind - FORWARD]; /* x, w, y, geometry, alpha, beta */
    descriptor geometry = child_of(operation, name[3]);
    c->kind = 0;
    for (int i = 0; i < 3; i++) if (!read_tensor(child_of(operation, name[i]), &c->t[i])) return;
    struct value *padding = value_of(geometry, 105), *stride = value_of(geometry, 103), *dilation = value_of(geometry, 102);
    if (!padding || !stride || !dilation) return;
    for (int i = 0; i < c->t[0].rank - 2; i++) {
        c->padding[i] = ((int64_t *)padding->bytes)[i];
        c->stride[i] = ((int64_t *)stride->bytes)[i];
        c->dilation[i] = ((int64_t *)dilation->bytes)[i];
    }
    c->alpha = scalar(operation, name[4]);
    c->beta = scalar(operation, name[5]);
    c->kind = known_of(operation)->kind;
}
