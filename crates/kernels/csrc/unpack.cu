// Spreads a step's packed words over the arrays that operators read, carries tokens over from the
// step before, and fills up to the padded shape with rows that do nothing.
#include "common.cuh"

constexpr u32 NUM_COUNTS = 8;
constexpr u32 STATE_WORDS = 3;
constexpr u32 SAMPLING_WORDS = 20;
constexpr u32 MAX_MORE_GROUPS = 7;
constexpr u32 PREFIX_WORDS = 3;
constexpr u32 PREFIX_ROW_WORDS = 2;
constexpr u32 ONE = 0x3f800000u;  // 1.0f

// What a layer group behind the first has of its own.
struct Group {
    u32* slot_mapping;
    u32* context_lens;
    u32* block_starts;
};

struct Params {
    const u32* packed;
    const u32* previous;
    u32* token_ids;
    u32* positions;
    u32* slot_mapping;
    u32* row_starts;
    u32* context_lens;
    u32* block_starts;
    u32* row_states;
    u32* blocks;
    u32* sample_indices;
    u32* sampling;
    u32* bias_ids;
    u32* bias_values;
    Group more_groups[MAX_MORE_GROUPS];
    u32* prefixes; // The two counts, then the section.
    u32* prefix_rows;
    u32 num_tokens;
    u32 num_rows;
    u32 num_sampled;
    u32 num_more_groups;
};

// A neutral row of the sampling section: greedy, no penalty, nothing reported.
DEVICE u32 greedy_word(u32 word) {
    switch (word) {
        case 0:  // state slot
        case 11: // logprobs
        case 14: // late row
            return NONE;
        case 3: // top-p
        case 5: // repetition penalty
        case 15: // typical
            return ONE;
        default: return 0;
    }
}

// Calls `write(i)` for all i below `n`, spread over the grid.
template <typename Write> DEVICE void spread(u32 n, Write write) {
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) write(i);
}

DEVICE void copy(const u32* from, u32* to, u32 n) {
    spread(n, [&](u32 i) { to[i] = from[i]; });
}

KERNEL void __launch_bounds__(THREADS) unpack(const Params p) {
    wait_for_earlier_kernels();
    u32 num_tokens = p.packed[0], num_rows = p.packed[1], num_blocks = p.packed[2];
    u32 num_sampled = p.packed[3], num_bias = p.packed[4];
    u32 num_prefixes = p.packed[6], num_prefix_rows = p.packed[7];

    const u32* token_ids = p.packed + NUM_COUNTS;
    const u32* carry_over = token_ids + num_tokens;
    const u32* positions = carry_over + num_tokens;
    const u32* slot_mapping = positions + num_tokens;
    spread(max(num_tokens, p.num_tokens), [&](u32 i) {
        bool real = i < num_tokens;
        u32 row = real ? carry_over[i] : NONE;
        // Output words begin with the rows' tokens.
        p.token_ids[i] = int(row) >= 0 ? p.previous[row] : real ? token_ids[i] : 0;
        p.positions[i] = real ? positions[i] : 0;
        p.slot_mapping[i] = real ? slot_mapping[i] : NONE;
    });

    const u32* row_starts = slot_mapping + num_tokens;
    const u32* context_lens = row_starts + num_rows + 1;
    const u32* block_starts = context_lens + num_rows;
    const u32* row_states = block_starts + num_rows + 1;
    spread(max(num_rows, p.num_rows) + 1, [&](u32 i) {
        u32 padding_token = num_tokens + (i - num_rows);
        p.row_starts[i] = i <= num_rows ? row_starts[i] : min(padding_token, p.num_tokens);
        p.block_starts[i] = i <= num_rows ? block_starts[i] : num_blocks;
    });
    spread(max(num_rows, p.num_rows), [&](u32 i) {
        p.context_lens[i] = i < num_rows ? context_lens[i] : 0;
    });
    spread(max(num_rows, p.num_rows) * STATE_WORDS, [&](u32 i) {
        bool real = i < num_rows * STATE_WORDS;
        p.row_states[i] = real ? row_states[i] : i % STATE_WORDS == 0 ? NONE : 0;
    });

    const u32* blocks = row_states + num_rows * STATE_WORDS;
    copy(blocks, p.blocks, num_blocks);

    const u32* sample_indices = blocks + num_blocks;
    const u32* sampling = sample_indices + num_sampled;
    spread(max(num_sampled, p.num_sampled), [&](u32 i) {
        p.sample_indices[i] = i < num_sampled ? sample_indices[i] : 0;
    });
    spread(max(num_sampled, p.num_sampled) * SAMPLING_WORDS, [&](u32 i) {
        bool real = i < num_sampled * SAMPLING_WORDS;
        p.sampling[i] = real ? sampling[i] : greedy_word(i % SAMPLING_WORDS);
    });

    const u32* bias_ids = sampling + num_sampled * SAMPLING_WORDS;
    copy(bias_ids, p.bias_ids, num_bias);
    copy(bias_ids + num_bias, p.bias_values, num_bias);

    const u32* section = bias_ids + 2 * num_bias;
    for (u32 g = 0; g < p.num_more_groups; g++) {
        const Group& group = p.more_groups[g];
        const u32* lens = section + num_tokens;
        const u32* starts = lens + num_rows;
        spread(max(num_tokens, p.num_tokens), [&](u32 i) {
            group.slot_mapping[i] = i < num_tokens ? section[i] : NONE;
        });
        spread(max(num_rows, p.num_rows), [&](u32 i) {
            group.context_lens[i] = i < num_rows ? lens[i] : 0;
        });
        spread(max(num_rows, p.num_rows) + 1, [&](u32 i) {
            group.block_starts[i] = i <= num_rows ? starts[i] : num_blocks;
        });
        section = starts + num_rows + 1;
    }

    spread(2, [&](u32 i) { p.prefixes[i] = i == 0 ? num_prefixes : num_prefix_rows; });
    copy(section, p.prefixes + 2, num_prefixes * PREFIX_WORDS);
    copy(section + num_prefixes * PREFIX_WORDS, p.prefix_rows, num_prefix_rows * PREFIX_ROW_WORDS);
}
