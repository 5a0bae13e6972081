// Draws one token for every sampled row. One block takes one row and goes over its logits a few
// times; nothing is sorted as a whole.
//
//   logits -+- log-softmax ---------------------------------> logprobs of the model itself
//           |
//           +- penalties - bias - mask -+- temperature 0 ----> the greatest, lowest id on ties
//                                       |
//                                       +- 1/temperature - top-n-sigma - top-k - typical - min-p
//                                          - top-p - XTC - draw in order of ids
//
// A token's key orders it by logit, then by lowest id. Top-k and top-p are thresholds on keys:
// a histogram of exponents (of counts, or of weights as integers, whose sum no order changes) finds
// the bin where the threshold lies, and only that bin's keys are sorted.
//
// NaN counts as minus infinity. Meaning and order of the steps: the CPU backend's
// `cpu/kernels/sampling`, which is what this is checked against.
#include "logits.cuh"

constexpr u32 WARPS = THREADS / 32;
constexpr u32 SAMPLING_WORDS = 20;
constexpr u32 LATE_WORDS = 4;
constexpr u32 MAX_TOP = 20;
constexpr u32 IN_PROMPT = 1u << 31;
// Two for every thread.
constexpr u32 BINS = 2 * THREADS;
constexpr u32 CAPACITY = 2 * THREADS;
// Below this, a weight rounds to zero even as a subnormal number.
constexpr float LOWEST = -104.0f;
// Bins of bins: a bin that is too full is divided once more.
constexpr u32 FINE_BINS = BINS * BINS;
constexpr float FINE_BINS_PER_UNIT = FINE_BINS / -LOWEST;
constexpr float MASS_OF_ONE = 2147483648.0f;
// The least key that is above minus infinity's.
constexpr u64 ABOVE_NOTHING = u64(0x00800000u) << 32;

struct Params {
    const float* logits; // [num_sampled, vocab_size]
    float* adjusted;     // [max_rows, vocab_size]
    const u32* token_counts;
    const u32* sampling;
    const u32* bias_ids;
    const u32* bias_values;
    const u32* late;
    u32* outputs;
    const u64* greatest; // [num_sampled, num_parts], by greatest_logits.cu
    u32 num_sampled;
    u32 max_rows;
    u32 vocab_size;
    u32 num_parts; // 0: there are none.
};

// How one row's token is drawn; the words of the backend's `SamplingRow`. Read when needed, since
// registers are few.
struct Options {
    const u32* words;

    DEVICE float real(u32 i) const { return __uint_as_float(words[i]); }

    DEVICE u32 state_slot() const { return words[0]; }
    DEVICE float temperature() const { return real(1); }
    DEVICE u32 top_k() const { return words[2]; }
    DEVICE float top_p() const { return real(3); }
    DEVICE float min_p() const { return real(4); }
    DEVICE float repetition() const { return real(5); }
    DEVICE float presence() const { return real(6); }
    DEVICE float frequency() const { return real(7); }
    DEVICE u64 seed() const { return u64(words[9]) << 32 | words[8]; }
    DEVICE u32 position() const { return words[10]; }
    DEVICE u32 top_logprobs() const { return words[11]; }
    DEVICE u32 bias_start() const { return words[12]; }
    DEVICE u32 bias_len() const { return words[13]; }
    DEVICE u32 late_row() const { return words[14]; }

    DEVICE float typical_p() const { return real(15); }
    DEVICE float top_n_sigma() const { return real(16); }
    DEVICE float xtc_probability() const { return real(17); }
    DEVICE float xtc_threshold() const { return real(18); }

    // Some rule must see the whole distribution before it can leave tokens out. Such rows need more
    // registers than others, and so a kernel of their own.
    DEVICE bool is_unusual() const {
        bool any = typical_p() < 1.0f || top_n_sigma() > 0.0f || xtc_probability() > 0.0f;
        return UNUSUAL && any;
    }

