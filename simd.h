/* simd.h - which vector instructions the CPU kernels use, chosen at run time. Files named *_simd.c are
 * compiled once for each level (on machines other than x86-64 only as plain C) and hold a table of kernels
 * each; the caller picks the table by simd_level(). */
#ifndef SIMD_H
#define SIMD_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum SimdLevel { SIMD_PLAIN, SIMD_AVX2, SIMD_AVX512 } SimdLevel;

/* The best level of this machine, or the one that simd_force or the environment variable TRAIN_GPT_SIMD
 * (plain, avx2, avx512) asks for, if the machine has it. */
SimdLevel simd_level(void);
/* NULL, or in words why what TRAIN_GPT_SIMD asks for was not taken. */
const char *simd_note(void);
/* For tests: returns 0 and changes nothing where the machine lacks the level. Not while operations run. */
int simd_force(SimdLevel level);
const char *simd_name(SimdLevel level); /* "plain", "AVX2", "AVX-512" */

/* The name of a table of kernels in a *_simd.c file: SIMD_TABLE(cpu_kernels) is cpu_kernels_avx512 there. */
#define SIMD_PASTE2(name, level) name##_##level
#define SIMD_PASTE(name, level) SIMD_PASTE2(name, level)
#define SIMD_TABLE(name) SIMD_PASTE(name, SIMD_LEVEL)

/* Which of the three tables to use now. */
#if defined(__x86_64__)
#define SIMD_DECLARE(type, name) extern const type name##_plain, name##_avx2, name##_avx512
#define SIMD_PICK(name) \
    (simd_level() == SIMD_AVX512 ? &name##_avx512 : simd_level() == SIMD_AVX2 ? &name##_avx2 : &name##_plain)
#else
#define SIMD_DECLARE(type, name) extern const type name##_plain
#define SIMD_PICK(name) (&name##_plain)
#endif

#ifdef __cplusplus
}
#endif
#endif
