// How the KV cache lies, and how its numbers become those that tensor cores take: for the kernels
// that read or write it. KV says what its numbers are; see `KvLayout` of the backend.
//
//   cache   blocks of strips, one for each key/value head
//   strip   [BLOCK_SIZE, HEAD_DIM] numbers; of eight bits, then [BLOCK_SIZE] scales; of four bits,
//           then [BLOCK_SIZE, KV_GROUPS] pairs of f16: what a group's numbers are multiplied by and
//           its least number
//
// Of four bits, byte b of a group has number b in its lower half, b + 16 in its upper half.
//
// Source: e4m3 as in Micikevicius et al., "FP8 formats for deep learning", 2022; whole numbers by
// the mantissa of a larger number as in Marlin and FasterTransformer.
#pragma once

#define KV_BF16 0
#define KV_FP8 1
#define KV_INT8 2
#define KV_INT4 3

constexpr bool SCALED = KV != KV_BF16;
constexpr u32 KV_GROUP = 32;
constexpr u32 KV_GROUPS = (HEAD_DIM + KV_GROUP - 1) / KV_GROUP;
constexpr u32 HEAD_BYTES = HEAD_DIM * (SCALED ? 1 : 2) / (KV == KV_INT4 ? 2 : 1);
constexpr u32 NUMBERS_BYTES = BLOCK_SIZE * HEAD_BYTES;
// Words of a token's scales.
constexpr u32 SCALE_WORDS = KV == KV_INT4 ? KV_GROUPS : SCALED ? 1 : 0;
constexpr u32 STRIP_BYTES = NUMBERS_BYTES + (4 * SCALE_WORDS * BLOCK_SIZE + 15) / 16 * 16;
constexpr float GREATEST_CODE = KV == KV_FP8 ? 448.0f : 127.0f;
static_assert(KV != KV_INT4 || HEAD_DIM % KV_GROUP == 0, "groups are whole");

// Offset of a head's strip in the cache.
DEVICE u64 strip_at(u32 block, u32 num_kv_heads, u32 kv_head) {
    return (u64(block) * num_kv_heads + kv_head) * STRIP_BYTES;
}

// Offsets in a strip: a token's head and its scales.
DEVICE u32 head_at(u32 token) { return token * HEAD_BYTES; }
DEVICE u32 scale_at(u32 token) { return NUMBERS_BYTES + token * 4 * SCALE_WORDS; }

// Four bytes, or zero if `valid` is false; nothing is read then.
DEVICE void copy4_or_zero(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 4 : 0)
                 : "memory");
}

DEVICE float load_shared(u32 from) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
    return x;
}

DEVICE u32 load_shared_word(u32 from) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

DEVICE u32 pack_f16(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

DEVICE float2 unpack_f16(u32 pair) {
    float2 x;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(x.x), "=f"(x.y)
        : "r"(pair));
    return x;
}

// As `multiply_add`, of f16.
DEVICE void multiply_add_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a * b + c of pairs of bf16.
DEVICE u32 fma_bf16(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

DEVICE u32 fma_f16(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

#if KV == KV_INT4
// What the numbers of two tokens' or of one token's group are multiplied by, and the least ones:
// pairs of f16, or of bf16, for `widen_nibbles`.
struct Factors {
    u32 factor;
    u32 least;

    // `words`: a group's of each.
    template <bool F16> static DEVICE Factors of(u32 first, u32 second) {
        u32 factor = __byte_perm(first, second, 0x5410), least = __byte_perm(first, second, 0x7632);
        if (F16) return Factors{factor, least};
        float2 f = unpack_f16(factor), l = unpack_f16(least);
        return Factors{pack_bf16(f.x, f.y), pack_bf16(l.x, l.y)};
    }
};

// The lower halves of bytes 0 and 2 of a word as a pair of numbers, of f16 or bf16.
template <bool F16> DEVICE u32 widen_nibbles(u32 codes, const Factors& by) {
    // 1024 (128) + x, less 1024 (128); exactly.
    if (F16) {
        u32 x = fma_f16((codes & 0x000f000fu) | 0x64006400u, 0x3c003c00u, 0xe400e400u);
        return fma_f16(x, by.factor, by.least);
    }
    u32 x = fma_bf16((codes & 0x000f000fu) | 0x43004300u, 0x3f803f80u, 0xc300c300u);
    return fma_bf16(x, by.factor, by.least);
}

// Eight numbers of a token's head from `dim` on, a multiple of eight.
DEVICE void read8(const u8* strip, u32 token, u32 dim, float (&x)[8]) {
    u32 byte = dim / KV_GROUP * (KV_GROUP / 2) + dim % (KV_GROUP / 2);
    const u8* codes = strip + head_at(token) + byte;
    u32 word = *reinterpret_cast<const u32*>(strip + scale_at(token) + dim / KV_GROUP * 4);
    float2 by = unpack_f16(word);
    u32 shift = dim % KV_GROUP < KV_GROUP / 2 ? 0 : 4;
    u32 words[2] = {reinterpret_cast<const u32*>(codes)[0], reinterpret_cast<const u32*>(codes)[1]};
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 code = words[i / 4] >> (8 * (i % 4) + shift) & 15;
        x[i] = fmaf(float(code), by.x, by.y);
    }
}

// A group's factor and least number, rounded as they are stored.
struct Steps {
    u32 word;
    float least;
    float inverse;

    DEVICE Steps(float smallest, float greatest) {
        word = pack_f16((greatest - smallest) / 15.0f, smallest);
        float2 rounded = unpack_f16(word);
        least = rounded.y;
        inverse = rounded.x > 0.0f ? 1.0f / rounded.x : 0.0f;
    }

    DEVICE u32 code(float x) const {
        return min(max(__float2int_rn((x - least) * inverse), 0), 15);
    }
};
#else
// Bytes 0 and 1 of a word as two f16, and bytes 2 and 3; all exactly.
DEVICE void widen_to_f16(u32 codes, u32& first, u32& second) {
#if KV == KV_INT8
    u32 biased = codes ^ 0x80808080u;
    // 1024 + x + 128, less 1152.
    first = fma_f16(__byte_perm(biased, 0x64646464u, 0x4140), 0x3c003c00u, 0xe480e480u);
    second = fma_f16(__byte_perm(biased, 0x64646464u, 0x4342), 0x3c003c00u, 0xe480e480u);
#elif __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(first), "=r"(second)
        : "r"(codes));
#else
    // Exponent and mantissa in their places, the bias 15 instead of 7: times 2^8, plus -0.
    u32 low = __byte_perm(codes, 0, 0x1404), high = __byte_perm(codes, 0, 0x3424);
    low = (low & 0x80008000u) | (low >> 1 & 0x3f803f80u);
    high = (high & 0x80008000u) | (high >> 1 & 0x3f803f80u);
    first = fma_f16(low, 0x5c005c00u, 0x80008000u);
    second = fma_f16(high, 0x5c005c00u, 0x80008000u);
#endif
}

