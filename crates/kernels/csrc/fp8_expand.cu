// A matrix of e4m3 as bf16: out[r, c] = codes[r, c] * scale. For products of many rows where tensor
// cores do not take the codes with their scales. Blocks along x take rows, along y parts.
#include "common.cuh"

struct Params {
    const u8* codes;     // [rows, padded cols]
    const float* scales; // [rows], or [ceil(cols / 128), rows]
    bf16* out;           // [rows, cols]
    u32 rows;
    u32 cols;
};

KERNEL void __launch_bounds__(THREADS) fp8_expand(const Params p) {
    wait_for_earlier_kernels();
    u32 row = blockIdx.x, col = (blockIdx.y * THREADS + threadIdx.x) * 8;
    if (col >= p.cols) return;
    float scale = p.scales[BLOCKS ? col / 128 * p.rows + row : row];
    u64 pitch = u64(ceil_div(p.cols, FP8_GROUP)) * FP8_GROUP;
    // Half of a matrix of 16 columns: a word of each of four lanes.
    const u8* from = p.codes + row * pitch + col / FP8_GROUP * FP8_GROUP + col % FP8_GROUP / 16 * 4;
    float values[8];
#pragma unroll
    for (u32 t = 0; t < 4; t++) {
        u32 upper, lower;
        e4m3_to_bf16(*reinterpret_cast<const u32*>(from + 16 * t), upper, lower);
        u32 pair = col % 16 < 8 ? upper : lower;
        values[2 * t] = low_float(pair) * scale;
        values[2 * t + 1] = high_float(pair) * scale;
    }
    store8(p.out + u64(row) * p.cols + col, values);
}
