// Copies whole blocks of the KV cache: within the device, or to and from pinned host memory, which
// is read and written over the bus like any other. Everything comes in the parameters, so that
// nothing has to be uploaded first. A block of threads takes one part of one pair at a time.
#include "common.cuh"

constexpr u32 TO_HOST = 1;
constexpr u32 FROM_HOST = 2;
// Loads in flight for each thread: the bus is far away.
constexpr u32 UNROLL = 8;

struct Params {
    u64 parts[MAX_PARTS];    // on the device: [num_blocks, part_bytes] each
    u64 host;                // [num_host_blocks, host_stride]: where the first part begins
    u64 host_stride;
    u32 part_bytes;          // a multiple of 16
    u32 num_parts;
    u32 num_pairs;
    u32 way;
    u32 pairs[2 * MAX_PAIRS];  // from, to
};

KERNEL void __launch_bounds__(THREADS) move_blocks(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    u32 num_vectors = p.part_bytes / 16;
    for (u32 item = blockIdx.x; item < p.num_pairs * p.num_parts; item += gridDim.x) {
        u32 pair = item / p.num_parts, part = item % p.num_parts;
        u32 from_block = p.pairs[2 * pair], to_block = p.pairs[2 * pair + 1];
        u64 host_part = p.host + u64(part) * p.part_bytes;
        u64 from_address = p.way == FROM_HOST ? host_part + from_block * p.host_stride
                                              : p.parts[part] + u64(from_block) * p.part_bytes;
        u64 to_address = p.way == TO_HOST ? host_part + to_block * p.host_stride
                                          : p.parts[part] + u64(to_block) * p.part_bytes;
        const uint4* from = reinterpret_cast<const uint4*>(from_address);
        uint4* to = reinterpret_cast<uint4*>(to_address);
        u32 v = threadIdx.x;
        for (; v + (UNROLL - 1) * THREADS < num_vectors; v += UNROLL * THREADS) {
            uint4 loaded[UNROLL];
#pragma unroll
            for (u32 i = 0; i < UNROLL; i++) loaded[i] = from[v + i * THREADS];
#pragma unroll
            for (u32 i = 0; i < UNROLL; i++) to[v + i * THREADS] = loaded[i];
        }
        for (; v < num_vectors; v += THREADS) to[v] = from[v];
    }
}
