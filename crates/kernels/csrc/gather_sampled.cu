// out[s] = x[sample_indices[s]]. One block a sampled row.
#include "common.cuh"

typedef ElementOf<IS_BF16>::type Element;

struct Params {
    const Element* x;          // [num_tokens, len]
    const u32* sample_indices; // [num_sampled]
    Element* out;              // [num_sampled, len]
    u32 num_sampled;
    u32 len;
};

KERNEL void __launch_bounds__(THREADS) gather_sampled(const Params p) {
    wait_for_earlier_kernels();
    constexpr u32 IN_VECTOR = 16 / sizeof(Element);
    const Element* from = p.x + u64(p.sample_indices[blockIdx.x]) * p.len;
    Element* to = p.out + u64(blockIdx.x) * p.len;
    if (p.len % IN_VECTOR == 0) {
        for (u32 i = threadIdx.x; i < p.len / IN_VECTOR; i += THREADS) {
            reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
        }
    } else {
        for (u32 i = threadIdx.x; i < p.len; i += THREADS) to[i] = from[i];
    }
}
