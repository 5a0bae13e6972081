// out[r, i] = f(gate_up[r, i]) * gate_up[r, len + i]. Blocks along x take rows, along y parts.
#include "common.cuh"

struct Params {
    const bf16* gate_up; // [num_rows, 2 * len]
    bf16* out;           // [num_rows, len]
    u32 num_rows;
    u32 len;
};

// x / (1 + exp(-x)): saturates at both ends without ever dividing infinities.
DEVICE float silu(float x) { return x / (1.0f + __expf(-x)); }

// x (1 + tanh(y)) / 2 with y = sqrt(2 / pi) (x + 0.044715 x^3), and (1 + tanh(y)) / 2 is
// 1 / (1 + exp(-2 y)).
DEVICE float gelu(float x) {
    float rate = x * (1.5957691f + 0.071354816f * x * x);
    return x / (1.0f + __expf(-rate));
}

DEVICE float activate(float x) { return GELU ? gelu(x) : silu(x); }

KERNEL void __launch_bounds__(THREADS) gate_and_mul(const Params p) {
    wait_for_earlier_kernels();
    u32 i = (blockIdx.y * THREADS + threadIdx.x) * 8;
    if (i >= p.len) return;
    const bf16* gate = p.gate_up + u64(blockIdx.x) * 2 * p.len;
    const bf16* up = gate + p.len;
    bf16* out = p.out + u64(blockIdx.x) * p.len;
    if (p.len % 8 == 0) {
        float g[8], u[8];
        load8(gate + i, g);
        load8(up + i, u);
#pragma unroll
        for (int j = 0; j < 8; j++) g[j] = activate(g[j]) * u[j];
        store8(out + i, g);
    } else {
        for (u32 j = i; j < min(i + 8, p.len); j++) {
            out[j] = from_float<bf16>(activate(to_float(gate[j])) * to_float(up[j]));
        }
    }
}
