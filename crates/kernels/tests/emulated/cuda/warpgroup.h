// Products of warpgroups: `d[64 x N] (+)= a[64 x K] * b[K x N]`.
//
// They are done after they are waited for, as late as copies arrive, with what shared memory holds
// by then; meanwhile d is no numbers. Warps of a group, which have 16 rows each, do not wait for
// each other, as the manual promises nothing of the sort.
//
// Source: PTX ISA 8.x, wgmma.mma_async; matrices in shared memory as the canonical layouts with
// 128-byte swizzling have them (CUTLASS, `cute/arch/mma_sm90_desc.hpp`).
#pragma once
#include "bulk.h"
#include "warp.h"

namespace emulator {
static Accumulators& products_of_warp() { return current->products[running->number / 32]; }

// ---- matrices in shared memory ----

struct Matrix {
    unsigned address, leading, stride;

    explicit Matrix(uint64_t descriptor)
        : address((descriptor & 0x3fff) << 4), leading((descriptor >> 16 & 0x3fff) << 4),
          stride((descriptor >> 32 & 0x3fff) << 4) {
        if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) {
            fail("only matrices with 128-byte swizzling are emulated");
        }
    }

    // Byte `byte` of row `row`; rows are 128 bytes, 8 of them `stride` from the next.
    const unsigned char* at(unsigned row, unsigned byte, unsigned bytes) const {
        unsigned at = swizzled(address + row / 8 * stride + row % 8 * 128 + byte);
        check_stores(at, bytes, "multiplies");
        return shared_at(at, bytes);
    }

    float of_rows(unsigned row, unsigned k, bool has_codes) const {
        if (has_codes) return of_e4m3(*at(row, k, 1));
        uint16_t bits;
        memcpy(&bits, at(row, 2 * k, 2), 2);
        return of_bf16(bits);
    }

    // Rows along the sum; 64 columns are a panel.
    float of_columns(unsigned column, unsigned k) const {
        uint16_t bits;
        memcpy(&bits, at(k, column / 64 * leading + column % 64 * 2, 2), 2);
        return of_bf16(bits);
    }
};

// ---- doing ----

static void multiply(const WarpProduct& product, Accumulator& to, unsigned warp) {
    constexpr unsigned MOST = 32; // Of the sum.
    unsigned len = product.has_codes ? 32 : 16;
    float a[16][MOST], b[256][MOST];
    Matrix of_b(product.b), of_a(product.a_is_in_registers ? product.b : product.a);
    for (unsigned n = 0; n < product.columns; n++) {
        for (unsigned k = 0; k < len; k++) {
            b[n][k] = product.b_by_columns ? of_b.of_columns(n, k)
                                           : of_b.of_rows(n, k, product.has_codes);
        }
    }
    for (unsigned row = 0; row < 16; row++) {
        for (unsigned k = 0; k < len; k++) {
            if (product.a_is_in_registers) {
                unsigned lane = row % 8 * 4 + k % 8 / 2;
                unsigned pair = product.registers[lane][row / 8 + k / 8 * 2];
                a[row][k] = of_bf16(k % 2 == 0 ? pair & 0xffff : pair >> 16);
            } else {
                a[row][k] = of_a.of_rows(warp % 4 * 16 + row, k, product.has_codes);
            }
        }
    }
    for (unsigned i = 0; i < 32; i++) {
        for (unsigned j = 0; j < to.len; j++) {
            unsigned row = i / 4 + j % 4 / 2 * 8, column = j / 4 * 8 + i % 4 * 2 + j % 2;
            float& at = to.sums[i][j];
            double sum = product.add ? at : 0.0;
            for (unsigned k = 0; k < len; k++) sum += double(a[row][k]) * b[column][k];
            at = sum;
        }
    }
}

// ---- asking ----

// What a lane gives to a product; `product` has the registers of the first lane only.
struct OwnProduct {
    WarpProduct product;
    float* d;
    unsigned registers[4];
};

// Where the sums are until they are waited for.
static unsigned accumulator_of(Accumulators& of, void** lanes) {
    OwnProduct& first = *static_cast<OwnProduct*>(lanes[0]);
    unsigned len = first.product.columns / 2, free = of.all.size();
    for (unsigned i = 0; i < of.all.size(); i++) {
        if (of.all[i].pending == 0) free = i;
        if (of.all[i].pending > 0 && of.all[i].to[0] == first.d) {
            if (of.all[i].len != len) fail("adds to sums of other columns that are under way");
            return i;
        }
    }
    if (free == of.all.size()) of.all.emplace_back();
    Accumulator& accumulator = of.all[free];
    accumulator.len = len;
    accumulator.pending = 0;
    for (unsigned i = 0; i < 32; i++) {
        float* d = static_cast<OwnProduct*>(lanes[i])->d;
        accumulator.to[i] = d;
        accumulator.sums[i].assign(d, d + len);
        memset(d, UNWRITTEN, len * sizeof *d);
    }
    return free;
}