    DEVICE bool penalised() const {
        bool neutral = repetition() == 1.0f && presence() == 0.0f && frequency() == 0.0f;
        return state_slot() != NONE && !neutral;
    }

    DEVICE bool changes_logits() const {
        return penalised() || bias_len() > 0 || late_row() != NONE || is_unusual();
    }
};

struct Memory {
    u32 low[BINS];  // Of every bin's sum,
    u32 high[BINS]; // and the upper words.
    union {
        u64 keys[CAPACITY];
        double group_sums[CAPACITY];
    };
    u64 sums[WARPS];
    double double_sums[WARPS];
    u64 before; // What comes before the crossing,
    u32 crossing; // and where it is.
    u32 num_keys;
    u32 token;
};

__shared__ Memory m;

// ---- the block's sums ----

template <typename T> DEVICE T shuffle_down(T x, u32 offset) {
    return __shfl_down_sync(ALL_LANES, x, offset);
}

DEVICE u64 block_max(u64 x) {
    x = warp_max(x);
    __syncthreads();
    if (lane_id() == 0) m.sums[warp_id()] = x;
    __syncthreads();
    u64 all = 0;
    for (u32 w = 0; w < WARPS; w++) all = max(all, m.sums[w]);
    return all;
}

DEVICE double block_sum(double x) {
    for (u32 offset = 16; offset > 0; offset /= 2) x += shuffle_down(x, offset);
    __syncthreads();
    if (lane_id() == 0) m.double_sums[warp_id()] = x;
    __syncthreads();
    double all = 0.0;
    for (u32 w = 0; w < WARPS; w++) all += m.double_sums[w];
    return all;
}

// Sum over the threads before this one; `total` is over all.
DEVICE u64 block_prefix_sum(u64 x, u64& total) {
    u64 inclusive = warp_prefix_sum(x);
    __syncthreads();
    if (lane_id() == 31) m.sums[warp_id()] = inclusive;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (u32 w = 0; w < WARPS; w++) {
        if (w < warp_id()) before += m.sums[w];
        total += m.sums[w];
    }
    return before + inclusive - x;
}

// ---- logits ----

// Calls `each(i, x)` with all logits, four at a time, the next four on their way meanwhile.
// Places past the row's end hold NaN.
template <typename Each> DEVICE void scan(const float* row, u32 n, Each each) {
    constexpr u32 STRIDE = 4 * THREADS;
    u32 i = threadIdx.x * 4;
    if (i >= n) return;
    float4 next = read4(row, i, n);
#pragma unroll 1
    for (; i < n; i += STRIDE) {
        float x[4] = {next.x, next.y, next.z, next.w};
        if (i + STRIDE < n) next = read4(row, i + STRIDE, n);
        each(i, x);
    }
}

// Key of the greatest logit; 0 if all are NaN.
__device__ __noinline__ u64 greatest_key(const float* row, u32 n) {
    return block_max(greatest_of_share<6>(row, 0, n, n));
}

// ---- weights ----

// Unnormalised probabilities relative to the greatest logit's, which is 1.
struct Softmax {
    float max;
    float scale; // One over the temperature.

    DEVICE float exponent(float x) const { return (x - max) * scale; }
    DEVICE float weight(float x) const { return expf(fmaxf(exponent(x), LOWEST)); }
    DEVICE u32 mass(float x) const { return __float2uint_rn(weight(x) * MASS_OF_ONE); }

    // Grows as logits fall. Without a finite greatest logit all are in one bin.
    DEVICE u32 fine_bin(float x) const {
        float below = -exponent(x) * FINE_BINS_PER_UNIT;
        return below > 0.0f ? min(__float2uint_rz(below), FINE_BINS - 1) : 0;
    }
};

// Tokens that may still be drawn.
struct Kept {
    u64 least_key;
    float min_p; // At least this fraction of the likeliest token's weight.

    DEVICE bool has(const Softmax& softmax, float x, u64 key) const {
        if (key < least_key) return false;
        return min_p <= 0.0f || softmax.weight(x) >= min_p;
    }
};

