// What only Hopper has: barriers that count bytes, copies of boxes of a tensor, products of
// warpgroups. For targets with the suffix `a` alone.
//
// Source: PTX ISA 8.x, sections on mbarrier, cp.async.bulk.tensor and wgmma; the descriptors'
// canonical layouts as CUTLASS documents them in `cute/arch/mma_sm90_desc.hpp`.
#pragma once
#include "common.cuh"

// ---- barriers in shared memory ----

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

// Lets asynchronous copies see barriers that this thread initialised; a __syncthreads follows.
DEVICE void barriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Copies of so many bytes will report to the barrier in its present phase.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

DEVICE void barrier_arrive_and_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

// Waits until the phase of this parity has ended.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{ .reg .pred ended;\n"
                 "AGAIN_%=: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
                 "@!ended bra AGAIN_%=; }" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// Stages of a ring, and how often it went round.
template <u32 NUM_STAGES> struct RingPlace {
    u32 stage = 0;
    u32 parity = 0;

    DEVICE void advance() {
        stage++;
        if (stage == NUM_STAGES) stage = 0, parity ^= 1;
    }
};

// ---- warpgroups ----

// Of `threads` threads, who all meet at barrier `id`.
DEVICE void meet(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// As above, for those who need not wait for the others.
DEVICE void meet_later(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <u32 N> DEVICE void give_up_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <u32 N> DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- copies of boxes ----

struct alignas(64) TensorMap {
    u64 words[16];
};

// Orders what this thread wrote to shared memory before what the copy engine or wgmma does next.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A whole number of 16 bytes, all aligned to 16.
DEVICE void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

DEVICE void copy_box(u32 to, const TensorMap& map, int x, int y, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(&map), "r"(x), "r"(y), "r"(barrier)
                 : "memory");
}

DEVICE void copy_box(u32 to, const TensorMap& map, int x, int y, int z, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
                 : "memory");
}

// What the L2 cache is to do with what was copied.
constexpr u64 EVICT_FIRST = 0x12f0000000000000ull;
constexpr u64 EVICT_LAST = 0x14f0000000000000ull;

DEVICE void copy_box_hinted(u32 to, const TensorMap& map, int x, int y, u32 barrier, u64 hint) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(&map), "r"(x), "r"(y), "r"(barrier), "l"(hint)
                 : "memory");
}

DEVICE void copy_box_hinted(u32 to, const TensorMap& map, int x, int y, int z, int w, u32 barrier,
                            u64 hint) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
                 "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(hint)
                 : "memory");
}

DEVICE float2 load2_shared(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
    return v;
}

// ---- copies out of shared memory ----

// What was written there is behind a fence. What of the box lies outside the tensor is left out.
DEVICE void copy_box_out(const TensorMap& map, int x, int y, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group "
                 "[%0, {%1, %2}], [%3];" ::"l"(&map),
                 "r"(x), "r"(y), "r"(from)
                 : "memory");
}

DEVICE void copies_out_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Of this thread: shared memory may be written again.
DEVICE void copies_out_have_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

DEVICE void copies_out_have_ended() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---- matrices of 8 x 8 elements of 16 bits to shared memory ----

// `address`: of lane i's row, row i % 8 of matrix i / 8; lanes beyond the matrices count for none.
DEVICE void store_matrices(u32 address, const u32 (&m)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address),
                 "r"(m[0]), "r"(m[1])
                 : "memory");
}

// As above, each transposed.
DEVICE void store_matrices_transposed(u32 address, const u32 (&m)[1]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address),
                 "r"(m[0])
                 : "memory");
}

DEVICE void store_matrices_transposed(u32 address, const u32 (&m)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
                 "r"(m[0]), "r"(m[1])
                 : "memory");
}

DEVICE void store_matrices_transposed(u32 address, const u32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     address),
                 "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

// ---- products of a warpgroup: d[64 x N] (+)= a[64 x 16] * b[16 x N] ----
//
// Operands in shared memory lie in panels of 64 elements (128 bytes) a row, 16-byte chunks
// exchanged within 8 rows as the copy engine does with 128-byte swizzling. d is as in
// `multiply_add`: d[n] holds columns 8 n on, rows 16 to a warp.

// Rows along m or n, the sum along the 64 elements of a row.
DEVICE u64 rows_descriptor(u32 address) {
    return u64(address >> 4 & 0x3fff) | u64(1) << 16 | u64(64) << 32 | u64(1) << 62;
}

// Rows along the sum, n along the elements of a row; panels are `panel_bytes` apart.
DEVICE u64 columns_descriptor(u32 address, u32 panel_bytes) {
    return u64(address >> 4 & 0x3fff) | u64(panel_bytes >> 4) << 16 | u64(64) << 32 | u64(1) << 62;
}

