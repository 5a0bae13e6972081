// What Hopper's threads wait for: barriers in shared memory that count bytes, barriers of some of a
// block's warps, and of clusters.
//
// Source: PTX ISA 8.x, sections on mbarrier, bar and barrier.cluster.
#pragma once
#include "block.h"

namespace emulator {
// ---- barriers in shared memory ----

// A phase ends when all have arrived and as many bytes as were announced.
struct Mbarrier {
    int bytes; // Still to come; copies may be faster than who announces them.
    unsigned parity : 1, pending : 11, arrivals : 11, magic : 9;
};
constexpr unsigned MBARRIER = 0x155;

static Mbarrier& mbarrier_at(unsigned address) {
    Mbarrier& barrier = *reinterpret_cast<Mbarrier*>(shared_at(address, 8));
    if (barrier.magic != MBARRIER) fail("at %u is no barrier: nobody made one there", address);
    return barrier;
}

static void end_phase(Mbarrier& barrier) {
    if (barrier.pending > 0 || barrier.bytes != 0) return;
    barrier.parity ^= 1;
    barrier.pending = barrier.arrivals;
    wake(*current, &barrier);
}

static void arrive(unsigned address, int bytes) {
    Mbarrier& barrier = mbarrier_at(address);
    if (barrier.pending == 0) fail("arrives at %u, where all have arrived", address);
    barrier.bytes += bytes;
    barrier.pending--;
    end_phase(barrier);
}

static void bytes_arrive(unsigned address, int bytes) {
    Mbarrier& barrier = mbarrier_at(address);
    barrier.bytes -= bytes;
    end_phase(barrier);
}
} // namespace emulator

inline void ptx_mbarrier_init_shared__cta_b64(unsigned address, unsigned arrivals) {
    using namespace emulator;
    if (arrivals == 0 || arrivals > MAX_THREADS) fail("a barrier of %u arrivals", arrivals);
    Mbarrier barrier = {0, 0, arrivals, arrivals, MBARRIER};
    memcpy(shared_at(address, 8), &barrier, 8);
}
inline void ptx_mbarrier_arrive_shared__cta_b64(unsigned address) { emulator::arrive(address, 0); }
inline void ptx_mbarrier_arrive_expect_tx_shared__cta_b64(unsigned address, unsigned bytes) {
    emulator::arrive(address, bytes);
}
inline void ptx_mbarrier_expect_tx_relaxed_cta_shared__cta_b64(unsigned address, unsigned bytes) {
    emulator::mbarrier_at(address).bytes += bytes;
}
// Again and again, until it says yes.
inline void ptx_mbarrier_try_wait_parity_shared__cta_b64(unsigned address, unsigned parity) {
    using namespace emulator;
    Mbarrier& barrier = mbarrier_at(address);
    while (barrier.parity == parity) {
        wait_for(&barrier, "mbarrier %u, parity %u", address, parity);
    }
}

inline void ptx_fence_mbarrier_init_release_cluster() {}
inline void ptx_fence_proxy_async_shared__cta() { emulator::fence_stores(); }

// ---- barriers of some warps ----

namespace emulator {
// Whether the caller was the last.
static bool arrive_at_named(unsigned id, unsigned threads) {
    if (id == 0 || id >= 16) fail("barrier %u is not emulated", id);
    if (threads == 0 || threads % 32 != 0) fail("%u threads at barrier %u", threads, id);
    NamedBarrier& barrier = current->named[id];
    if (barrier.arrived > 0 && barrier.expected != threads) {
        fail("expects %u threads at barrier %u, others %u", threads, id, barrier.expected);
    }
    barrier.expected = threads;
    if (++barrier.arrived < threads) return false;
    barrier.arrived = 0;
    wake(*current, &barrier);
    return true;
}
} // namespace emulator

inline void ptx_bar_sync(unsigned id, unsigned threads) {
    using namespace emulator;
    if (!arrive_at_named(id, threads)) wait_for(&current->named[id], "bar.sync %u", id);
}
inline void ptx_bar_arrive(unsigned id, unsigned threads) {
    emulator::arrive_at_named(id, threads);
}

inline void ptx_setmaxnreg_dec_sync_aligned_u32(unsigned) {}
inline void ptx_setmaxnreg_inc_sync_aligned_u32(unsigned) {}

// ---- clusters ----

namespace emulator {
// All that have not ended have arrived: who waits goes on.
static void end_cluster_meeting(Cluster& cluster) {
    if (cluster.num_arrived == 0 || cluster.num_arrived < cluster.num_running) return;
    cluster.num_arrived = 0;
    cluster.num_meetings++;
    for (unsigned rank = 0; rank < cluster_size; rank++) wake(cluster.blocks[rank], &cluster);
}

static void leave_cluster() {
    Cluster& cluster = *current->cluster;
    cluster.num_running--;
    if (running->arrived_at == cluster.num_meetings + 1) cluster.num_arrived--;
    end_cluster_meeting(cluster);
}
} // namespace emulator

inline void ptx_barrier_cluster_arrive_release_aligned() {
    using namespace emulator;
    Cluster& cluster = *current->cluster;
    if (running->arrived_at > cluster.num_meetings) fail("arrives twice at its cluster's barrier");
    running->arrived_at = cluster.num_meetings + 1;
    cluster.num_arrived++;
    end_cluster_meeting(cluster);
}
inline void ptx_barrier_cluster_wait_acquire_aligned() {
    using namespace emulator;
    Cluster& cluster = *current->cluster;
    if (running->arrived_at > cluster.num_meetings) wait_for(&cluster, "barrier.cluster");
}

inline void ptx_mapa_shared__cluster_u32(unsigned& to, unsigned address, unsigned rank) {
    using namespace emulator;
    if (rank >= cluster_size) fail("block %u of a cluster of %u", rank, cluster_size);
    to = (address & ((1 << RANK_AT) - 1)) | (rank + 1) << RANK_AT;
}
inline void ptx_ld_shared__cluster_v4_f32(float& a, float& b, float& c, float& d, unsigned from) {
    float x[4];
    memcpy(x, emulator::shared_at(from, 16), 16);
    a = x[0], b = x[1], c = x[2], d = x[3];
}