// ---- thresholds ----

// Sorts the gathered keys, greatest first.
__device__ __noinline__ void sort_keys() {
    u32 count = m.num_keys, size = 2;
    while (size < count) size *= 2;
    for (u32 i = count + threadIdx.x; i < size; i += THREADS) m.keys[i] = 0;
    for (u32 length = 2; length <= size; length *= 2) {
        for (u32 distance = length / 2; distance > 0; distance /= 2) {
            __syncthreads();
            for (u32 i = threadIdx.x; i < size / 2; i += THREADS) {
                u32 a = 2 * i - i % distance, b = a + distance;
                bool falling = (a & length) == 0;
                u64 x = m.keys[a], y = m.keys[b];
                if ((x < y) == falling) m.keys[a] = y, m.keys[b] = x;
            }
        }
    }
    __syncthreads();
}

// Finds the least key such that it and all greater ones reach a count or a mass.
struct Selector {
    const float* row;
    u32 n;
    Softmax softmax;
    Kept kept;
    bool by_mass;

    DEVICE u32 measure(float x) const { return by_mass ? softmax.mass(x) : 1; }

    // Calls `each(x, key, fine bin)` with every kept token of fine bins [low, high).
    template <typename Each> DEVICE void scan_kept(u32 low, u32 high, Each each) const {
        scan(row, n, [&](u32 i, const float (&x)[4]) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u64 key = key_of(x[j], i + j);
                if (!kept.has(softmax, x[j], key)) continue;
                u32 fine = softmax.fine_bin(x[j]);
                if (fine >= low && fine < high) each(x[j], key, fine);
            }
        });
    }

    // Sums of BINS bins, each of `width` fine bins from `low` on; returns the sum of all.
    DEVICE u64 histogram(u32 low, u32 width) const {
        __syncthreads();
        for (u32 i = threadIdx.x; i < BINS; i += THREADS) m.low[i] = m.high[i] = 0;
        __syncthreads();
        scan_kept(low, low + width * BINS, [&](float x, u64, u32 fine) {
            u32 add = measure(x), at = (fine - low) / width;
            u32 old = atomicAdd(&m.low[at], add);
            if (old + add < old) atomicAdd(&m.high[at], 1u);
        });
        __syncthreads();
        u64 total;
        block_prefix_sum(of_bin(2 * threadIdx.x) + of_bin(2 * threadIdx.x + 1), total);
        return total;
    }

    static DEVICE u64 of_bin(u32 i) { return u64(m.high[i]) << 32 | m.low[i]; }

    // Of two values a thread, in order: the first at which the sum from `before` on reaches
    // `target`. Leaves its index in `m.crossing` and the sum before it in `m.before`.
    static DEVICE void cross(u64 first, u64 second, u64 before, u64 target) {
        u64 total;
        u64 start = before + block_prefix_sum(first + second, total);
        u64 middle = start + first, end = middle + second;
        if (start < target && target <= middle) {
            m.crossing = 2 * threadIdx.x, m.before = start;
        } else if (middle < target && target <= end) {
            m.crossing = 2 * threadIdx.x + 1, m.before = middle;
        }
        __syncthreads();
    }

    // Gathers the keys in [least, past) of fine bins [low, high); returns how many there are, which
    // may be more than fit.
    DEVICE u32 gather(u32 low, u32 high, u64 least, u64 past) const {
        __syncthreads();
        if (threadIdx.x == 0) m.num_keys = 0;
        __syncthreads();
        scan_kept(low, high, [&](float, u64 key, u32) {
            if (key < least || key >= past) return;
            u32 at = atomicAdd(&m.num_keys, 1u);
            if (at < CAPACITY) m.keys[at] = key;
        });
        __syncthreads();
        return m.num_keys;
    }

    // The least key of the shortest run of greatest kept keys that reaches `target`, which is at
    // least 1 and at most the sum of the histogram just made of all bins.
    DEVICE u64 select(u64 target) const {
        u32 low = 0, width = BINS;
        u64 before = 0, least = 0, past = ~0ull;
        for (;;) {
            cross(of_bin(2 * threadIdx.x), of_bin(2 * threadIdx.x + 1), before, target);
            low += m.crossing * width;
            before = m.before;
            u32 found = gather(low, low + width, least, past);
            if (found <= CAPACITY) break;
            if (width == 1) {
                halve(low, target, before, least, past, found);
                gather(low, low + 1, least, past);
                break;
            }
            width = 1; // Divide this bin.
            histogram(low, width);
        }
        return threshold(before, target);
    }

    // Many equal logits: halves the range of keys [least, past) until what is left fits.
    DEVICE void halve(u32 bin, u64 target, u64& before, u64& least, u64& past, u32 left) const {
        while (left > CAPACITY) {
            u64 middle = least + (past - least) / 2, sum = 0, count = 0;
            scan_kept(bin, bin + 1, [&](float x, u64 key, u32) {
                if (key >= middle && key < past) sum += measure(x), count++;
            });
            u64 all, all_count;
            block_prefix_sum(sum, all);
            block_prefix_sum(count, all_count);
            if (before + all >= target) {
                least = middle;
                left = u32(all_count);
            } else {
                past = middle;
                before += all;
                left -= u32(all_count);
            }
        }
    }

    // The threshold among the gathered keys, which fit.
    DEVICE u64 threshold(u64 before, u64 target) const {
        sort_keys();
        u64 value[2];
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            u32 i = 2 * threadIdx.x + j;
            value[j] = i < m.num_keys ? measure(logit_of(m.keys[i])) : 0;
        }
        cross(value[0], value[1], before, target);
        return m.keys[m.crossing];
    }
};

