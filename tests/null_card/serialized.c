/* Which convolution a serialized plan computes, read from cuDNN's own text of it. */
#include "descriptors.h"

/* What follows a key; the end of the text where it has none. */
static const char *after(const char *text, const char *key)
{
    const char *found = strstr(text, key);
    return found ? found + strlen(key) : text + strlen(text);
}
static int read_numbers(const char *text, const char *key, int64_t *to, int most)
{
    const char *at = after(text, key);
    int count = 0;
    if (*at != '[') return 0;
    do to[count++] = strtoll(at + 1, (char **)&at, 10);
    while (*at == ',' && count < most);
    return count;
}
static int read_type(const char *at)
{
    static const struct { const char *name; int type; } types[] = {{"\"CUDNN_DATA_FLOAT\"", FLOAT32}, {"\"CUDNN_DATA_DOUBLE\"", FLOAT64}, {"\"CUDNN_DATA_HALF\"", FLOAT16}, {"\"CUDNN_DATA_BFLOAT16\"", BFLOAT16}};
    for (int i = 0; i < 4; i++) if (!strncmp(at, types[i].name, strlen(types[i].name))) return types[i].type;
    return -1;
}
void read_serialized(const char *text, struct convolution *c)
{
    static const char *const forms[3] = {"\"CONV_FORWARD\"", "\"CONV_BWD_FILTER\"", "\"CONV_BWD_DATA\""};
    const char *form = after(text, "\"finalizeMode\":"), *tensor = form, *node = after(text, "\"nodes\":");
    c->kind = 0;
    for (int i = 0; i < 3; i++) { /* x, w and y, in this order */
        struct tensor *t = &c->t[i];
        tensor = after(tensor, "\"name\":\"");
        *t = (struct tensor){.uid = atoll(tensor), .type = read_type(after(tensor, "\"dataType\":")), .alignment = atoll(after(tensor, "\"ptrAlignment\":"))};
        t->rank = read_numbers(tensor, "\"dim\":", t->dims, 8);
        if (t->type < 0 || !t->rank || read_numbers(tensor, "\"stride\":", t->strides, 8) != t->rank) return;
    }
    int space = c->t[0].rank - 2;
    if (read_numbers(node, "\"pad\":", c->padding, 3) != space || read_numbers(node, "\"stride\":", c->stride, 3) != space || read_numbers(node, "\"dilation\":", c->dilation, 3) != space) return;
    c->alpha = atof(after(node, "\"alpha\":"));
    c->beta = atof(after(node, "\"beta\":"));
    c->engine = atoi(after(text, "\"engineId\":"));
    for (int i = 0; i < 3; i++) if (!strncmp(form, forms[i], strlen(forms[i]))) c->kind = FORWARD + i;
}
