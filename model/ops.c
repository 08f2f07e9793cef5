/* ops.c - the devices of this build. */
#include "ops.h"

#include <string.h>

static const Ops *const devices[] = {
#ifdef USE_CUDA
    &ops_cuda, &ops_cuda_fp32,
#endif
    &ops_cpu, NULL};

const Ops *ops_find(const char *name) {
    size_t i = 0;
    while (devices[i] && strcmp(devices[i]->name, name) != 0) i++;
    return devices[i];
}