// Key of the k-th greatest logit; where there are fewer, the least key that is kept. Or, if
// `top_p` is below 1, of the likeliest kept tokens whose weights reach `top_p` of all kept ones'.
__device__ __noinline__ u64 select_key(const float* row, u32 n, Softmax softmax, Kept kept, u32 k,
                                       float top_p) {
    Selector selector{row, n, softmax, kept, top_p < 1.0f};
    u64 total = selector.histogram(0, BINS);
    u64 target = k;
    if (selector.by_mass) {
        double mass = ceil(double(top_p) * double(total));
        // The likeliest token is always kept, and its mass is at least 1.
        target = min(mass > 1.0 ? u64(mass) : 1, total);
    }
    return target <= total && total > 0 ? selector.select(target) : kept.least_key;
}

// ---- the draw ----

// Two independent ones for every position.
DEVICE double uniform(u64 seed, u32 position, bool second) {
    u32 c0 = position, c1 = 0, c2 = 0, c3 = 0, k0 = u32(seed), k1 = u32(seed >> 32);
    for (u32 round = 0; round < 10; round++) { // Philox4x32-10.
        u32 high0 = __umulhi(0xd2511f53u, c0), low0 = 0xd2511f53u * c0;
        u32 high1 = __umulhi(0xcd9e8d57u, c2), low1 = 0xcd9e8d57u * c2;
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
    u64 bits = second ? u64(c3) << 32 | c2 : u64(c1) << 32 | c0;
    return double(bits >> 11) * (1.0 / 9007199254740992.0);
}

// Inverts the cumulative sum of the kept tokens' weights in order of ids, in two steps: first among
// groups of neighbours, then within the group. A group is `steps` times 128 tokens.
struct Draw {
    const float* row;
    u32 n;
    Softmax softmax;
    Kept kept;
    u32 steps;

    // Weights of this lane's four tokens from `i` on, 0 for those that are not kept.
    DEVICE double weights(u32 i, float (&w)[4]) const {
        float4 v = i < n ? read4(row, i, n) : make_float4(0, 0, 0, 0);
        float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            bool has = i + j < n && kept.has(softmax, x[j], key_of(x[j], i + j));
            w[j] = has ? softmax.weight(x[j]) : 0.0f;
        }
        return double((w[0] + w[1]) + (w[2] + w[3]));
    }

    DEVICE u32 token(double uniform) {
        u32 num_groups = ceil_div(n, 128 * steps);
        __syncthreads();
        for (u32 group = warp_id(); group < CAPACITY; group += WARPS) {
            double sum = 0.0;
            if (group < num_groups) {
                for (u32 step = 0; step < steps; step++) {
                    float w[4];
                    sum += weights((group * steps + step) * 128 + lane_id() * 4, w);
                }
                for (u32 offset = 16; offset > 0; offset /= 2) sum += shuffle_down(sum, offset);
            }
            if (lane_id() == 0) m.group_sums[group] = sum;
        }
        __syncthreads();
        if (warp_id() == 0) {
            u32 token = walk(uniform);
            if (lane_id() == 0) m.token = token;
        }
        __syncthreads();
        return m.token;
    }

    // By one warp.
    DEVICE u32 walk(double uniform) const {
        constexpr u32 OWN = CAPACITY / 32;
        double sum = 0.0;
        for (u32 i = 0; i < OWN; i++) sum += m.group_sums[lane_id() * OWN + i];
        double end = warp_prefix_sum(sum);
        double target = uniform * __shfl_sync(ALL_LANES, end, 31);
        u32 owner = first_past(target, sum, end);
        // Its owner looks for the group.
        double rest = target - (end - sum);
        u32 group = 0;
        for (u32 i = 0; i < OWN; i++) {
            double of_group = m.group_sums[lane_id() * OWN + i];
            if (of_group <= 0.0) continue;
            group = lane_id() * OWN + i;
            if (rest < of_group) break;
            if (i + 1 < OWN && any_after(i + 1)) rest -= of_group;
        }
        group = __shfl_sync(ALL_LANES, group, owner);
        rest = __shfl_sync(ALL_LANES, rest, owner);
        return walk_group(group, rest);
    }

    DEVICE bool any_after(u32 i) const {
        constexpr u32 OWN = CAPACITY / 32;
        for (; i < OWN; i++) {
            if (m.group_sums[lane_id() * OWN + i] > 0.0) return true;
        }
        return false;
    }

    // The first lane whose share of a sum ends past `target`; rounding may leave none: then the
    // last that has a share.
    static DEVICE u32 first_past(double target, double share, double end) {
        u32 past = __ballot_sync(ALL_LANES, share > 0.0 && target < end);
        u32 any = __ballot_sync(ALL_LANES, share > 0.0);
        return past != 0 ? __ffs(past) - 1 : any != 0 ? 31 - __clz(any) : 0;
    }

    DEVICE u32 walk_group(u32 group, double target) const {
        u32 token = 0;
        for (u32 step = 0; step < steps; step++) {
            u32 i = (group * steps + step) * 128 + lane_id() * 4;
            float w[4];
            double sum = weights(i, w), end = warp_prefix_sum(sum);
            if (__any_sync(ALL_LANES, sum > 0.0)) {
                u32 owner = first_past(target, sum, end);
                double rest = target - (end - sum);
                u32 own = i;
                bool found = false;
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    if (found || w[j] <= 0.0f) continue;
                    own = i + j;
                    rest -= w[j];
                    found = rest < 0.0;
                }
                token = __shfl_sync(ALL_LANES, own, owner);
            }
            double all = __shfl_sync(ALL_LANES, end, 31);
            if (target < all) break;
            target -= all;
        }
        return token;
    }
};