static void complete_asking(void** lanes) {
    Accumulators& of = products_of_warp();
    if (!of.is_fenced) fail("wgmma.mma_async without wgmma.fence");
    WarpProduct product = static_cast<OwnProduct*>(lanes[0])->product;
    for (unsigned i = 0; i < 32; i++) {
        const OwnProduct& own = *static_cast<OwnProduct*>(lanes[i]);
        memcpy(product.registers[i], own.registers, sizeof own.registers);
        if (own.product.b != product.b || own.product.a != product.a) {
            fail("lanes multiply different matrices");
        }
    }
    product.accumulator = accumulator_of(of, lanes);
    product.group = of.num_groups;
    of.all[product.accumulator].pending++;
    of.pending.push_back(product);
}

static bool is_to_end(const Accumulators& of, const WarpProduct& product) {
    return product.group + of.groups_left < of.num_groups;
}

static void wait_products(void** lanes) {
    Accumulators& of = products_of_warp();
    of.groups_left = *static_cast<unsigned*>(lanes[0]);
    of.is_fenced = false;
    if (of.pending.empty() || !is_to_end(of, of.pending[0])) return;
    of.is_waited_for = true;
    current->waiting_warps.push_back(running->number / 32);
}

// Those that a warp of the current block waits for.
static void end_products(unsigned warp) {
    Accumulators& of = current->products[warp];
    size_t num_done = 0;
    for (const WarpProduct& product : of.pending) {
        if (!is_to_end(of, product)) break;
        Accumulator& to = of.all[product.accumulator];
        multiply(product, to, warp);
        num_done++;
        if (--to.pending > 0) continue;
        for (unsigned i = 0; i < 32; i++) {
            memcpy(to.to[i], to.sums[i].data(), to.len * sizeof(float));
        }
    }
    of.pending.erase(of.pending.begin(), of.pending.begin() + num_done);
    of.is_waited_for = false;
    wake(*current, &of);
}

template <size_t N>
void ask(float (&d)[N][4], WarpProduct product, unsigned a0, unsigned a1, unsigned a2,
         unsigned a3) {
    product.columns = 8 * N;
    OwnProduct own = {product, d[0], {a0, a1, a2, a3}};
    meet_warp("wgmma.mma_async", ~0u, own, complete_asking);
}
} // namespace emulator

inline void ptx_wgmma_fence_sync_aligned() {
    unsigned none = 0;
    emulator::meet_warp("wgmma.fence", ~0u, none,
                        [](void**) { emulator::products_of_warp().is_fenced = true; });
}
inline void ptx_wgmma_commit_group_sync_aligned() {
    unsigned none = 0;
    emulator::meet_warp("wgmma.commit_group", ~0u, none,
                        [](void**) { emulator::products_of_warp().num_groups++; });
}
inline void ptx_wgmma_wait_group_sync_aligned(unsigned groups_left) {
    using namespace emulator;
    meet_warp("wgmma.wait_group", ~0u, groups_left, wait_products);
    Accumulators& of = products_of_warp();
    if (of.is_waited_for) wait_for(&of, "wgmma.wait_group %u", groups_left);
}

// The number of columns is the type's. Both in shared memory. Numbers are those of the text: signs,
// and whether rows are along the sum.
template <size_t N>
void ptx_wgmma_k16_f32_bf16_bf16(float (&d)[N][4], uint64_t a, uint64_t b, unsigned add, int, int,
                                 int a_by_columns, int b_by_columns) {
    if (a_by_columns || b_by_columns) emulator::fail("wgmma of columns of shared memory");
    emulator::WarpProduct product = {};
    product.a = a, product.b = b, product.add = add;
    emulator::ask(d, product, 0, 0, 0, 0);
}
template <size_t N>
void ptx_wgmma_k32_f32_e4m3_e4m3(float (&d)[N][4], uint64_t a, uint64_t b, unsigned add, int, int) {
    emulator::WarpProduct product = {};
    product.a = a, product.b = b, product.add = add, product.has_codes = true;
    emulator::ask(d, product, 0, 0, 0, 0);
}
// a in registers.
template <size_t N>
void ptx_wgmma_k16_f32_bf16_bf16(float (&d)[N][4], unsigned a0, unsigned a1, unsigned a2,
                                 unsigned a3, uint64_t b, int add, int, int, int b_by_columns) {
    emulator::WarpProduct product = {};
    product.b = b, product.add = add;
    product.a_is_in_registers = true, product.b_by_columns = b_by_columns;
    emulator::ask(d, product, a0, a1, a2, a3);
}
