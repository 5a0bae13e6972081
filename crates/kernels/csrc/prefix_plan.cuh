// Where the attention over shared prefixes is planned and where its parts lie; see
// `ops/plan_attention.rs`.
#pragma once

// Words of a plan's header: units of a block, all units.
constexpr u32 PREFIX_SHARE = 5;
constexpr u32 PREFIX_UNITS = 6;
// Words in front of a step's prefixes: how many there are, and how many rows share one.
constexpr u32 PREFIX_COUNTS = 2;

// A step's prefix: tokens, first entry in `prefix_rows`, entries.
DEVICE u32 prefix_words(u32 prefix) { return 3 * prefix; }

// Slots of query rows are numbered by strip and block: from one piece to the next, one of the two
// grows. A slot: sums [query_rows, HEAD_DIM], then greatest scores and denominators
// [query_rows, 2].
#ifdef HEAD_DIM
DEVICE u64 prefix_slot_at(u32 strip, u32 cta, u32 query_rows) {
    return u64(strip + cta) * query_rows * (HEAD_DIM + 2);
}
#endif