// ---- rules that look at the whole distribution, and leave tokens out of the row itself ----

// Makes tokens impossible that `keeps` does not keep.
template <typename Keeps> DEVICE void keep(float* row, u32 n, Keeps keeps) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float x = row[i];
        if (x != x || !keeps(i, x)) row[i] = -INFINITE;
    }
    __syncthreads();
}

DEVICE void keep_sigmas(float* row, u32 n, float max, float num) {
    double count = 0.0, sum = 0.0, squares = 0.0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        if (fabsf(row[i]) < INFINITE) count += 1.0, sum += double(row[i]);
    }
    count = block_sum(count);
    double mean = block_sum(sum) / count;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        double off = double(row[i]) - mean;
        if (fabsf(row[i]) < INFINITE) squares += off * off;
    }
    double least = double(max) - double(num) * sqrt(block_sum(squares) / count);
    keep(row, n, [&](u32, float x) { return double(x) >= least; });
}

DEVICE void keep_top_k(float* row, u32 n, Softmax softmax, u32 k) {
    u64 least = select_key(row, n, softmax, Kept{ABOVE_NOTHING, 0.0f}, k, 1.0f);
    keep(row, n, [&](u32 i, float x) { return key_of(x, i) >= least; });
}

// How far a token's surprise is from what is expected, as the bits of a number.
DEVICE u32 distance_bits(const Softmax& softmax, float x, double expected) {
    return __float_as_uint(float(fabs(double(softmax.exponent(x)) - expected)));
}

