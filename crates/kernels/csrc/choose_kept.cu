// Which tokens of a prompt stay: those with the most votes, averaged over neighbours, and the last
// ones; see `ops/cut_prompt.rs`. A block takes a key/value head.
//
// Votes are not negative, so that their bits are in their order: the least that stays is found
// digit by digit, from the highest on. Of equals the first stay.
#include "common.cuh"

constexpr u32 WARPS = THREADS / 32;
constexpr u32 DIGITS = 256;
constexpr u32 REACH = 2; // Votes are averaged over so many neighbours on each side.

struct Params {
    const float* votes; // [num_kv_heads, context_len]
    u32* bits;          // As votes: of the averages.
    u32* kept;          // [num_kv_heads, num_kept]: positions, in order.
    u32 context_len;
    u32 num_observed;
    u32 num_kept;
    u32 num_kv_heads;
};

// The bits of the `wanted`th greatest, and how many of those that equal it are wanted.
struct Least {
    u32 bits;
    u32 wanted;
};

DEVICE Least find_least(const u32* bits, u32 num, u32 wanted) {
    __shared__ u32 counts[DIGITS];
    __shared__ Least shared;
    Least least = {0, wanted};
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (u32 i = threadIdx.x; i < DIGITS; i += THREADS) counts[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < num; i += THREADS) {
            bool alike = u64(bits[i] ^ least.bits) >> (shift + 8) == 0;
            if (alike) atomicAdd(&counts[bits[i] >> shift & (DIGITS - 1)], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 digit = DIGITS - 1;
            for (; digit > 0 && counts[digit] < least.wanted; digit--) {
                least.wanted -= counts[digit];
            }
            least.bits |= digit << shift;
            shared = least;
        }
        __syncthreads();
        least = shared;
        __syncthreads(); // All have read it.
    }
    return least;
}

KERNEL void __launch_bounds__(THREADS) choose_kept(const Params p) {
    wait_for_earlier_kernels();
    u32 num_voted = p.context_len - p.num_observed;
    const float* votes = p.votes + u64(blockIdx.x) * p.context_len;
    u32* bits = p.bits + u64(blockIdx.x) * p.context_len;
    u32* kept = p.kept + u64(blockIdx.x) * p.num_kept;
    for (u32 i = threadIdx.x; i < num_voted; i += THREADS) {
        float sum = 0.0f;
        for (u32 j = i - min(i, REACH); j < min(i + REACH + 1, num_voted); j++) sum += votes[j];
        bits[i] = __float_as_uint(sum / (2 * REACH + 1));
    }
    __syncthreads();
    Least least = find_least(bits, num_voted, p.num_kept - p.num_observed);

    u32 num_greater = 0, num_equal = 0; // Among those before.
    for (u32 start = 0; start < num_voted; start += THREADS) {
        u32 i = start + threadIdx.x;
        bool greater = i < num_voted && bits[i] > least.bits;
        bool equal = i < num_voted && bits[i] == least.bits;
        u32 both, before = block_prefix_sum<WARPS>(greater + (u32(equal) << 16), both);
        u32 equals = num_equal + (before >> 16);
        u32 place = num_greater + (before & 0xffff) + min(equals, least.wanted);
        if (greater || (equal && equals < least.wanted)) kept[place] = i;
        num_greater += both & 0xffff;
        num_equal += both >> 16;
    }
    for (u32 i = threadIdx.x; i < p.num_observed; i += THREADS) {
        kept[p.num_kept - p.num_observed + i] = num_voted + i;
    }
}
