/* What else torch imports of CUDA's runtime and of cuBLAS, which it need not find here: refused, by name. */
#include <stdio.h>

#define R(name) \
    __attribute__((visibility("default"))) int name(void) { fprintf(stderr, "null card: refused: " #name "\n"); return 801; }
REFUSALS