DEVICE void keep_typical(float* row, u32 n, Softmax softmax, float p) {
    double sum = 0.0, dot = 0.0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        float e = softmax.exponent(row[i]);
        if (!(e > LOWEST)) continue;
        double w = double(softmax.weight(row[i]));
        sum += w, dot += w * double(e);
    }
    double total = block_sum(sum), expected = block_sum(dot) / total;
    // The least radius, by its bits, within which there is enough.
    u32 low = 0, high = 0x7f7fffffu;
    while (low < high) {
        u32 middle = low + (high - low) / 2;
        double within = 0.0;
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            bool near = distance_bits(softmax, row[i], expected) <= middle;
            if (near && softmax.exponent(row[i]) > LOWEST) within += double(softmax.weight(row[i]));
        }
        if (block_sum(within) >= double(p) * total) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    keep(row, n, [&](u32, float x) { return distance_bits(softmax, x, expected) <= low; });
}

// Leaves out all kept tokens of at least this probability but the least likely of them.
DEVICE void exclude_top_choices(float* row, u32 n, Softmax softmax, Kept kept,
                                 float threshold) {
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        if (kept.has(softmax, row[i], key_of(row[i], i))) sum += double(softmax.weight(row[i]));
    }
    double least_weight = double(threshold) * block_sum(sum);
    u64 least = ~0ull, count = 0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        u64 key = key_of(row[i], i);
        if (!kept.has(softmax, row[i], key)) continue;
        if (double(softmax.weight(row[i])) < least_weight) continue;
        least = min(least, key);
        count++;
    }
    least = ~block_max(~least);
    u64 all;
    block_prefix_sum(count, all);
    if (all >= 2) keep(row, n, [&](u32 i, float x) { return key_of(x, i) <= least; });
}

// ---- penalties and bias ----

DEVICE float penalised(Options o, float x, u32 count) {
    float scaled = x > 0.0f ? x / o.repetition() : x * o.repetition();
    u32 times = count & ~IN_PROMPT;
    if (times == 0) return scaled;
    return __fsub_rn(__fsub_rn(scaled, __fmul_rn(o.frequency(), float(times))), o.presence());
}

// What a row needs to know of the token before; the backend's `late`.
struct Late {
    const u32* mask; // Null: all tokens may be drawn.
    const u32* bias_ids;
    const u32* bias_values;
    u32 bias_len;

    DEVICE Late(const u32* words, u32 row)
        : mask(nullptr), bias_ids(words), bias_values(words), bias_len(0) {
        if (row == NONE) return;
        const u32* header = words + row * LATE_WORDS;
        if (header[0] != NONE) mask = words + header[0];
        bias_ids = words + header[1];
        bias_len = header[2];
        bias_values = bias_ids + bias_len;
    }