// Bytes 0 and 2 of a word as two bf16, and bytes 1 and 3; all exactly.
DEVICE void widen_to_bf16(u32 codes, u32& even, u32& odd) {
#if KV == KV_INT8
    // 128 + the lower seven bits, less 128 or, for negative numbers, 256.
    u32 shifted = codes >> 8;
    u32 low = (codes & 0x007f007fu) | 0x43004300u, base = (codes & 0x00800080u) | 0x43004300u;
    even = fma_bf16(base, 0xbf80bf80u, low);
    low = (shifted & 0x007f007fu) | 0x43004300u, base = (shifted & 0x00800080u) | 0x43004300u;
    odd = fma_bf16(base, 0xbf80bf80u, low);
#else
    // Exponent and mantissa in their places, the bias 127 instead of 7: times 2^120, plus -0.
    even = (codes << 8 & 0x80008000u) | (codes << 4 & 0x07f007f0u);
    odd = (codes & 0x80008000u) | (codes >> 4 & 0x07f007f0u);
    even = fma_bf16(even, 0x7b807b80u, 0x80008000u);
    odd = fma_bf16(odd, 0x7b807b80u, 0x80008000u);
#endif
}

// Four codes as floats.
DEVICE void widen_to_float(u32 codes, float (&x)[4]) {
    u32 even, odd;
    widen_to_bf16(codes, even, odd);
    x[0] = low_float(even), x[1] = low_float(odd);
    x[2] = high_float(even), x[3] = high_float(odd);
}

// Two codes, the nearest to numbers that the greatest code bounds but for rounding.
DEVICE u32 narrow_pair(float low, float high) {
#if KV == KV_INT8
    int a = min(max(__float2int_rn(low), -127), 127), b = min(max(__float2int_rn(high), -127), 127);
    return (u32(a) & 0xff) | (u32(b) & 0xff) << 8;
#elif __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    u32 pair = 0;
    float x[2] = {low, high};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 bits = __float_as_uint(x[i]), magnitude = bits & 0x7fffffffu;
        // To three bits of mantissa, ties to even; below 2^-6 in steps of 2^-9.
        u32 rounded = (magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20;
        u32 code = min(rounded - (120 << 3), 0x7eu);
        if (magnitude < 0x3c800000u) code = __float2uint_rn(fabsf(x[i]) * 512.0f);
        pair |= (code | (bits >> 24 & 0x80)) << 8 * i;
    }
    return pair;
#endif
}

// Eight numbers of a token's head from `dim` on, a multiple of eight.
DEVICE void read8(const u8* strip, u32 token, u32 dim, float (&x)[8]) {
#if KV == KV_BF16
    load8(reinterpret_cast<const bf16*>(strip + head_at(token)) + dim, x);
#else
    const u32* codes = reinterpret_cast<const u32*>(strip + head_at(token) + dim);
    float scale = *reinterpret_cast<const float*>(strip + scale_at(token));
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        float four[4];
        widen_to_float(codes[i], four);
#pragma unroll
        for (u32 j = 0; j < 4; j++) x[4 * i + j] = four[j] * scale;
    }
#endif
}
#endif
