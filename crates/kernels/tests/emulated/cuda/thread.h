// A thread is a fiber: it runs until it must wait for others, and then goes back to whoever let it
// run.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>
#include <vector>

#include "language.h"

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

namespace emulator {
constexpr unsigned MAX_THREADS = 1024, STACK_BYTES = 64 << 10;

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
    const void* waits_for; // What wakes it, where that is no meeting of a warp or block.
    char place[64];        // That `waits_at` may say.
    unsigned arrived_at;   // The last of the cluster's meetings, counted from 1.
    bool has_begun; // As a fiber, in this block or in one before.
    jmp_buf at;
    ucontext_t start;
    std::vector<unsigned> unfenced; // Words that it wrote since its last fence.
    std::vector<Copy> copies;
    unsigned copy_groups;
};

static unsigned num_threads; // Of a block.
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

// ---- fibers ----

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

// So many stacks, the same ones at every launch.
static char* make_stacks(size_t count) {
    static char* stacks = nullptr;
    static size_t bytes = 0;
    if (count * STACK_BYTES <= bytes) return stacks;
    if (stacks != nullptr) munmap(stacks, bytes);
    bytes = count * STACK_BYTES;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) bytes = 0;
    return stacks = memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

static void make_fiber(Thread& thread, char* stack, void (*run)()) {
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = stack;
    thread.start.uc_stack.ss_size = STACK_BYTES;
    makecontext(&thread.start, run, 0);
    thread.has_begun = false;
}
} // namespace emulator