    DEVICE bool allows(u32 id) const {
        return mask == nullptr || (mask[id / 32] >> (id % 32) & 1) == 1;
    }
};

__device__ __noinline__ void add_bias(const u32* ids, const u32* values, u32 len, u32 n,
                                      float* to) {
    for (u32 i = threadIdx.x; i < len; i += THREADS) {
        u32 id = ids[i];
        // The first of several entries for one token adds them all, in order.
        bool first = id < n;
        for (u32 j = 0; j < i && first; j++) first = ids[j] != id;
        if (!first) continue;
        float x = to[id];
        for (u32 j = i; j < len; j++) {
            if (ids[j] == id) x += __uint_as_float(values[j]);
        }
        to[id] = x;
    }
    __syncthreads();
}

// Writes the row with penalties, bias and mask to `to`.
__device__ __noinline__ void adjust(const Params& p, Options o, const float* row, float* to) {
    u32 n = p.vocab_size;
    bool count = o.penalised();
    const u32* counts = p.token_counts + u64(count ? o.state_slot() : 0) * n;
    Late late(p.late, o.late_row());
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        u32 seen = count ? counts[i] : 0;
        float x = seen != 0 ? penalised(o, row[i], seen) : row[i];
        // No finite bias makes a masked token possible.
        to[i] = late.allows(i) ? x : -INFINITE;
    }
    __syncthreads();
    add_bias(p.bias_ids + o.bias_start(), p.bias_values + o.bias_start(), o.bias_len(), n, to);
    add_bias(late.bias_ids, late.bias_values, late.bias_len, n, to);
}

// ---- the token and its logprobs ----

DEVICE float clamp_min_p(float x) { return x > 0.0f ? fminf(x, 1.0f) : 0.0f; }

// Key of the greatest of the model's own logits.
DEVICE u64 greatest_of_model(const Params& p, const float* row) {
    if (p.num_parts == 0) return greatest_key(row, p.vocab_size);
    const u64* parts = p.greatest + blockIdx.x * p.num_parts;
    return block_max(threadIdx.x < p.num_parts ? parts[threadIdx.x] : 0);
}

// `greatest`: the key of the row's greatest. `own`: the row again, if it is this row's own to
// change.
DEVICE u32 choose(const Params& p, Options o, const float* row, u64 greatest, float* own) {
    u32 n = p.vocab_size;
    if (greatest == 0) return 0;
    float max = logit_of(greatest), scale = 1.0f / o.temperature();
    // Not a number, negative or so small that its reciprocal overflows: greedy as well.
    if (!(o.temperature() > 0.0f && scale < INFINITE && fabsf(max) < INFINITE)) {
        return id_of(greatest);
    }
    Softmax softmax{max, scale};
    if (UNUSUAL && o.top_n_sigma() > 0.0f) keep_sigmas(own, n, max, o.top_n_sigma());
    if (UNUSUAL && o.typical_p() < 1.0f) {
        if (o.top_k() > 0 && o.top_k() < n) keep_top_k(own, n, softmax, o.top_k());
        keep_typical(own, n, softmax, o.typical_p());
        softmax.max = logit_of(greatest_key(row, n));
    }
    Kept kept{ABOVE_NOTHING, clamp_min_p(o.min_p())};
    if (o.top_k() > 0 && o.top_k() < n) {
        // By rank among all; what is too unlikely is left out afterwards.
        kept.least_key = select_key(row, n, softmax, Kept{ABOVE_NOTHING, 0.0f}, o.top_k(), 1.0f);
    }
    if (o.top_p() < 1.0f) kept.least_key = select_key(row, n, softmax, kept, 0, o.top_p());
    if (UNUSUAL && uniform(o.seed(), o.position(), true) < double(o.xtc_probability())) {
        exclude_top_choices(own, n, softmax, kept, o.xtc_threshold());
    }
    Draw draw{row, n, softmax, kept, ceil_div(n, 128 * CAPACITY)};
    return draw.token(uniform(o.seed(), o.position(), false));
}

