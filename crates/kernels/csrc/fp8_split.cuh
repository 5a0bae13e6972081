// Every number of x as the sum of two in e4m3, with a power of two as the scale of 128 columns of a
// row: x = scale * (greater + lesser). e4m3 has four bits of a number and what the first four leave
// of the eight of bf16 is another four, so that the sum is exact, but for numbers below 2^-9 of the
// greatest of their 128 columns, which are off by up to 2^-17 of that.
//
// A warp takes the 128 columns, a lane four of them: those whose codes are a word.
#pragma once
#include "common.cuh"

constexpr u32 SPLIT_COLS = 128;

// Where codes go.
struct SplitRows {
    u8* codes;     // [2, num_rows, padded len]: the greater, the lesser
    float* scales; // [ceil(len / 128), padded_rows]
    u32 num_rows;
    u32 padded_rows;
};

// The scale is such that the greatest number becomes 128 to 255.
struct SplitScale {
    float scale;
    float inverse;

    // `greatest`: the bits of the greatest magnitude, as bf16.
    DEVICE explicit SplitScale(u32 greatest) {
        u32 exponent = greatest >> 7;
        u32 kept = min(max(exponent, 8), 254);
        // What is no number makes sums that are none.
        scale = __uint_as_float(exponent == 255 ? 0x7fc00000u : (kept - 7) << 23);
        inverse = __uint_as_float((261 - kept) << 23);
    }
};

// Four codes, in the order of their bytes.
DEVICE u32 round4(const float (&x)[4]) {
    return pack_e4m3(x[0], x[1]) | pack_e4m3(x[2], x[3]) << 16;
}

// Splits columns 16 s + 2 t and the next of a group of 64, `first`, and those plus 8, `second`,
// whose codes are word `word` of the 128 columns `block` of a row.
DEVICE void split_word(const SplitRows& to, u32 row, u32 block, u32 len, u32 word, u32 first,
                       u32 second) {
    u32 greatest = max(max(first & 0x7fff, first >> 16 & 0x7fff),
                       max(second & 0x7fff, second >> 16 & 0x7fff));
    SplitScale scale(__reduce_max_sync(ALL_LANES, greatest));
    float values[4] = {low_float(second) * scale.inverse, low_float(first) * scale.inverse,
                       high_float(second) * scale.inverse, high_float(first) * scale.inverse};
    u32 greater = round4(values), upper, lower;
    e4m3_to_bf16(greater, upper, lower);
    values[0] -= low_float(lower), values[1] -= low_float(upper);
    values[2] -= high_float(lower), values[3] -= high_float(upper);
    u32 lesser = round4(values);

    u32 pitch = ceil_div(len, FP8_GROUP) * FP8_GROUP, at = block * SPLIT_COLS + word * 4;
    if (at < pitch) {
        u8* codes = to.codes + u64(row) * pitch + at;
        *reinterpret_cast<u32*>(codes) = greater;
        *reinterpret_cast<u32*>(codes + u64(to.num_rows) * pitch) = lesser;
    }
    if (lane_id() == 0) to.scales[block * to.padded_rows + row] = scale.scale;
}

// Splits 128 columns of a row where a lane has four neighbours, `pairs`. Of a word the lane has one
// pair and the lane two further the other, so that each takes one of their two words.
DEVICE void split_pairs(const SplitRows& to, u32 row, u32 block, u32 len, uint2 pairs) {
    bool is_first = lane_id() / 2 % 2 == 0;
    u32 other = __shfl_xor_sync(ALL_LANES, is_first ? pairs.y : pairs.x, 2);
    u32 t = lane_id() % 2 * 2 + (is_first ? 0 : 1), s = lane_id() / 4 % 4;
    u32 word = lane_id() / 16 * 16 + 4 * t + s;
    split_word(to, row, block, len, word, is_first ? pairs.x : other, is_first ? other : pairs.y);
}
