// What threads of a block, and lanes of a warp, do together.
#pragma once
#include "block.h"

namespace emulator {
// Lanes of a warp meet; a mask that leaves some out is not what our kernels use.
template <typename Operand>
void meet_warp(const char* what, unsigned mask, Operand& own, void (*then)(void**)) {
    if (mask != 0xffffffffu) fail("%s of some lanes only is not emulated", what);
    current->warps[running->number / 32].arrive(what, &own, then);
}

template <typename T> struct Shuffled {
    T x;
    unsigned from; // Of 32 and more: the lane itself.
};

template <typename T> T shuffle(const char* what, unsigned mask, T x, unsigned from) {
    Shuffled<T> own = {x, from};
    meet_warp(what, mask, own, [](void** lanes) {
        T before[32];
        for (int i = 0; i < 32; i++) {
            if (lanes[i] != nullptr) before[i] = static_cast<Shuffled<T>*>(lanes[i])->x;
        }
        for (int i = 0; i < 32; i++) {
            Shuffled<T>* lane = static_cast<Shuffled<T>*>(lanes[i]);
            if (lane != nullptr && lane->from < 32) lane->x = before[lane->from];
        }
    });
    return own.x;
}

// `add(a, b)` over all that threads give.
template <typename Add> struct Reduced {
    static void complete(void** operands) {
        unsigned result = 0;
        bool is_first = true;
        for (unsigned i = 0; i < count(operands); i++) {
            if (operands[i] == nullptr) continue;
            unsigned x = *static_cast<unsigned*>(operands[i]);
            result = is_first ? x : Add::of(result, x);
            is_first = false;
        }
        for (unsigned i = 0; i < count(operands); i++) {
            if (operands[i] != nullptr) *static_cast<unsigned*>(operands[i]) = result;
        }
    }

    static unsigned count(void** operands) {
        return operands == current->all.operands ? num_threads : 32;
    }
};
struct Or {
    static unsigned of(unsigned a, unsigned b) { return a | b; }
};
struct Greatest {
    static unsigned of(unsigned a, unsigned b) { return a < b ? b : a; }
};

template <typename Add> unsigned reduce_warp(const char* what, unsigned mask, unsigned x) {
    meet_warp(what, mask, x, Reduced<Add>::complete);
    return x;
}

template <typename Add> unsigned reduce_block(const char* what, unsigned x) {
    current->all.arrive(what, &x, Reduced<Add>::complete);
    return x;
}

inline unsigned lane() { return running->number % 32; }
} // namespace emulator

template <typename T> T __shfl_sync(unsigned mask, T x, int from) {
    return emulator::shuffle("__shfl_sync", mask, x, from & 31);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T x, int bits) {
    return emulator::shuffle("__shfl_xor_sync", mask, x, emulator::lane() ^ bits);
}
// Lane numbers below zero wrap around to large ones.
template <typename T> T __shfl_up_sync(unsigned mask, T x, unsigned lanes) {
    return emulator::shuffle("__shfl_up_sync", mask, x, emulator::lane() - lanes);
}
template <typename T> T __shfl_down_sync(unsigned mask, T x, unsigned lanes) {
    return emulator::shuffle("__shfl_down_sync", mask, x, emulator::lane() + lanes);
}

inline unsigned __ballot_sync(unsigned mask, int x) {
    unsigned own = unsigned(x != 0) << emulator::lane();
    return emulator::reduce_warp<emulator::Or>("__ballot_sync", mask, own);
}
inline int __any_sync(unsigned mask, int x) {
    return emulator::reduce_warp<emulator::Or>("__any_sync", mask, x != 0);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
    return emulator::reduce_warp<emulator::Greatest>("__reduce_max_sync", mask, x);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    emulator::reduce_warp<emulator::Or>("__syncwarp", mask, 0);
}

inline void __syncthreads() { emulator::reduce_block<emulator::Or>("__syncthreads", 0); }
inline int __syncthreads_or(int x) {
    return emulator::reduce_block<emulator::Or>("__syncthreads_or", x != 0);
}
