// What a compiled source offers to the test that loads it.
#pragma once
#include "ptx.h"

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

// Null, or what is wrong.
static const char* run_grid(const Grid& grid, void (*kernel)()) {
    gridDim = grid.blocks, blockDim = grid.threads;
    num_threads = blockDim.x * blockDim.y * blockDim.z;
    dynamic_bytes = grid.dynamic_bytes, dice = grid.seed;
    run_kernel = kernel, has_failed = false;
    if (num_threads > MAX_THREADS || DYNAMIC_AT + dynamic_bytes + FENCE > SHARED_BYTES) {
        return "more threads or shared memory than a GPU has";
    }
    char* stacks = make_stacks(size_t(num_threads) * (dice == 0 ? 1 : 4));
    if (stacks == nullptr) return "no memory for stacks";
    for (Block& block : blocks) {
        block.is_alive = false;
        if (dice == 0 && &block != blocks) break;
        block.threads.resize(num_threads);
        for (Thread& thread : block.threads) {
            make_fiber(thread, stacks, run_fiber);
            stacks += STACK_BYTES;
        }
    }
    catch_faults();
    current = nullptr;
    run_blocks(gridDim.x * gridDim.y * gridDim.z);
    return has_failed ? failure : nullptr;
}
} // namespace emulator

// `Params` is the type of the kernel's only parameter.
#define EMULATED_KERNEL(kernel)                                                                    \
    extern "C" unsigned emulated_params_bytes() { return emulator::params_bytes(kernel); }         \
    extern "C" const char* emulated_launch(const void* params, const emulator::Grid* grid) {       \
        emulator::parameters = params;                                                             \
        return emulator::run_grid(*grid, emulator::call<Params, kernel>);                          \
    }
