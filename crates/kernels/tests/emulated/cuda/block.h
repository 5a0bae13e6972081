// Blocks: where their threads meet, their shared memory, and clusters of them.
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
        running->waits_for = nullptr;
        end();
        if (running->state == WAITING) back_to_scheduler();
    }
};

// ---- what is under way while threads run on, see `bulk.h` and `warpgroup.h` ----

// Of a tensor, as `boxes.rs` encodes it in place of the driver.
struct Box {
    uint64_t magic;
    uint64_t address;
    uint64_t rank; // Dimensions, the fastest first.
    uint64_t dims[4];
    uint64_t strides[3]; // Bytes, of all dimensions but the first.
    uint64_t sides[4];
    uint64_t element_bytes;
    uint64_t is_plain; // Rows of a box lie one behind the other, nothing is exchanged.
};

// To shared memory, and then a barrier there is told.
struct BulkCopy {
    Thread* by;
    unsigned to, bytes, barrier;
    const void* from; // Null: `box`.
    Box box;
    int at[4];
};

// Out of shared memory.
struct BoxOut {
    Thread* by;
    unsigned from;
    bool is_committed;
    Box box;
    int at[4];
};

// One product of a warp: its 16 rows of a warpgroup's 64.
struct WarpProduct {
    unsigned columns, accumulator, group;
    uint64_t a, b; // Descriptors.
    bool add, a_is_in_registers, has_codes, b_by_columns;
    unsigned registers[32][4]; // Of lanes: a.
};

// Sums that products add to: the kernel's own are no numbers meanwhile.
struct Accumulator {
    float* to[32]; // Of lanes.
    unsigned len;     // Of each.
    unsigned pending; // Products; none: it is free.
    std::vector<float> sums[32];
};

struct Accumulators {
    std::vector<Accumulator> all;
    std::vector<WarpProduct> pending;
    unsigned num_groups, groups_left;
    bool is_fenced, is_waited_for;
};

// Of `bar.sync`.
struct NamedBarrier {
    unsigned expected;
    unsigned arrived;
};

struct Cluster;

struct Block {
    uint3 index;
    bool is_alive;
    std::vector<Thread> threads;
    Meeting all, warps[MAX_THREADS / 32];
    NamedBarrier named[16];
    std::vector<unsigned char> memory; // Its shared memory, while another block runs.
    std::vector<uint16_t> unfenced;    // Of words: who wrote it without a fence, and one.
    std::vector<BulkCopy> copies;
    std::vector<BoxOut> copies_out;
    Accumulators products[MAX_THREADS / 32]; // Of warps.
    std::vector<unsigned> waiting_warps;     // For their products.
    Cluster* cluster;
};

// Blocks that begin together and see each other's shared memory; where a kernel says nothing, one.
constexpr unsigned MAX_CLUSTER = 8;
struct Cluster {
    Block blocks[MAX_CLUSTER]; // By their ranks.
    unsigned num_running;      // Threads that have not ended.
    unsigned num_arrived, num_meetings;
};

static dim3 clusterDim; // In blocks.
static unsigned cluster_size;

// Those that share the machine; one where nothing is shuffled.
constexpr unsigned MAX_PLACES = 4;
static Cluster clusters[MAX_PLACES];
static Block* current;

// ---- waiting for what is no meeting ----

__attribute__((format(printf, 2, 3))) static void wait_for(const void* thing, const char* format,
                                                           ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(running->place, sizeof running->place, format, arguments);
    va_end(arguments);
    running->state = WAITING;
    running->waits_at = running->place;
    running->waits_for = thing;
    back_to_scheduler();
}

static void wake(Block& block, const void* thing) {
    for (Thread& thread : block.threads) {
        if (thread.state == WAITING && thread.waits_for == thing) thread.state = READY;
    }
}

// ---- shared memory: what the source declares, then what the launch asks for ----

constexpr unsigned DYNAMIC_AT = 48 << 10, SHARED_BYTES = DYNAMIC_AT + (256 << 10), FENCE = 1024;
alignas(1024) static unsigned char shared_memory[SHARED_BYTES]; // Of the current block.
static unsigned declared_bytes, dynamic_bytes;

// Upper bits of an address: whose memory it is of, by rank and one, or 0: the own.
constexpr unsigned RANK_AT = 24;

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

// Memory at an address as PTX has it, `bytes` of it, and aligned to `alignment`.
static unsigned char* shared_at(unsigned address, unsigned bytes, unsigned alignment) {
    unsigned rank = address >> RANK_AT, at = address & ((1 << RANK_AT) - 1);
    if (at % alignment != 0) fail("%u bytes of shared memory at %u", alignment, at);
    unsigned end = at + bytes;
    if (end > DYNAMIC_AT + dynamic_bytes || (end > declared_bytes && at < DYNAMIC_AT)) {
        fail("%u bytes at %d of %u bytes of dynamic shared memory", bytes,
             int(at) - int(DYNAMIC_AT), dynamic_bytes);
    }
    if (rank == 0) return shared_memory + at;
    Block& block = current->cluster->blocks[rank - 1];
    if (!block.is_alive) fail("shared memory of block %u, which has ended", rank - 1);
    return (&block == current ? shared_memory : block.memory.data()) + at;
}
static unsigned char* shared_at(unsigned address, unsigned bytes) {
    return shared_at(address, bytes, bytes);
}

// Stores that the copy engine and products do not see before who made them fences. Only those in
// PTX are known of.
static void note_store(unsigned address, unsigned bytes) {
    std::vector<uint16_t>& unfenced = current->unfenced;
    if (unfenced.empty()) unfenced.assign((DYNAMIC_AT + dynamic_bytes) / 4 + 1, 0);
    for (unsigned word = address / 4; word < (address + bytes) / 4; word++) {
        if (unfenced[word] != running->number + 1) running->unfenced.push_back(word);
        unfenced[word] = running->number + 1;
    }
}

static void fence_stores() {
    for (unsigned word : running->unfenced) {
        if (current->unfenced[word] == running->number + 1) current->unfenced[word] = 0;
    }
    running->unfenced.clear();
}

static void check_stores(unsigned address, unsigned bytes, const char* what) {
    if (current->unfenced.empty()) return;
    for (unsigned word = address / 4; word <= (address + bytes - 1) / 4; word++) {
        unsigned writer = current->unfenced[word];
        if (writer == 0) continue;
        fail("%s at %u what thread %u wrote, without a fence", what, 4 * word, writer - 1);
    }
}

static void check_fence() {
    const unsigned char* fence = shared_memory + DYNAMIC_AT + dynamic_bytes;
    for (unsigned i = 0; i < FENCE; i++) {
        if (fence[i] != UNWRITTEN) fail("wrote %u bytes behind its shared memory", i);
    }
}

// ---- chance ----

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
} // namespace emulator
