/* attention.c - the list of attention backends, and how a name finds one. */
#include "attention.h"

#include <string.h>

extern const Attention attention_flash_cpu, attention_naive_cpu;
#ifdef USE_CUDA
extern const Attention attention_flash_mma, attention_naive_cuda, attention_naive_cuda_fp32;
#endif

const Attention *const attention_backends[] = {
#ifdef USE_CUDA
    &attention_flash_mma, &attention_naive_cuda, &attention_naive_cuda_fp32,
#endif
    &attention_flash_cpu, &attention_naive_cpu,  NULL};

static bool name_fits(const char *wanted, const char *name) {
    const size_t n = strlen(wanted);
    return strncmp(wanted, name, n) == 0 && (name[n] == '\0' || name[n] == '_');
}

const Attention *attention_find(const char *name, const char *device, const AttentionShape *shape,
                                Error *err) {
    bool known = false;
    for (size_t i = 0; attention_backends[i]; i++) {
        const Attention *backend = attention_backends[i];
        if (strcmp(backend->device, device) != 0 || !name_fits(name, backend->name)) continue;
        known = true;
        if (backend->can_run(shape, err)) return backend;
    }
    if (known) return error_prefix(err, "attention %s cannot run this shape", name), NULL;

    char names[256] = "";
    for (size_t i = 0; attention_backends[i]; i++) {
        if (strcmp(attention_backends[i]->device, device) != 0) continue;
        const size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", attention_backends[i]->name);
    }
    error_set(err, "no attention backend named %s on device %s; there are: %s", name, device, names);
    return NULL;
}
