// Instructions that kernels write as inline PTX: `ptx_` and the instruction's name, the operands in
// the order of the text. What is missing does not compile, and the compiler names it. What only
// Hopper has is in `barriers.h`, `bulk.h` and `warpgroup.h`.
#pragma once
#include "numbers.h"
#include "warp.h"

inline size_t __cvta_generic_to_shared(const void* p) {
    return static_cast<const unsigned char*>(p) - emulator::shared_memory;
}

// Kernels run one after the other.
inline void ptx_griddepcontrol_wait() {}
inline void ptx_griddepcontrol_launch_dependents() {}

// ---- numbers ----

inline void ptx_mov_b32(uint16_t& low, uint16_t& high, unsigned x) { low = x, high = x >> 16; }

inline void ptx_cvt_rn_bf16x2_f32(unsigned& to, float high, float low) {
    using namespace emulator;
    to = pair_of(encode(BF16, low), encode(BF16, high));
}
inline void ptx_cvt_rn_f16x2_f32(unsigned& to, float high, float low) {
    using namespace emulator;
    to = pair_of(encode(F16, low), encode(F16, high));
}
inline void ptx_cvt_f32_f16(float& to, uint16_t x) { to = emulator::of_f16(x); }
inline void ptx_cvt_rn_satfinite_e4m3x2_f32(uint16_t& to, float high, float low) {
    using namespace emulator;
    to = encode(E4M3, low) | encode(E4M3, high) << 8;
}
inline void ptx_cvt_rn_f16x2_e4m3x2(unsigned& to, uint16_t codes) {
    using namespace emulator;
    to = pair_of(encode(F16, of_e4m3(codes & 0xff)), encode(F16, of_e4m3(codes >> 8)));
}

// Products of two short numbers are exact as doubles.
namespace emulator {
template <typename Format, typename Of>
unsigned fma_pair(const Format& format, Of of, unsigned a, unsigned b, unsigned c) {
    auto half = [&](int shift) {
        double product = double(of(a >> shift & 0xffff)) * of(b >> shift & 0xffff);
        return encode(format, product + of(c >> shift & 0xffff));
    };
    return pair_of(half(0), half(16));
}
} // namespace emulator

inline void ptx_fma_rn_bf16x2(unsigned& to, unsigned a, unsigned b, unsigned c) {
    to = emulator::fma_pair(emulator::BF16, emulator::of_bf16, a, b, c);
}
inline void ptx_fma_rn_f16x2(unsigned& to, unsigned a, unsigned b, unsigned c) {
    to = emulator::fma_pair(emulator::F16, emulator::of_f16, a, b, c);
}

inline void ptx_ex2_approx_ftz_f32(float& to, float x) {
    float y = exp2f(x);
    to = y < 0x1p-126f ? 0.0f : y;
}

// ---- loads and stores ----

inline void ptx_ld_global_cg_f32(float& to, const float* from) { to = *from; }
inline void ptx_ld_global_cg_v4_f32(float& a, float& b, float& c, float& d, const float* from) {
    a = from[0], b = from[1], c = from[2], d = from[3];
}
inline void ptx_ld_global_cg_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d,
                                    const void* from) {
    const unsigned* words = static_cast<const unsigned*>(from);
    a = words[0], b = words[1], c = words[2], d = words[3];
}
inline void ptx_ld_global_nc_L1__no_allocate_v4_u32(unsigned& a, unsigned& b, unsigned& c,
                                                     unsigned& d, const void* from) {
    const unsigned* words = static_cast<const unsigned*>(from);
    a = words[0], b = words[1], c = words[2], d = words[3];
}

inline void ptx_ld_shared_u32(unsigned& to, unsigned from) {
    memcpy(&to, emulator::shared_at(from, 4), 4);
}
inline void ptx_ld_shared_f32(float& to, unsigned from) {
    memcpy(&to, emulator::shared_at(from, 4), 4);
}
inline void ptx_ld_shared_v2_f32(float& a, float& b, unsigned from) {
    float x[2];
    memcpy(x, emulator::shared_at(from, 8), 8);
    a = x[0], b = x[1];
}
inline void ptx_ld_shared_v4_f32(float& a, float& b, float& c, float& d, unsigned from) {
    float x[4];
    memcpy(x, emulator::shared_at(from, 16), 16);
    a = x[0], b = x[1], c = x[2], d = x[3];
}
inline void ptx_ld_shared_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d,
                                 unsigned from) {
    unsigned words[4];
    memcpy(words, emulator::shared_at(from, 16), 16);
    a = words[0], b = words[1], c = words[2], d = words[3];
}
inline void ptx_st_shared_u32(unsigned to, unsigned x) {
    memcpy(emulator::shared_at(to, 4), &x, 4);
    emulator::note_store(to, 4);
}
inline void ptx_st_shared_v4_u32(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    unsigned words[4] = {a, b, c, d};
    memcpy(emulator::shared_at(to, 16), words, 16);
    emulator::note_store(to, 16);
}

