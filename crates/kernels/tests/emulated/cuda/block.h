// A block: its threads, its shared memory, and where threads wait for each other.
//
// A thread is a fiber: it runs until it must wait for others and then goes back to the loop of
// `run_warp`. Where threads meet (a barrier, a shuffle, a matrix product) each leaves the address
// of its operands; the last to arrive does the work of all of them, and they run on.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#include "language.h"

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

namespace emulator {
constexpr unsigned MAX_THREADS = 1024, STACK_BYTES = 128 << 10;

// What is said of a kernel that cannot go on.
static char failure[1024];
static bool has_failed;

// ---- threads ----

// A copy to shared memory that was asked for and has not arrived.
struct Copy {
    unsigned to;
    const void* from; // Null: zeros.
    unsigned bytes;
    unsigned group; // Counted from the thread's first.
};

enum State { READY, WAITING, ENDED };

struct Thread {
    uint3 index;
    unsigned number; // In the block.
    State state;
    const char* waits_at;
    bool has_begun; // As a fiber, in this block or in one before.
    jmp_buf at;
    ucontext_t start;
    std::vector<Copy> copies;
    unsigned copy_groups;
};

static Thread threads[MAX_THREADS];
static unsigned num_threads;
static Thread* running;
static jmp_buf scheduler;
static void (*run_kernel)();

__attribute__((noinline)) static void back_to_scheduler() {
    if (_setjmp(running->at) == 0) _longjmp(scheduler, 1);
}

[[noreturn]] __attribute__((format(printf, 1, 2))) static void fail(const char* format, ...) {
    int length = snprintf(failure, sizeof failure, "block (%u, %u, %u), thread %u: ", blockIdx.x,
                          blockIdx.y, blockIdx.z, running->number);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure + length, sizeof failure - length, format, arguments);
    va_end(arguments);
    has_failed = true;
    _longjmp(scheduler, 1);
}

// ---- addresses of nothing ----

static thread_local bool runs_here;
static struct sigaction before_us;

static void on_fault(int signal, siginfo_t* info, void* context) {
    if (runs_here) fail("reads or writes at %p, where there is no memory", info->si_addr);
    if (before_us.sa_flags & SA_SIGINFO) before_us.sa_sigaction(signal, info, context);
    // Handled by nobody: the same fault, once more, ends the process.
    if (!(before_us.sa_flags & SA_SIGINFO)) sigaction(signal, &before_us, nullptr);
}

static void catch_faults() {
    static bool is_done = false;
    if (is_done) return;
    struct sigaction ours = {};
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER; // It does not return.
    sigaction(SIGSEGV, &ours, &before_us);
    is_done = true;
}

// ---- where threads meet ----

struct Meeting {
    unsigned expected;
    unsigned arrived;
    const char* name;
    void (*complete)(void** operands);
    void* operands[MAX_THREADS]; // Null of threads that have ended.
    Thread* first;
    unsigned size;

    void begin(unsigned first_thread, unsigned count) {
        expected = size = count;
        first = threads + first_thread;
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

static Meeting all_threads, warps[MAX_THREADS / 32];

static void run_fiber() {
    for (;;) {
        run_kernel();
        running->state = ENDED;
        // Barriers of a block count those who have left; warps must stay whole.
        all_threads.expected--;
        all_threads.end();
        back_to_scheduler();
    }
}

// ---- shared memory: what the source declares, then what the launch asks for ----

constexpr unsigned DYNAMIC_AT = 64 << 10, SHARED_BYTES = DYNAMIC_AT + (256 << 10), FENCE = 1024;
alignas(1024) static unsigned char shared_memory[SHARED_BYTES];
static unsigned declared_bytes, dynamic_bytes;

// What nobody wrote is no number, in any format, and no index.
constexpr unsigned char UNWRITTEN = 0xff;

// The place of a variable; `Variable` is a type of its own for each.
template <typename Variable> Variable& declared() {
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

// Marsaglia's xorshift, to shuffle what may run in any order; 0: nothing is shuffled.
static uint64_t dice;

static void shuffle(std::vector<unsigned>& order) {
    for (size_t i = order.size(); dice != 0 && i > 1; i--) {
        dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
        size_t other = dice % i;
        unsigned x = order[i - 1];
        order[i - 1] = order[other], order[other] = x;
    }
}

static void begin_block() {
    memset(shared_memory, UNWRITTEN, DYNAMIC_AT + dynamic_bytes + FENCE);
    all_threads.begin(0, num_threads);
    for (unsigned i = 0; i < num_threads; i += 32) {
        warps[i / 32].begin(i, min(num_threads - i, 32));
    }
    for (unsigned i = 0; i < num_threads; i++) {
        Thread& thread = threads[i];
        thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        thread.number = i;
        thread.state = READY;
        thread.copies.clear();
        thread.copy_groups = 0;
    }
}

// Until the thread waits or has ended.
__attribute__((noinline)) static void resume(Thread& thread) {
    running = &thread;
    threadIdx = thread.index;
    if (_setjmp(scheduler) != 0) {
        runs_here = false;
        return;
    }
    runs_here = true;
    if (thread.has_begun) _longjmp(thread.at, 1);
    thread.has_begun = true;
    setcontext(&thread.start);
}

static void make_fibers() {
    static char* stacks = static_cast<char*>(
        mmap(nullptr, size_t(MAX_THREADS) * STACK_BYTES, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (unsigned i = 0; i < num_threads; i++) {
        Thread& thread = threads[i];
        getcontext(&thread.start);
        thread.start.uc_stack.ss_sp = stacks + size_t(i) * STACK_BYTES;
        thread.start.uc_stack.ss_size = STACK_BYTES;
        makecontext(&thread.start, run_fiber, 0);
        thread.has_begun = false;
    }
}

static void say_who_waits() {
    int length = snprintf(failure, sizeof failure, "block (%u, %u, %u) waits for ever:", blockIdx.x,
                          blockIdx.y, blockIdx.z);
    const char* before = "";
    for (unsigned i = 0; i < num_threads && length < int(sizeof failure) - 100; i++) {
        const char* where = threads[i].state == ENDED ? "its end" : threads[i].waits_at;
        if (strcmp(where, before) == 0) continue;
        length += snprintf(failure + length, sizeof failure - length,
                           " thread %u and what follows at %s;", i, where);
        before = where;
    }
    has_failed = true;
}

// Lets the threads of a warp, from `first` on, run as far as they can without other warps: far
// ahead of those, which is how a missing barrier shows. Whether any could run at all.
static bool run_warp(unsigned first) {
    static std::vector<unsigned> lanes(32);
    unsigned size = min(num_threads - first, 32);
    lanes.resize(size);
    for (unsigned i = 0; i < size; i++) lanes[i] = first + i;
    bool has_run = false, goes_on = true;
    while (goes_on && !has_failed) {
        goes_on = false;
        shuffle(lanes);
        for (unsigned i = 0; i < size && !has_failed; i++) {
            if (threads[lanes[i]].state != READY) continue;
            resume(threads[lanes[i]]);
            has_run = goes_on = true;
        }
    }
    return has_run;
}

static void run_block() {
    begin_block();
    std::vector<unsigned> order((num_threads + 31) / 32);
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    bool goes_on = true;
    while (goes_on && !has_failed) {
        goes_on = false;
        shuffle(order);
        for (unsigned warp : order) goes_on |= run_warp(32 * warp);
    }
    for (unsigned i = 0; i < num_threads && !has_failed; i++) {
        if (threads[i].state != ENDED) say_who_waits();
    }
    if (!has_failed && _setjmp(scheduler) == 0) check_fence();
}
} // namespace emulator