// What products read from registers is in them from here on.
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `PENDING` committed groups are under way.
template <int PENDING> DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from using `d` before this point.
template <u32 N> DEVICE void pin(float (&d)[N][4]) {
#pragma unroll
    for (u32 n = 0; n < N; n++) {
        asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
    }
}

template <u32 N> struct Product;

#define WG_4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WG_8(i) WG_4(i), WG_4(i + 1)
#define WG_16(i) WG_4(i), WG_4(i + 1), WG_4(i + 2), WG_4(i + 3)
#define WG_32(i) WG_16(i), WG_16(i + 4)
#define WG_48(i) WG_32(i), WG_16(i + 8)
#define WG_64(i) WG_32(i), WG_32(i + 8)
#define WG_88(i) WG_64(i), WG_16(i + 16), WG_8(i + 20)
#define WG_96(i) WG_64(i), WG_32(i + 16)
#define WG_112(i) WG_64(i), WG_48(i + 16)
#define WG_128(i) WG_64(i), WG_64(i + 16)

#define WG_NAMES_4 "%0,%1,%2,%3"
#define WG_NAMES_8 WG_NAMES_4 ",%4,%5,%6,%7"
#define WG_NAMES_16 WG_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WG_NAMES_32                                                                               \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"  \
    "%25,%26,%27,%28,%29,%30,%31"
#define WG_NAMES_48                                                                               \
    WG_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WG_NAMES_64                                                                               \
    WG_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WG_NAMES_88                                                                               \
    WG_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,"   \
                "%83,%84,%85,%86,%87"
#define WG_NAMES_96 WG_NAMES_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define WG_NAMES_112                                                                              \
    WG_NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define WG_NAMES_128                                                                              \
    WG_NAMES_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// `both`: a and b in shared memory, both by rows; d is overwritten unless `add`.
// `codes`: as `both`, of 32 columns of e4m3 instead of 16 of bf16, in as many bytes.
// `rows`, `columns`: d += a * b, a in registers, b by rows or by columns.
// A, B, ..: the next names after d's.
#define WG_PRODUCT(N, REGS, A, B, C, D, E)                                                        \
    template <> struct Product<N> {                                                               \
        static DEVICE void both(float (&d)[N / 8][4], u64 a, u64 b, u32 add) {                    \
            asm volatile("{ .reg .pred add; setp.ne.b32 add, " C ", 0;\n"                         \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "              \
                         "{" WG_NAMES_##REGS "}, " A ", " B ", add, 1, 1, 0, 0; }"                \
                         : WG_##REGS(0)                                                           \
                         : "l"(a), "l"(b), "r"(add));                                             \
        }                                                                                         \
        static DEVICE void codes(float (&d)[N / 8][4], u64 a, u64 b, u32 add) {                   \
            asm volatile("{ .reg .pred add; setp.ne.b32 add, " C ", 0;\n"                         \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 "              \
                         "{" WG_NAMES_##REGS "}, " A ", " B ", add, 1, 1; }"                      \
                         : WG_##REGS(0)                                                           \
                         : "l"(a), "l"(b), "r"(add));                                             \
        }                                                                                         \
        static DEVICE void rows(float (&d)[N / 8][4], const u32 (&a)[4], u64 b) {                 \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "              \
                         "{" WG_NAMES_##REGS "}, {" A ", " B ", " C ", " D "}, " E                \
                         ", 1, 1, 1, 0;"                                                          \
                         : WG_##REGS(0)                                                           \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                   \
        }                                                                                         \
        static DEVICE void columns(float (&d)[N / 8][4], const u32 (&a)[4], u64 b) {              \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "              \
                         "{" WG_NAMES_##REGS "}, {" A ", " B ", " C ", " D "}, " E                \
                         ", 1, 1, 1, 1;"                                                          \
                         : WG_##REGS(0)                                                           \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                   \
        }                                                                                         \
    }

WG_PRODUCT(8, 4, "%4", "%5", "%6", "%7", "%8");
WG_PRODUCT(16, 8, "%8", "%9", "%10", "%11", "%12");
WG_PRODUCT(32, 16, "%16", "%17", "%18", "%19", "%20");
WG_PRODUCT(64, 32, "%32", "%33", "%34", "%35", "%36");
WG_PRODUCT(96, 48, "%48", "%49", "%50", "%51", "%52");
WG_PRODUCT(128, 64, "%64", "%65", "%66", "%67", "%68");
WG_PRODUCT(176, 88, "%88", "%89", "%90", "%91", "%92");
WG_PRODUCT(192, 96, "%96", "%97", "%98", "%99", "%100");
WG_PRODUCT(224, 112, "%112", "%113", "%114", "%115", "%116");
WG_PRODUCT(256, 128, "%128", "%129", "%130", "%131", "%132");
