// Normally distributed values of mean 0 keyed by (seed, index): Box and Muller's transform of a
// SplitMix64 hash, as the host's `quant/random.rs`.
#include "common.cuh"

typedef ElementOf<OUT_IS_BF16>::type Out;

struct Params {
    Out* out;
    u64 seed;
    u64 first_index;
    u64 len;
    float std;
    u32 reserved;
};

DEVICE u64 mix(u64 value) {
    u64 z = value + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

KERNEL void __launch_bounds__(THREADS) random_normal(const Params p) {
    wait_for_earlier_kernels();
    constexpr float SCALE = 1.0f / 4294967296.0f;
    u64 key = mix(p.seed);
    u64 first_pair = p.first_index / 2, stride = u64(gridDim.x) * THREADS;
    for (u64 pair = u64(blockIdx.x) * THREADS + threadIdx.x; 2 * pair < p.len; pair += stride) {
        u64 bits = mix(key + first_pair + pair);
        // The half keeps the logarithm's argument above zero.
        float u = (float(u32(bits >> 32)) + 0.5f) * SCALE;
        float radius = p.std * sqrtf(fmaxf(-2.0f * logf(u), 0.0f));
        float sin, cos;
        sincospif(2.0f * (float(u32(bits)) * SCALE), &sin, &cos);
        p.out[2 * pair] = from_float<Out>(radius * cos);
        if (2 * pair + 1 < p.len) p.out[2 * pair + 1] = from_float<Out>(radius * sin);
    }
}
