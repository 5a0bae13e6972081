// Which thread runs next.
#pragma once
#include "ptx.h"
#include "warpgroup.h"

namespace emulator {
static void run_fiber() {
    for (;;) {
        run_kernel();
        running->state = ENDED;
        // Barriers of a block count those who have left; warps must stay whole.
        current->all.expected--;
        current->all.end();
        leave_cluster();
        back_to_scheduler();
    }
}

// ---- beginning ----

static void begin_block(Block& block, Cluster& cluster, uint3 index) {
    block.index = index;
    block.is_alive = true;
    block.cluster = &cluster;
    block.memory.assign(DYNAMIC_AT + dynamic_bytes + FENCE, UNWRITTEN);
    if (current == &block) current = nullptr;
    memset(block.named, 0, sizeof block.named);
    block.unfenced.clear();
    block.copies.clear();
    block.waiting_warps.clear();
    block.all.begin(block.threads.data(), num_threads);
    for (unsigned i = 0; i < num_threads; i += 32) {
        block.warps[i / 32].begin(&block.threads[i], min(num_threads - i, 32));
        block.products[i / 32] = {};
    }
    for (unsigned i = 0; i < num_threads; i++) {
        Thread& thread = block.threads[i];
        thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        thread.number = i;
        thread.state = READY;
        thread.arrived_at = 0;
        thread.unfenced.clear();
        thread.copies.clear();
        thread.copy_groups = 0;
    }
}

static void begin_cluster(Cluster& cluster, unsigned number) {
    const dim3& dim = clusterDim;
    unsigned x = gridDim.x / dim.x, y = gridDim.y / dim.y;
    uint3 first = {number % x * dim.x, number / x % y * dim.y, number / x / y * dim.z};
    cluster.num_running = cluster_size * num_threads;
    cluster.num_arrived = cluster.num_meetings = 0;
    for (unsigned rank = 0; rank < cluster_size; rank++) {
        begin_block(cluster.blocks[rank], cluster,
                    {first.x + rank % dim.x, first.y + rank / dim.x % dim.y,
                     first.z + rank / dim.x / dim.y});
    }
}

// ---- running ----

static void switch_to(Block& block) {
    if (current == &block) return;
    if (current != nullptr) memcpy(current->memory.data(), shared_memory, current->memory.size());
    memcpy(shared_memory, block.memory.data(), block.memory.size());
    current = &block;
    blockIdx = block.index;
}

// Lets the threads of a warp of the current block, from `first` on, run as far as they can without
// other warps: far ahead of those, which is how a missing barrier shows. Shuffled, every other time
// it is held up somewhere on its way. Whether any could run at all.
static bool run_warp(unsigned first) {
    std::vector<unsigned> lanes = counted(min(num_threads - first, 32));
    bool has_run = false, goes_on = true;
    unsigned turns_left = dice != 0 && below(2) == 0 ? 1 + below(16 * 32) : ~0u;
    while (goes_on && !has_failed) {
        goes_on = false;
        shuffle(lanes);
        for (size_t i = 0; i < lanes.size() && !has_failed; i++) {
            Thread& thread = current->threads[first + lanes[i]];
            if (thread.state != READY) continue;
            resume(thread);
            has_run = goes_on = true;
            if (--turns_left == 0) return true;
        }
    }
    return has_run;
}

static void say_who_waits() {
    int length = snprintf(failure, sizeof failure, "block (%u, %u, %u) waits for ever:", blockIdx.x,
                          blockIdx.y, blockIdx.z);
    const char* before = "";
    for (unsigned i = 0; i < num_threads && length < int(sizeof failure) - 150; i++) {
        const Thread& thread = current->threads[i];
        const char* where = thread.state == ENDED ? "its end" : thread.waits_at;
        if (strcmp(where, before) == 0) continue;
        length += snprintf(failure + length, sizeof failure - length,
                           " thread %u and what follows at %s;", i, where);
        before = where;
    }
    has_failed = true;
}

static void check_end() {
    if (_setjmp(scheduler) != 0) return;
    check_fence();
    if (!current->copies.empty()) fail("ends before a copy that it asked for has arrived");
    if (!current->copies_out.empty()) fail("ends before a copy out of it has been made");
}

// Lets one warp of a block run; false if none can.
static bool run_block(Block& block) {
    switch_to(block);
    std::vector<unsigned> order = counted((num_threads + 31) / 32);
    shuffle(order);
    bool has_run = false;
    for (size_t i = 0; i < order.size() && !has_run; i++) has_run = run_warp(32 * order[i]);
    block.is_alive = block.all.expected > 0;
    if (!block.is_alive && !has_failed) check_end();
    return has_run;
}

static bool has_late(const Block& block) {
    return !block.copies.empty() || !block.waiting_warps.empty();
}

// Of the current block, lets one of the copies arrive that it asked for, or ends the products that
// one of its warps waits for.
__attribute__((noinline)) static void end_one() {
    std::vector<BulkCopy>& copies = current->copies;
    std::vector<unsigned>& warps = current->waiting_warps;
    size_t which = dice == 0 ? 0 : below(copies.size() + warps.size());
    runs_here = true;
    if (_setjmp(scheduler) == 0) {
        if (which < copies.size()) {
            BulkCopy copy = copies[which];
            copies.erase(copies.begin() + which);
            running = copy.by; // Who is to blame.
            arrive(copy);
        } else {
            auto at = warps.begin() + (which - copies.size());
            unsigned warp = *at;
            warps.erase(at);
            running = &current->threads[32 * warp];
            end_products(warp);
        }
    }
    runs_here = false;
}

// Lets one warp of a cluster run. What may be late is, until none can; or, shuffled, as it likes.
static void step(Cluster& cluster) {
    std::vector<unsigned> order = counted(cluster_size);
    shuffle(order);
    for (unsigned rank : order) {
        Block& block = cluster.blocks[rank];
        if (!block.is_alive) continue;
        switch_to(block);
        if (dice != 0 && has_late(block) && below(4) == 0) end_one();
        if (has_failed || run_block(block)) return;
    }
    for (unsigned rank : order) {
        Block& block = cluster.blocks[rank];
        if (!block.is_alive) continue;
        switch_to(block);
        if (has_late(block)) return end_one();
    }
    say_who_waits();
}

static void run_clusters(unsigned count, unsigned num_places) {
    std::vector<unsigned> order = counted(count);
    shuffle(order);
    unsigned num_begun = 0, place = 0, steps_left = 0;
    while (!has_failed) {
        unsigned alive[MAX_PLACES], num_alive = 0;
        for (unsigned i = 0; i < num_places; i++) {
            Cluster& cluster = clusters[i];
            if (cluster.num_running == 0 && num_begun < count) {
                begin_cluster(cluster, order[num_begun++]);
            }
            if (cluster.num_running > 0) alive[num_alive++] = i;
        }
        if (num_alive == 0) return;
        // A cluster may be held up for a moment, or until another has done much.
        if (clusters[place].num_running == 0 || (dice != 0 && steps_left-- == 0)) {
            place = alive[dice == 0 ? 0 : below(num_alive)];
            steps_left = dice == 0 ? 0 : 1 << below(9);
        }
        step(clusters[place]);
    }
}
} // namespace emulator
