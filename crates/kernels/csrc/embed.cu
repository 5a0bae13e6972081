// out[t] = table[token_ids[t]] * scale. One block a token.
#include "common.cuh"

typedef ElementOf<TABLE_IS_BF16>::type Table;
typedef ElementOf<OUT_IS_BF16>::type Out;

struct Params {
    const Table* table;   // [num_embeddings, len]
    const u32* token_ids; // [num_tokens]
    Out* out;             // [num_tokens, len]
    u32 num_tokens;
    u32 num_embeddings;
    u32 len;
    float scale;
};

KERNEL void __launch_bounds__(THREADS) embed(const Params p) {
    wait_for_earlier_kernels();
    u32 token = blockIdx.x;
    u32 id = p.token_ids[token];
    bool valid = id < p.num_embeddings;
    const Table* from = p.table + u64(valid ? id : 0) * p.len;
    Out* to = p.out + u64(token) * p.len;
    if (p.len % 8 == 0) {
        for (u32 i = threadIdx.x * 8; i < p.len; i += THREADS * 8) {
            float x[8] = {};
            if (valid) load8(from + i, x);
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] *= p.scale;
            store8(to + i, x);
        }
    } else {
        for (u32 i = threadIdx.x; i < p.len; i += THREADS) {
            to[i] = from_float<Out>(valid ? to_float(from[i]) * p.scale : 0.0f);
        }
    }
}