struct Logprobs {
    float max;
    double log_sum; // Of all exp(logit - max).

    DEVICE Logprobs(const float* row, u32 n, float greatest) : max(greatest) {
        Softmax softmax{greatest, 1.0f};
        double sum = 0.0;
        scan(row, n, [&](u32, const float (&x)[4]) {
            float w[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) w[j] = x[j] == x[j] ? softmax.weight(x[j]) : 0.0f;
            sum += double((w[0] + w[1]) + (w[2] + w[3]));
        });
        log_sum = log(block_sum(sum));
    }

    // With infinite logits about, theirs is 0 and all others' minus infinity.
    DEVICE float of(float x) const {
        if (fabsf(max) < INFINITE && x == x) return float((double(x) - double(max)) - log_sum);
        return max == INFINITE && x == INFINITE ? 0.0f : -INFINITE;
    }
};

// Where a row's outputs lie; the backend's `OutputLayout`.
struct Outputs {
    u32* token;
    u32* logprob;
    u32* top_ids;
    u32* top_logprobs;

    DEVICE Outputs(const Params& p, u32 row)
        : token(p.outputs + row), logprob(p.outputs + p.max_rows + row),
          top_ids(p.outputs + 2 * p.max_rows + row * MAX_TOP),
          top_logprobs(p.outputs + (2 + MAX_TOP) * p.max_rows + row * MAX_TOP) {}
};

// Reports the logprob of `token` and the likeliest tokens, of the model's own logits.
DEVICE void report(const Params& p, Options o, const float* row, u32 token,
                   const Outputs& out) {
    u32 n = p.vocab_size, num_top = min(o.top_logprobs(), MAX_TOP);
    u64 greatest = greatest_of_model(p, row);
    float max = greatest == 0 ? -INFINITE : logit_of(greatest);
    Logprobs logprobs(row, n, max);
    if (threadIdx.x == 0) *out.logprob = __float_as_uint(logprobs.of(row[token]));
    u32 found = 0;
    if (num_top > 0) {
        Softmax softmax{max, 1.0f};
        Kept kept{ABOVE_NOTHING, 0.0f};
        kept.least_key = select_key(row, n, softmax, kept, num_top, 1.0f);
        Selector selector{row, n, softmax, kept, false};
        found = min(selector.gather(0, FINE_BINS, 0, ~0ull), num_top);
        sort_keys();
    }
    if (threadIdx.x < MAX_TOP) {
        bool real = threadIdx.x < found;
        u64 key = real ? m.keys[threadIdx.x] : 0;
        out.top_ids[threadIdx.x] = real ? id_of(key) : NONE;
        float logprob = real ? logprobs.of(logit_of(key)) : 0.0f;
        out.top_logprobs[threadIdx.x] = __float_as_uint(logprob);
    }
}

#if UNUSUAL
// One block may take all registers; left alone, the compiler spills instead.
#define BOUNDS __launch_bounds__(THREADS, 1)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif

KERNEL void BOUNDS sample(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    u32 row_index = blockIdx.x, n = p.vocab_size;
    Options options{p.sampling + row_index * SAMPLING_WORDS};
    const float* row = p.logits + u64(row_index) * n;
    float* own = nullptr;
    if (options.changes_logits()) {
        own = p.adjusted + u64(row_index) * n;
        adjust(p, options, row, own);
    }
    u64 greatest = own == nullptr ? greatest_of_model(p, row) : greatest_key(own, n);
    u32 token = choose(p, options, own == nullptr ? row : own, greatest, own);
    Outputs out(p, row_index);
    if (threadIdx.x == 0) *out.token = token;
    if (options.top_logprobs() != NONE) {
        report(p, options, row, token, out);
        return;
    }
    if (threadIdx.x == 0) *out.logprob = 0;
    if (threadIdx.x < MAX_TOP) out.top_ids[threadIdx.x] = NONE, out.top_logprobs[threadIdx.x] = 0;
}
