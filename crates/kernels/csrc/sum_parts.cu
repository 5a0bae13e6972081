// out = parts added in their order (+ bias), in bf16. Blocks along x take rows, along y parts.
#include "common.cuh"

struct Params {
    const float* parts; // [num_parts, num_rows, len]
    const float* bias;  // [len], or null
    bf16* out;          // [num_rows, len]
    u32 num_rows;
    u32 num_parts;
    u32 len;
    u32 reserved;
};

KERNEL void __launch_bounds__(THREADS) sum_parts(const Params p) {
    wait_for_earlier_kernels();
    u32 i = (blockIdx.y * THREADS + threadIdx.x) * 8;
    if (i >= p.len) return;
    u64 at = u64(blockIdx.x) * p.len + i, stride = u64(p.num_rows) * p.len;
    float sum[8] = {};
    if (p.bias != nullptr) load8(p.bias + i, sum);
#pragma unroll 4
    for (u32 part = 0; part < p.num_parts; part++) {
        float v[8];
        load8(p.parts + part * stride + at, v);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += v[j];
    }
    store8(p.out + at, sum);
}
