// What CUDA adds to C++: qualifiers, vectors, and functions of one thread alone.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __device__
#define __global__
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) alignas(bytes)

// ---- vectors ----

struct uint2 {
    alignas(8) unsigned x;
    unsigned y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    alignas(8) float x;
    float y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct uint3 {
    unsigned x, y, z;
};
typedef uint3 dim3;

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- whole numbers ----

// As CUDA's overloads, an `unsigned` and an `int` meet as `unsigned`.
template <typename A, typename B> constexpr auto min(A a, B b) -> decltype(a + b) {
    decltype(a + b) x = a, y = b;
    return y < x ? y : x;
}
template <typename A, typename B> constexpr auto max(A a, B b) -> decltype(a + b) {
    decltype(a + b) x = a, y = b;
    return x < y ? y : x;
}
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }

// Nibbles of `selector` say which of the eight bytes; their highest bit, to spread the byte's sign.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned nibble = selector >> 4 * i & 15, byte = bytes >> 8 * (nibble & 7) & 0xff;
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << 8 * i;
    }
    return result;
}

// ---- numbers and their bits ----

namespace emulator {
template <typename To, typename From> To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// As CUDA converts: what is too large becomes the largest, what is no number 0.
template <typename To> To saturate(float x, double least, double greatest) {
    return isnan(x) ? 0 : To(fmin(fmax(x, least), greatest));
}
} // namespace emulator

inline float __uint_as_float(unsigned x) { return emulator::bits_of<float>(x); }
inline float __int_as_float(int x) { return emulator::bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits_of<unsigned>(x); }
inline int __float2int_rn(float x) {
    return emulator::saturate<int>(rintf(x), -0x1p31, 0x1p31 - 1);
}
inline unsigned __float2uint_rn(float x) {
    return emulator::saturate<unsigned>(rintf(x), 0, 0x1p32 - 1);
}
inline unsigned __float2uint_rz(float x) {
    return emulator::saturate<unsigned>(truncf(x), 0, 0x1p32 - 1);
}

// ---- arithmetic ----

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
// Divisors of 2^126 and more are too large for the approximation.
inline float __fdividef(float a, float b) { return fabsf(b) > 0x1p126f ? a * 0.0f : a / b; }
inline void sincospif(float x, float* sin_, float* cos_) {
    *sin_ = sin(M_PI * x), *cos_ = cos(M_PI * x);
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }

// ---- memory that blocks share; they run one after the other, threads only until they wait ----

inline void __threadfence() {}
template <typename T, typename U> T atomicAdd(T* at, U x) {
    T old = *at;
    *at = old + T(x);
    return old;
}
template <typename T, typename U> T atomicOr(T* at, U x) {
    T old = *at;
    *at = old | T(x);
    return old;
}
inline unsigned atomicInc(unsigned* at, unsigned last) {
    unsigned old = *at;
    *at = old >= last ? 0 : old + 1;
    return old;
}
template <typename T, typename U> T atomicMax(T* at, U x) {
    T old = *at;
    *at = old < T(x) ? T(x) : old;
    return old;
}
template <typename T, typename U> T atomicMin(T* at, U x) {
    T old = *at;
    *at = T(x) < old ? T(x) : old;
    return old;
}
