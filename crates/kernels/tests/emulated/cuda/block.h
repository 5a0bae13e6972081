// Blocks: where their threads meet, and their shared memory.
//
// Where threads meet (a barrier, a shuffle, a matrix product) each leaves the address of its
// operands; the last to arrive does the work of all of them, and they run on.
#pragma once
#include "thread.h"

namespace emulator {
// ---- where threads meet ----

struct Meeting {
    unsigned expected;
    unsigned arrived;
    const char* name;
    void (*complete)(void** operands);
    void* operands[MAX_THREADS]; // Null of threads that have ended.
    Thread* first;
    unsigned size;

    void begin(Thread* first_thread, unsigned count) {
        expected = size = count;
        first = first_thread;
        arrived = 0;
        memset(operands, 0, count * sizeof *operands);
    }

    void end() {
        if (arrived == 0 || arrived < expected) return;
        complete(operands);
        memset(operands, 0, size * sizeof *operands);
        arrived = 0;
        for (unsigned i = 0; i < size; i++) {
            if (first[i].state == WAITING) first[i].state = READY;
        }
    }

    // Returns when all have called it with the same name.
    void arrive(const char* what, void* own, void (*then)(void**)) {
        if (arrived > 0 && strcmp(what, name) != 0) {
            fail("is at %s, where others are at %s", what, name);
        }
        name = what;
        complete = then;
        operands[running - first] = own;
        arrived++;
        running->state = WAITING;
        running->waits_at = what;
        end();
        if (running->state == WAITING) back_to_scheduler();
    }
};

struct Block {
    uint3 index;
    bool is_alive;
    std::vector<Thread> threads;
    Meeting all, warps[MAX_THREADS / 32];
    std::vector<unsigned char> memory; // Its shared memory, while another block runs.
};

// Blocks that share the machine; one where nothing is shuffled.
static Block blocks[4];
static Block* current;

static void run_fiber() {
    for (;;) {
        run_kernel();
        running->state = ENDED;
        // Barriers of a block count those who have left; warps must stay whole.
        current->all.expected--;
        current->all.end();
        back_to_scheduler();
    }
}

// ---- shared memory: what the source declares, then what the launch asks for ----

constexpr unsigned DYNAMIC_AT = 48 << 10, SHARED_BYTES = DYNAMIC_AT + (256 << 10), FENCE = 1024;
alignas(1024) static unsigned char shared_memory[SHARED_BYTES];
static unsigned declared_bytes, dynamic_bytes;

// What nobody wrote is no number, in any format, and no index.
constexpr unsigned char UNWRITTEN = 0xff;

// The place of a variable; `Variable` is a type of its own for each. Static: of other functions'
// variables all specialisations that a process has loaded share one.
template <typename Variable> static Variable& declared() {
    static const unsigned at = [] {
        unsigned begin = (declared_bytes + alignof(Variable) - 1) / alignof(Variable);
        declared_bytes = begin * alignof(Variable) + sizeof(Variable);
        if (declared_bytes > DYNAMIC_AT) fail("declares more shared memory than there is");
        return unsigned(declared_bytes - sizeof(Variable));
    }();
    return *reinterpret_cast<Variable*>(shared_memory + at);
}

// Memory at an address as PTX has it.
static unsigned char* shared_at(unsigned address, unsigned bytes) {
    if (address % bytes != 0) fail("%u bytes of shared memory at %u", bytes, address);
    unsigned end = address + bytes;
    if (end > DYNAMIC_AT + dynamic_bytes || (end > declared_bytes && address < DYNAMIC_AT)) {
        fail("%u bytes at %d of %u bytes of dynamic shared memory", bytes,
             int(address) - int(DYNAMIC_AT), dynamic_bytes);
    }
    return shared_memory + address;
}

static void check_fence() {
    const unsigned char* fence = shared_memory + DYNAMIC_AT + dynamic_bytes;
    for (unsigned i = 0; i < FENCE; i++) {
        if (fence[i] != UNWRITTEN) fail("wrote %u bytes behind its shared memory", i);
    }
}

// ---- running ----

// Marsaglia's xorshift, for what may happen in any order; 0: everything in turn.
static uint64_t dice;

static unsigned below(unsigned end) {
    dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
    return dice % end;
}

static void shuffle(std::vector<unsigned>& order) {
    for (size_t i = order.size(); dice != 0 && i > 1; i--) std::swap(order[i - 1], order[below(i)]);
}

static std::vector<unsigned> counted(unsigned count) {
    std::vector<unsigned> order(count);
    for (unsigned i = 0; i < count; i++) order[i] = i;
    return order;
}

static void begin_block(Block& block, unsigned number) {
    block.index = {number % gridDim.x, number / gridDim.x % gridDim.y,
                   number / gridDim.x / gridDim.y};
    block.is_alive = true;
    block.memory.assign(DYNAMIC_AT + dynamic_bytes + FENCE, UNWRITTEN);
    if (current == &block) current = nullptr;
    block.all.begin(block.threads.data(), num_threads);
    for (unsigned i = 0; i < num_threads; i += 32) {
        block.warps[i / 32].begin(&block.threads[i], min(num_threads - i, 32));
    }
    for (unsigned i = 0; i < num_threads; i++) {
        Thread& thread = block.threads[i];
        thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        thread.number = i;
        thread.state = READY;
        thread.copies.clear();
        thread.copy_groups = 0;
    }
}

static void switch_to(Block& block) {
    if (current == &block) return;
    if (current != nullptr) memcpy(current->memory.data(), shared_memory, current->memory.size());
    memcpy(shared_memory, block.memory.data(), block.memory.size());
    current = &block;
    blockIdx = block.index;
}

// Lets the threads of a warp of the current block, from `first` on, run as far as they can without
// other warps: far ahead of those, which is how a missing barrier shows. Whether any could at all.
static bool run_warp(unsigned first) {
    std::vector<unsigned> lanes = counted(min(num_threads - first, 32));
    bool has_run = false, goes_on = true;
    while (goes_on && !has_failed) {
        goes_on = false;
        shuffle(lanes);
        for (size_t i = 0; i < lanes.size() && !has_failed; i++) {
            Thread& thread = current->threads[first + lanes[i]];
            if (thread.state != READY) continue;
            resume(thread);
            has_run = goes_on = true;
        }
    }
    return has_run;
}

static void say_who_waits() {
    int length = snprintf(failure, sizeof failure, "block (%u, %u, %u) waits for ever:", blockIdx.x,
                          blockIdx.y, blockIdx.z);
    const char* before = "";
    for (unsigned i = 0; i < num_threads && length < int(sizeof failure) - 100; i++) {
        const Thread& thread = current->threads[i];
        const char* where = thread.state == ENDED ? "its end" : thread.waits_at;
        if (strcmp(where, before) == 0) continue;
        length += snprintf(failure + length, sizeof failure - length,
                           " thread %u and what follows at %s;", i, where);
        before = where;
    }
    has_failed = true;
}

// Lets one warp of a block run.
static void step(Block& block) {
    switch_to(block);
    std::vector<unsigned> order = counted((num_threads + 31) / 32);
    shuffle(order);
    bool has_run = false;
    for (size_t i = 0; i < order.size() && !has_run; i++) has_run = run_warp(32 * order[i]);
    block.is_alive = block.all.expected > 0;
    if (!has_run) say_who_waits();
    if (!block.is_alive && _setjmp(scheduler) == 0) check_fence();
}

static void run_blocks(unsigned count) {
    std::vector<unsigned> order = counted(count);
    shuffle(order);
    unsigned num_begun = 0, num_places = dice == 0 ? 1 : sizeof blocks / sizeof *blocks;
    unsigned place = 0, steps_left = 0;
    while (!has_failed) {
        unsigned alive[4], num_alive = 0;
        for (unsigned i = 0; i < num_places; i++) {
            Block& block = blocks[i];
            if (!block.is_alive && num_begun < count) begin_block(block, order[num_begun++]);
            if (block.is_alive) alive[num_alive++] = i;
        }
        if (num_alive == 0) return;
        // A block may be held up for a moment, or until another has done much.
        if (!blocks[place].is_alive || (dice != 0 && steps_left-- == 0)) {
            place = alive[dice == 0 ? 0 : below(num_alive)];
            steps_left = dice == 0 ? 0 : 1 << below(9);
        }
        step(blocks[place]);
    }
}
} // namespace emulator
