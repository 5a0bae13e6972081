// Copies the keys and values of a prompt that stay, each head's own, to blocks of their own; see
// `ops/cut_prompt.rs`. Blocks along x take blocks of the cache, along y key/value heads; a warp
// takes a token at a time.
#include "common.cuh"
#include "kv_cache.cuh"

struct Params {
    u8* keys;
    u8* values;
    const u32* blocks;
    const u32* block_starts;
    const u32* kept; // [num_kv_heads, num_kept]: positions.
    u32 row;
    u32 num_kept;
    u32 num_kv_heads;
    u32 first;      // Of the blocks that are filled, the first of this launch.
    u32 num_blocks; // How many of `to` there are.
    u32 reserved;
    u32 to[MAX_BLOCKS];
};

constexpr u32 WARPS = 4;

// A token's head and its scales.
DEVICE void copy_token(const u8* from, u32 from_token, u8* to, u32 to_token) {
    const u32* words = reinterpret_cast<const u32*>(from + head_at(from_token));
    u32* copied = reinterpret_cast<u32*>(to + head_at(to_token));
    for (u32 i = lane_id(); i < HEAD_BYTES / 4; i += 32) copied[i] = words[i];
#if KV != KV_BF16
    if (lane_id() >= SCALE_WORDS) return;
    const u32* scales = reinterpret_cast<const u32*>(from + scale_at(from_token));
    reinterpret_cast<u32*>(to + scale_at(to_token))[lane_id()] = scales[lane_id()];
#endif
}

KERNEL void __launch_bounds__(32 * WARPS) copy_kept(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    const u32* blocks = p.blocks + p.block_starts[p.row];
    const u32* kept = p.kept + u64(blockIdx.y) * p.num_kept + (p.first + blockIdx.x) * BLOCK_SIZE;
    u64 to = strip_at(p.to[blockIdx.x], p.num_kv_heads, blockIdx.y);
    for (u32 token = warp_id(); token < BLOCK_SIZE; token += WARPS) {
        u32 position = kept[token], from_token = position % BLOCK_SIZE;
        u64 from = strip_at(blocks[position / BLOCK_SIZE], p.num_kv_heads, blockIdx.y);
        copy_token(p.keys + from, from_token, p.keys + to, token);
        copy_token(p.values + from, from_token, p.values + to, token);
    }
}
