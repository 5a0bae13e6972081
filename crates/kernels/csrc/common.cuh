// What all kernels share. No header of CUDA is included, so that NVRTC needs none.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr u32 NONE = 0xffffffffu;
#define INFINITE __int_as_float(0x7f800000)

// ---- kernels that begin before the one in front of them has ended ----

// Waits until everything enqueued before has finished and its writes are seen. Every thread that
// reads what earlier kernels wrote, or writes at all, calls it first.
DEVICE void wait_only() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// When all blocks have called this or ended, the next kernel may begin, as far as it does not wait.
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// For kernels that have nothing to do before. As every kernel waits, the next one, and those behind
// it, may begin at once: what they wait for includes what this one waits for.
DEVICE void wait_for_earlier_kernels() {
    let_next_begin();
    wait_only();
}

// ---- bf16: the upper half of an f32 ----

struct bf16 {
    u16 bits;
};

DEVICE float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
DEVICE float to_float(float x) { return x; }

// Both halves of a word, the lower one first in memory.
DEVICE float low_float(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

DEVICE u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

template <typename T> DEVICE T from_float(float x);
template <> DEVICE float from_float<float>(float x) { return x; }
template <> DEVICE bf16 from_float<bf16>(float x) {
    return bf16{u16(pack_bf16(x, 0.0f))};
}

template <bool SHORT> struct ElementOf;
template <> struct ElementOf<true> {
    typedef bf16 type;
};
template <> struct ElementOf<false> {
    typedef float type;
};

// ---- eight elements at a time, 16-byte aligned ----

DEVICE void load8(const bf16* from, float (&x)[8]) {
    uint4 v = *reinterpret_cast<const uint4*>(from);
    u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = low_float(pairs[i]);
        x[2 * i + 1] = high_float(pairs[i]);
    }
}

DEVICE void load8(const float* from, float (&x)[8]) {
    float4 a = reinterpret_cast<const float4*>(from)[0];
    float4 b = reinterpret_cast<const float4*>(from)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

DEVICE void store8(bf16* to, const float (&x)[8]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                                               pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

DEVICE void store8(float* to, const float (&x)[8]) {
    reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// ---- warps ----

DEVICE u32 lane_id() { return threadIdx.x & 31; }
DEVICE u32 warp_id() { return threadIdx.x >> 5; }

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// Sum of `x` over the lanes up to this one.
template <typename T> DEVICE T warp_prefix_sum(T x) {
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        T other = __shfl_up_sync(ALL_LANES, x, offset);
        if (lane_id() >= offset) x += other;
    }
    return x;
}

// Sum over the threads of a block of NUM_WARPS warps before this one; `total` is over all.
template <u32 NUM_WARPS> DEVICE u32 block_prefix_sum(u32 x, u32& total) {
    __shared__ u32 sums[NUM_WARPS];
    u32 inclusive = warp_prefix_sum(x);
    __syncthreads(); // The last call's sums have been read.
    if (lane_id() == 31) sums[warp_id()] = inclusive;
    __syncthreads();
    u32 of_warps = warp_prefix_sum(lane_id() < NUM_WARPS ? sums[lane_id()] : 0);
    total = __shfl_sync(ALL_LANES, of_warps, 31);
    u32 before = __shfl_sync(ALL_LANES, of_warps, max(int(warp_id()) - 1, 0));
    return inclusive - x + (warp_id() == 0 ? 0 : before);
}

DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }

// ---- asynchronous copies to shared memory ----

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// 16 bytes, or 16 zeros if `valid` is false; nothing is read then.
DEVICE void copy16_or_zero(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `N` committed groups of this thread are under way.
template <int N> DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- tensor cores ----

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32 address, u32 (&m)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

// As above, each matrix transposed.
DEVICE void load_matrices_transposed(u32 address, u32 (&m)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

DEVICE u32 transpose_matrix(u32 m) {
    u32 t;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(m));
    return t;
}

// c[16x8] += a[16x16] * b[16x8]. Lane i holds of c rows i / 4 and i / 4 + 8, columns 2 (i % 4) and
// the next; of b rows 2 (i % 4) and the next (and those plus 8), column i / 4.
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x, flushing to zero; exact at 0 and minus infinity.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x / (1 + exp(-x)) * up: saturates at both ends without ever dividing infinities. An exact
// division branches, which would keep a thread's outputs apart.
DEVICE float silu_and_mul(float x, float up) { return __fdividef(x, 1.0f + __expf(-x)) * up; }

// Past the cache of this multiprocessor, which does not know what others wrote.
DEVICE float load_fresh(const float* from) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
    return x;
}

DEVICE void load8_fresh(const float* from, float (&x)[8]) {
#pragma unroll
    for (u32 i = 0; i < 8; i += 4) {
        asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[i]), "=f"(x[i + 1]), "=f"(x[i + 2]), "=f"(x[i + 3])
                     : "l"(from + i)
                     : "memory");
    }
}

// ---- e4m3 ----

// Matrices of e4m3 lie as tensor cores want them: rows are padded with zeros to whole groups of 64
// columns, and in a group byte 16 t + 4 s + b is column 16 s + 2 t + {8, 0, 9, 1}[b]. So the 16
// bytes that lane 4 g + t of a warp reads from row g are its part of four matrices of 16 columns.
constexpr u32 FP8_GROUP = 64;

// A word's upper bytes (columns 0 and 1 of the above) and lower bytes (8 and 9) as bf16, exactly.
DEVICE void e4m3_to_bf16(u32 codes, u32& upper, u32& lower) {
    upper = codes & 0x80008000u | codes >> 4 & 0x07f007f0u;
    lower = codes << 8 & 0x80008000u | codes << 4 & 0x07f007f0u;
    // The exponent's bias is 127 instead of 7: times 2^120, plus -0.
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(upper) : "r"(0x7b807b80u), "r"(0x80008000u));
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(lower) : "r"(0x7b807b80u), "r"(0x80008000u));
}

// The nearest codes, the even one of two; beyond the range the largest. `high` is the upper byte.
DEVICE u32 pack_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    u32 pair = 0;
    float x[2] = {low, high};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 bits = __float_as_uint(x[i]), magnitude = bits & 0x7fffffffu;
        u32 rounded = (magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20;
        u32 code = min(rounded - (120 << 3), 0x7eu);
        // Below 2^-6 in steps of 2^-9.
        if (magnitude < 0x3c800000u) code = __float2uint_rn(fabsf(x[i]) * 512.0f);
        if (magnitude > 0x7f800000u) code = 0x7f;
        pair |= (code | bits >> 24 & 0x80) << 8 * i;
    }
    return pair;
#endif
}