// ---- asynchronous copies: they arrive when they are waited for, and no earlier ----

namespace emulator {
inline void start_copy(unsigned to, const void* from, unsigned size, unsigned bytes) {
    if (bytes != 0 && bytes != size) fail("a copy of %u of %u bytes is not emulated", bytes, size);
    if (bytes != 0 && reinterpret_cast<uintptr_t>(from) % size != 0) {
        fail("a copy of %u bytes from %p", size, from);
    }
    memset(shared_at(to, size), UNWRITTEN, size);
    running->copies.push_back({to, bytes == 0 ? nullptr : from, size, running->copy_groups});
}

inline void wait_copies(unsigned groups_left) {
    std::vector<Copy>& copies = running->copies;
    size_t kept = 0;
    for (const Copy& copy : copies) {
        if (copy.group + groups_left >= running->copy_groups) {
            copies[kept++] = copy;
        } else if (copy.from == nullptr) {
            memset(shared_at(copy.to, copy.bytes), 0, copy.bytes);
        } else {
            memcpy(shared_at(copy.to, copy.bytes), copy.from, copy.bytes);
        }
    }
    copies.resize(kept);
}
} // namespace emulator

inline void ptx_cp_async_cg_shared_global(unsigned to, const void* from, unsigned size,
                                          unsigned bytes) {
    emulator::start_copy(to, from, size, bytes);
}
inline void ptx_cp_async_ca_shared_global(unsigned to, const void* from, unsigned size,
                                          unsigned bytes) {
    emulator::start_copy(to, from, size, bytes);
}
inline void ptx_cp_async_commit_group() { emulator::running->copy_groups++; }
inline void ptx_cp_async_wait_group(unsigned groups_left) { emulator::wait_copies(groups_left); }

// ---- matrices of 8 x 8: lane i has row i / 4, columns 2 (i % 4) and the next ----

namespace emulator {
struct Matrices {
    unsigned address;
    unsigned* to[4];
};

// Of matrix `m`, what lane `i` gets; lane 8 m + r has the address of row r.
template <bool TRANSPOSED> unsigned lane_of_matrix(void** lanes, int m, int i) {
    auto element = [&](int row, int column) {
        unsigned address = static_cast<Matrices*>(lanes[8 * m + row])->address;
        uint16_t x;
        memcpy(&x, shared_at(address, 16) + 2 * column, 2);
        return x;
    };
    int row = i / 4, column = i % 4 * 2;
    if (TRANSPOSED) return pair_of(element(column, row), element(column + 1, row));
    return pair_of(element(row, column), element(row, column + 1));
}

template <bool TRANSPOSED> void complete_load(void** lanes) {
    for (int i = 0; i < 32; i++) {
        for (int m = 0; m < 4; m++) {
            *static_cast<Matrices*>(lanes[i])->to[m] = lane_of_matrix<TRANSPOSED>(lanes, m, i);
        }
    }
}

// Transposed, rows of what lanes give are columns of what is stored.
template <unsigned N, bool TRANSPOSED> struct StoredMatrices {
    unsigned address;
    unsigned m[N];

    static void complete(void** lanes) {
        for (int i = 0; i < 32; i++) {
            for (unsigned m = 0; m < N; m++) {
                unsigned pair = static_cast<StoredMatrices*>(lanes[i])->m[m];
                for (unsigned half = 0; half < 2; half++) {
                    unsigned row = i / 4, column = i % 4 * 2 + half;
                    if (TRANSPOSED) std::swap(row, column);
                    // The lane with the row's address.
                    void* of_row = lanes[8 * m + row];
                    unsigned address = static_cast<StoredMatrices*>(of_row)->address;
                    uint16_t x = pair >> 16 * half;
                    memcpy(shared_at(address, 16) + column * 2, &x, 2);
                }
            }
        }
    }

    // Each lane notes its own row.
    void store() {
        meet_warp(TRANSPOSED ? "stmatrix.trans" : "stmatrix", ~0u, *this, complete);
        if (lane() < 8 * N) note_store(address, 16);
    }
};

struct Product {
    float* d[4];
    unsigned a[4], b[2];
    float c[4];
};

// Sums are rounded once; tensor cores round more often, by less than kernels rely on.
template <float OF(unsigned)> void complete_product(void** lanes) {
    float a[16][16], b[16][8];
    for (int i = 0; i < 32; i++) {
        const Product& lane = *static_cast<Product*>(lanes[i]);
        for (int half = 0; half < 2; half++) {
            int column = i % 4 * 2 + half;
            for (int m = 0; m < 4; m++) {
                a[i / 4 + m % 2 * 8][column + m / 2 * 8] = OF(lane.a[m] >> 16 * half & 0xffff);
            }
            for (int m = 0; m < 2; m++) {
                b[column + m * 8][i / 4] = OF(lane.b[m] >> 16 * half & 0xffff);
            }
        }
    }
    for (int i = 0; i < 32; i++) {
        const Product& lane = *static_cast<Product*>(lanes[i]);
        for (int j = 0; j < 4; j++) {
            int row = i / 4 + j / 2 * 8, column = i % 4 * 2 + j % 2;
            double sum = lane.c[j];
            for (int k = 0; k < 16; k++) sum += double(a[row][k]) * b[k][column];
            *lane.d[j] = sum;
        }
    }
}
} // namespace emulator

inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& a, unsigned& b, unsigned& c,
                                                         unsigned& d, unsigned address) {
    emulator::Matrices own = {address, {&a, &b, &c, &d}};
    emulator::meet_warp("ldmatrix", ~0u, own, emulator::complete_load<false>);
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& a, unsigned& b,
                                                               unsigned& c, unsigned& d,
                                                               unsigned address) {
    emulator::Matrices own = {address, {&a, &b, &c, &d}};
    emulator::meet_warp("ldmatrix.trans", ~0u, own, emulator::complete_load<true>);
}

inline void ptx_stmatrix_sync_aligned_m8n8_x2_shared_b16(unsigned address, unsigned a,
                                                         unsigned b) {
    emulator::StoredMatrices<2, false>{address, {a, b}}.store();
}
inline void ptx_stmatrix_sync_aligned_m8n8_x1_trans_shared_b16(unsigned address, unsigned a) {
    emulator::StoredMatrices<1, true>{address, {a}}.store();
}
inline void ptx_stmatrix_sync_aligned_m8n8_x2_trans_shared_b16(unsigned address, unsigned a,
                                                               unsigned b) {
    emulator::StoredMatrices<2, true>{address, {a, b}}.store();
}
inline void ptx_stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned address, unsigned a,
                                                               unsigned b, unsigned c,
                                                               unsigned d) {
    emulator::StoredMatrices<4, true>{address, {a, b, c, d}}.store();
}

inline void ptx_movmatrix_sync_aligned_m8n8_trans_b16(unsigned& to, unsigned x) {
    emulator::meet_warp("movmatrix", ~0u, x, [](void** lanes) {
        uint16_t m[8][8];
        for (int i = 0; i < 32; i++) {
            unsigned pair = *static_cast<unsigned*>(lanes[i]);
            m[i / 4][i % 4 * 2] = pair, m[i / 4][i % 4 * 2 + 1] = pair >> 16;
        }
        for (int i = 0; i < 32; i++) {
            int column = i / 4, row = i % 4 * 2;
            *static_cast<unsigned*>(lanes[i]) =
                emulator::pair_of(m[row][column], m[row + 1][column]);
        }
    });
    to = x;
}

inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
    unsigned b0, unsigned b1, float c0, float c1, float c2, float c3) {
    emulator::Product own = {{&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};
    emulator::meet_warp("mma of bf16", ~0u, own, emulator::complete_product<emulator::of_bf16>);
}
inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
    unsigned b0, unsigned b1, float c0, float c1, float c2, float c3) {
    emulator::Product own = {{&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};
    emulator::meet_warp("mma of f16", ~0u, own, emulator::complete_product<emulator::of_f16>);
}
