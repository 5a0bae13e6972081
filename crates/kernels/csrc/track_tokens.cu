// Counts the step's input tokens of every tracked sequence, for penalties. One block a row.
#include "common.cuh"

constexpr u32 STATE_WORDS = 3;
constexpr u32 IN_PROMPT = 1u << 31;

struct Params {
    const u32* token_ids;
    const u32* positions;
    const u32* row_starts;
    const u32* row_states;
    u32* token_counts;
    u32 num_rows;
    u32 vocab_size;
};

KERNEL void __launch_bounds__(THREADS) track_tokens(const Params p) {
    wait_for_earlier_kernels();
    u32 row = blockIdx.x;
    u32 slot = p.row_states[row * STATE_WORDS];
    if (slot == NONE) return;
    u32 prompt_len = p.row_states[row * STATE_WORDS + 1];
    bool fresh = p.row_states[row * STATE_WORDS + 2] != 0;
    u32* counts = p.token_counts + u64(slot) * p.vocab_size;
    if (fresh) {
        for (u32 i = threadIdx.x; i < p.vocab_size; i += THREADS) counts[i] = 0;
        __syncthreads();
    }
    u32 end = p.row_starts[row + 1];
    for (u32 token = p.row_starts[row] + threadIdx.x; token < end; token += THREADS) {
        u32 id = p.token_ids[token];
        // No logit of a token outside the vocabulary can be penalised.
        if (id >= p.vocab_size) continue;
        if (p.positions[token] < prompt_len) {
            atomicOr(&counts[id], IN_PROMPT);
        } else {
            atomicAdd(&counts[id], 1u);
        }
    }
}
