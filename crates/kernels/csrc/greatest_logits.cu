// Keys of the greatest logits of every row, by parts of the row: one block a part.
#include "logits.cuh"

struct Params {
    const float* logits; // [num_rows, vocab_size]
    u64* keys;           // [num_rows, num_parts]
    u32 num_rows;
    u32 num_parts;
    u32 vocab_size;
    u32 reserved;
};

constexpr u32 WARPS = THREADS / 32;

KERNEL void __launch_bounds__(THREADS) greatest_logits(const Params p) {
    wait_for_earlier_kernels();
    __shared__ u64 of_warps[WARPS];
    u32 part = blockIdx.x, row = blockIdx.y, n = p.vocab_size;
    u32 len = ceil_div(ceil_div(n, p.num_parts), 4) * 4;
    u32 begin = part * len, end = min(begin + len, n);
    u64 key = greatest_of_share<4>(p.logits + u64(row) * n, begin, end, n);
    key = warp_max(key);
    if (lane_id() == 0) of_warps[warp_id()] = key;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (u32 w = 1; w < WARPS; w++) key = max(key, of_warps[w]);
    p.keys[row * p.num_parts + part] = key;
}
