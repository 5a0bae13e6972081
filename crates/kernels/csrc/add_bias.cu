// x[r, i] += bias[i]. Blocks along x take rows, along y parts of a row.
#include "common.cuh"

struct Params {
    bf16* x;           // [num_rows, len]
    const float* bias; // [len]
    u32 num_rows;
    u32 len;
};

KERNEL void __launch_bounds__(THREADS) add_bias(const Params p) {
    wait_for_earlier_kernels();
    u32 i = (blockIdx.y * THREADS + threadIdx.x) * 8;
    if (i >= p.len) return;
    bf16* x = p.x + u64(blockIdx.x) * p.len;
    if (p.len % 8 == 0) {
        float v[8], b[8];
        load8(x + i, v);
        load8(p.bias + i, b);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] += b[j];
        store8(x + i, v);
    } else {
        for (u32 j = i; j < min(i + 8, p.len); j++) {
            x[j] = from_float<bf16>(to_float(x[j]) + p.bias[j]);
        }
    }
}
