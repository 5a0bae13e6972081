// Activations as codes of e4m3 for products with such weights, where no operator in front of the
// product has left them: see `fp8_split.cuh`. A warp takes 128 columns of a row.
#include "fp8_split.cuh"

struct Params {
    const bf16* x; // [num_rows, len]
    SplitRows to;
    u32 len;
    u32 reserved;
};

KERNEL void __launch_bounds__(THREADS) fp8_split(const Params p) {
    wait_for_earlier_kernels();
    u32 blocks = ceil_div(p.len, SPLIT_COLS), unit = blockIdx.x * (THREADS / 32) + warp_id();
    if (unit >= p.to.num_rows * blocks) return;
    u32 row = unit / blocks, block = unit % blocks;
    u32 group = lane_id() / 16, t = lane_id() / 4 % 4, s = lane_id() % 4;
    u32 col = block * SPLIT_COLS + group * FP8_GROUP + 16 * s + 2 * t;
    const bf16* x = p.x + u64(row) * p.len;
    u32 first = col < p.len ? *reinterpret_cast<const u32*>(x + col) : 0;
    u32 second = col + 8 < p.len ? *reinterpret_cast<const u32*>(x + col + 8) : 0;
    split_word(p.to, row, block, p.len, lane_id(), first, second);
}
