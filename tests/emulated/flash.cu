/* flash.cu - attention/flash_cuda.cu for the emulated GPU, compiled as C++: the backend emulated_flash_90, or _80,
 * as __CUDA_ARCH__ says. */
#include "cuda_runtime.h"

#if __CUDA_ARCH__ >= 900
#define attention_flash_mma emulated_flash_90
#else
#define attention_flash_mma emulated_flash_80
#endif
#include "../../attention/flash_cuda.cu"
