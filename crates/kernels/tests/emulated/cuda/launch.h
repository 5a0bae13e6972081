// What a compiled source offers to the test that loads it.
#pragma once
#include "schedule.h"

namespace emulator {
static const void* parameters;

template <typename Params> unsigned params_bytes(void (*)(Params)) { return sizeof(Params); }

template <typename Params, void KERNEL_FUNCTION(Params)> void call() {
    KERNEL_FUNCTION(*static_cast<const Params*>(parameters));
}

struct Grid {
    uint3 blocks;
    uint3 threads;
    unsigned dynamic_bytes;
    uint64_t seed; // Of the order of blocks and threads; 0: as they are counted.
};

// What a kernel's head says of clusters; `__cluster_dims__` becomes `.of`.
struct ClusterDims {
    dim3 it = {1, 1, 1};

    ClusterDims of(unsigned x, unsigned y = 1, unsigned z = 1) { return {{x, y, z}}; }
};

// Threads of what runs at once; false where there is no memory.
static bool make_threads(unsigned num_places) {
    char* stacks = make_stacks(size_t(num_threads) * cluster_size * num_places);
    if (stacks == nullptr) return false;
    for (unsigned i = 0; i < num_places; i++) {
        clusters[i].num_running = 0;
        for (unsigned rank = 0; rank < cluster_size; rank++) {
            Block& block = clusters[i].blocks[rank];
            block.is_alive = false;
            block.threads.resize(num_threads);
            for (Thread& thread : block.threads) {
                make_fiber(thread, stacks, run_fiber);
                stacks += STACK_BYTES;
            }
        }
    }
    return true;
}

// Null, or what is wrong.
static const char* run_grid(const Grid& grid, ClusterDims of_cluster, void (*kernel)()) {
    gridDim = grid.blocks, blockDim = grid.threads, clusterDim = of_cluster.it;
    num_threads = blockDim.x * blockDim.y * blockDim.z;
    cluster_size = clusterDim.x * clusterDim.y * clusterDim.z;
    dynamic_bytes = grid.dynamic_bytes, dice = grid.seed;
    run_kernel = kernel, has_failed = false;
    if (num_threads > MAX_THREADS || DYNAMIC_AT + dynamic_bytes + FENCE > SHARED_BYTES) {
        return "more threads or shared memory than a GPU has";
    }
    if (cluster_size > MAX_CLUSTER || gridDim.x % clusterDim.x != 0 ||
        gridDim.y % clusterDim.y != 0 || gridDim.z % clusterDim.z != 0) {
        return "clusters are too large or do not divide the grid";
    }
    unsigned num_places = dice == 0 ? 1 : cluster_size == 1 ? MAX_PLACES : 2;
    if (!make_threads(num_places)) return "no memory for threads";
    catch_faults();
    current = nullptr;
    run_clusters(gridDim.x * gridDim.y * gridDim.z / cluster_size, num_places);
    return has_failed ? failure : nullptr;
}
} // namespace emulator

// `Params` is the type of the kernel's only parameter; the rest is what stands before its name.
#define EMULATED_KERNEL(kernel, ...)                                                               \
    extern "C" unsigned emulated_params_bytes() { return emulator::params_bytes(kernel); }         \
    extern "C" const char* emulated_launch(const void* params, const emulator::Grid* grid) {       \
        emulator::parameters = params;                                                             \
        emulator::ClusterDims dims = emulator::ClusterDims() __VA_ARGS__;                          \
        return emulator::run_grid(*grid, dims, emulator::call<Params, kernel>);                    \
    }
