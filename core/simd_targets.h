// Which instruction sets the SIMD code is compiled for. Include before any Highway header.
//
// AVX3 (AVX-512), AVX2, and the plain baseline, chosen at run time: each further target would cost
// compile time and code size, and no CPU we know of gains by it. The bits are Highway's own, by
// value, since the two versions we build with do not have the same names: 3 to 7 are newer variants
// of AVX-512, 11 and 12 are SSE4 and SSSE3.
#ifndef ATTENDANT_CORE_SIMD_TARGETS_H_
#define ATTENDANT_CORE_SIMD_TARGETS_H_

//
// A sanitizer's build leaves AVX-512 out where the CPU has none: nothing there would run it.
#ifdef ATTENDANT_WITHOUT_AVX512
#define ATTENDANT_DISABLED_AVX512 (1LL << 8)
#else
#define ATTENDANT_DISABLED_AVX512 0
#endif
#define HWY_DISABLED_TARGETS                                                                    \
  ((1LL << 3) | (1LL << 4) | (1LL << 5) | (1LL << 6) | (1LL << 7) | ATTENDANT_DISABLED_AVX512 | \
   (1LL << 11) | (1LL << 12))

#endif  // ATTENDANT_CORE_SIMD_TARGETS_H_
