// Copies to shared memory by the copy engine: of plain bytes, and of boxes of tensors.
//
// Places are overwritten, with what is no number, as soon as a copy is asked for. It arrives when
// no thread of the block can go on, or, where orders are shuffled, at any moment and in any order.
// Copies out of shared memory are made when who asked for them waits for them.
//
// Source: PTX ISA 8.x, cp.async.bulk and cp.async.bulk.tensor.
#pragma once
#include "barriers.h"

namespace emulator {
// ---- where a byte is ----

// Chunks of 16 bytes are exchanged within 8 rows of 128 bytes: an address's bits 4 to 6 are changed
// by bits 7 to 9.
constexpr unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// ---- arrival ----

static unsigned rows_of(const Box& box) { return box.sides[1] * box.sides[2] * box.sides[3]; }

static void copy_box(const BulkCopy& copy) {
    const Box& box = copy.box;
    for (unsigned row = 0; row < rows_of(box); row++) {
        const char* from = reinterpret_cast<const char*>(box.address);
        bool is_inside = true;
        for (unsigned i = 1, left = row; i < 4; left /= box.sides[i++]) {
            int64_t place = copy.at[i] + int(left % box.sides[i]);
            if (place < 0 || uint64_t(place) >= box.dims[i]) is_inside = false;
            from += place * box.strides[i - 1];
        }
        for (unsigned i = 0; i < box.sides[0]; i++) {
            int64_t x = copy.at[0] + int(i);
            unsigned bytes = box.element_bytes;
            unsigned char* to = shared_at(swizzled(copy.to + 128 * row + i * bytes), bytes);
            if (is_inside && x >= 0 && uint64_t(x) < box.dims[0]) {
                memcpy(to, from + x * bytes, bytes);
            } else {
                memset(to, 0, bytes);
            }
        }
    }
}

static void arrive(const BulkCopy& copy) {
    if (copy.from == nullptr) {
        copy_box(copy);
    } else {
        memcpy(shared_at(copy.to, copy.bytes, 16), copy.from, copy.bytes);
    }
    bytes_arrive(copy.barrier, copy.bytes);
}

// ---- asking ----

static void start_bulk_copy(const BulkCopy& copy) {
    mbarrier_at(copy.barrier);
    check_stores(copy.to, copy.bytes, "copies over");
    memset(shared_at(copy.to, copy.bytes, copy.from == nullptr ? 128 : 16), UNWRITTEN, copy.bytes);
    current->copies.push_back(copy);
}

constexpr uint64_t BOX = 0x0b0c0ded;

static void check_box(const Box& box, unsigned rank) {
    if (box.magic != BOX) fail("copies a box of what is no tensor");
    if (box.rank != rank) fail("copies a box of %u dimensions of %u", rank, unsigned(box.rank));
    if (box.address % 16 != 0) fail("a tensor is not aligned to 16 bytes");
    for (unsigned i = 0; i < 4; i++) {
        if (box.sides[i] > 256) fail("boxes of more than 256 elements along a dimension");
        if (i > 0 && box.strides[i - 1] % 16 != 0) fail("rows of a tensor are not aligned");
    }
}

static void start_box_copy(unsigned to, const void* map, const int (&at)[4], unsigned rank,
                           unsigned barrier) {
    BulkCopy copy = {running, to, 0, barrier, nullptr, {}, {at[0], at[1], at[2], at[3]}};
    Box& box = copy.box;
    memcpy(&box, map, sizeof box);
    check_box(box, rank);
    if (box.is_plain) fail("copies in of plain boxes are not emulated");
    if (box.sides[0] * box.element_bytes != 128) fail("boxes with rows of other than 128 bytes");
    copy.bytes = 128 * rows_of(box);
    start_bulk_copy(copy);
}

// ---- out of shared memory ----

static void start_box_out(const void* map, int x, int y, unsigned from) {
    BoxOut copy = {running, from, false, {}, {x, y, 0, 0}};
    memcpy(&copy.box, map, sizeof copy.box);
    check_box(copy.box, 2);
    if (!copy.box.is_plain) fail("copies out of other than plain boxes are not emulated");
    unsigned row_bytes = copy.box.sides[0] * copy.box.element_bytes;
    if (row_bytes % 16 != 0) fail("rows of a box of %u bytes", row_bytes);
    check_stores(from, row_bytes * copy.box.sides[1], "copies out");
    shared_at(from, row_bytes * copy.box.sides[1], 128);
    current->copies_out.push_back(copy);
}

static void make_copy_out(const BoxOut& copy) {
    const Box& box = copy.box;
    for (unsigned row = 0; row < box.sides[1]; row++) {
        for (unsigned i = 0; i < box.sides[0]; i++) {
            int64_t x = copy.at[0] + int(i), y = copy.at[1] + int(row);
            if (x < 0 || uint64_t(x) >= box.dims[0]) continue;
            if (y < 0 || uint64_t(y) >= box.dims[1]) continue;
            unsigned bytes = box.element_bytes;
            char* to = reinterpret_cast<char*>(box.address) + y * box.strides[0] + x * bytes;
            memcpy(to, shared_at(copy.from + (row * box.sides[0] + i) * bytes, bytes), bytes);
        }
    }
}

static void commit_copies_out() {
    for (BoxOut& copy : current->copies_out) {
        if (copy.by == running) copy.is_committed = true;
    }
}

static void make_copies_out() {
    std::vector<BoxOut> left;
    for (const BoxOut& copy : current->copies_out) {
        if (copy.by == running && copy.is_committed) make_copy_out(copy);
        else left.push_back(copy);
    }
    current->copies_out = left;
}
} // namespace emulator

inline void ptx_cp_async_bulk_tensor_2d_global_shared__cta_bulk_group(const void* map, int x,
                                                                      int y, unsigned from) {
    emulator::start_box_out(map, x, y, from);
}
inline void ptx_cp_async_bulk_commit_group() { emulator::commit_copies_out(); }
inline void ptx_cp_async_bulk_wait_group_read(int) { emulator::make_copies_out(); }
inline void ptx_cp_async_bulk_wait_group(int) { emulator::make_copies_out(); }

inline void ptx_cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(
    unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    using namespace emulator;
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) {
        fail("a copy of %u bytes from %p", bytes, from);
    }
    start_bulk_copy({running, to, bytes, barrier, from, {}, {}});
}
inline void ptx_cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes(
    unsigned to, const void* map, int x, int y, unsigned barrier) {
    emulator::start_box_copy(to, map, {x, y}, 2, barrier);
}
inline void
ptx_cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    unsigned to, const void* map, int x, int y, unsigned barrier, uint64_t) {
    emulator::start_box_copy(to, map, {x, y}, 2, barrier);
}
inline void ptx_cp_async_bulk_tensor_3d_shared__cluster_global_mbarrier__complete_tx__bytes(
    unsigned to, const void* map, int x, int y, int z, unsigned barrier) {
    emulator::start_box_copy(to, map, {x, y, z}, 3, barrier);
}
inline void
ptx_cp_async_bulk_tensor_4d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    unsigned to, const void* map, int x, int y, int z, int w, unsigned barrier, uint64_t) {
    emulator::start_box_copy(to, map, {x, y, z, w}, 4, barrier);
}
inline void ptx_cp_async_bulk_prefetch_tensor_2d_L2_global_tile(const void*, int, int) {}
inline void ptx_cp_async_bulk_prefetch_L2_global(const void*, unsigned) {}
