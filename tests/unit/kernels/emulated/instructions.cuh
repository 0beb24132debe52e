// The instructions of kitae/kernels/cuda/instructions.cuh on a CPU, and what runs the threads of a kernel there.
//
// Each thread is a coroutine with a stack of its own. It runs until it must wait for others: for its warp in an instruction
// that all lanes take part in, for its block, for a counter that another block advances. Warps are run in an order
// drawn by a seed, each for a while drawn by it too, so other seeds try other interleavings. Copies that go on by
// themselves are made at once, or, if `late`, when they are waited for: who reads before waiting finds old bytes. Shared
// memory begins as numbers that are none. If nobody can go on, the run ends and says so.
//
// Not shown: orders of memory that a GPU allows and a single processor does not have, and anything about speed.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__
#define __align__(n) __attribute__((aligned(n)))

struct uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulated {

struct Copy { u32 to; const void* from; bool real; int group; };  // no `from`: an arrival at the barrier `to`

struct Barrier {
    int size = 0, arrived = 0;
    unsigned passed = 0;
};

struct Arrivals { u32 count = 0, came = 0, over = 0; };

struct Block {
    Barrier barrier;
    std::map<u32, Arrivals> arrivals;
};

struct Warp {
    Barrier barrier{32};
    struct { u32 words[8]; } given[2][32];
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    struct { u32 x; } thread, block;
    char* shared;
    Warp* warp;
    Block* whole;
    int lane, group = 0, exchanges = 0;
    std::vector<Copy> copies;
    bool done = false;
};

inline Fiber* now;
inline ucontext_t scheduler;
inline u64 progress;
inline bool late;

inline void yield() { swapcontext(&now->context, &scheduler); }

inline void meet(Barrier& barrier) {
    const unsigned mine = barrier.passed;
    progress++;
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        barrier.passed++;
    } else {
        while (barrier.passed == mine) yield();
    }
}

// All lanes give words; afterwards each may read those of all. Two rooms take turns, so nobody overwrites what is read.
template <typename... Words>
inline auto& exchange(Words... words) {
    auto& room = now->warp->given[now->exchanges++ & 1];
    const u32 list[] = {words...};
    std::memcpy(room[now->lane].words, list, sizeof list);
    meet(now->warp->barrier);
    return room;
}

inline u32 bits(float x) { u32 y; std::memcpy(&y, &x, 4); return y; }
inline float number(u32 x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float low(u32 x) { return number(x << 16); }
inline float high(u32 x) { return number(x & 0xffff0000u); }
inline float half_of(u32 x, int which) { return which ? high(x) : low(x); }

inline void make(const Copy& c) {
    if (!c.from) {
        auto& barrier = now->whole->arrivals.at(c.to);
        progress++;
        if (++barrier.came == barrier.count) barrier.came = 0, barrier.over++;
    } else if (c.real) std::memcpy(now->shared + c.to, c.from, 16);
    else std::memset(now->shared + c.to, 0, 16);
}

inline void copy(u32 to, const void* from, bool real) {
    if (late) now->copies.push_back({to, from, real, now->group});
    else make({to, from, real, 0});
}

inline u32 rounded_bits(float x) {
    u32 b = bits(x);
    if (x != x) return 0x7fc0;
    return (b + 0x7fff + ((b >> 16) & 1)) >> 16;
}

}  // namespace emulated

#define threadIdx (emulated::now->thread)
#define blockIdx (emulated::now->block)

inline float __uint_as_float(u32 x) { return emulated::number(x); }
inline u64 __cvta_generic_to_shared(const void* p) { return (const char*)p - emulated::now->shared; }
inline void __syncthreads() { emulated::meet(emulated::now->whole->barrier); }
inline void __syncwarp() { emulated::meet(emulated::now->warp->barrier); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline u32 atomicAdd(u32* p, u32 n) { const u32 old = *p; *p += n; emulated::progress++; return old; }

inline float __shfl_xor_sync(u32, float x, int far) {
    auto& given = emulated::exchange(emulated::bits(x));
    return emulated::number(given[emulated::now->lane ^ far].words[0]);
}

inline u32 narrow2(float low, float high) { return emulated::rounded_bits(low) | emulated::rounded_bits(high) << 16; }
inline float power2(float x) { return std::exp2(x); }
inline uint4 far16(const void* p) { uint4 v; std::memcpy(&v, p, 16); return v; }
inline float far4(const float* p) { return *p; }
inline u16 far2(const u16* p) { return *p; }
inline uint4 near16(u32 p) { uint4 v; std::memcpy(&v, emulated::now->shared + p, 16); return v; }
inline void fetch16(u32 to, const void* from) { emulated::copy(to, from, true); }
inline void fetch16_or_zero(u32 to, const void* from, bool real) { emulated::copy(to, from, real); }
inline void end_group() { emulated::now->group++; }

template <int PENDING>
inline void await_groups() {
    auto& copies = emulated::now->copies;
    size_t kept = 0;
    for (const auto& c : copies)
        if (c.group < emulated::now->group - PENDING) emulated::make(c);
        else copies[kept++] = c;
    copies.resize(kept);
}

inline void begin_arrivals(u32 barrier, u32 count) { emulated::now->whole->arrivals[barrier].count = count; }
inline void arrive_when_copied(u32 barrier) { emulated::copy(barrier, nullptr, true); }

// All that this thread asked for before its last arrival there comes now.
inline void await_arrival(u32 barrier, u32 parity) {
    auto& copies = emulated::now->copies;
    size_t mine = 0;
    for (size_t i = 0; i < copies.size() && !mine; i++)
        if (!copies[i].from && copies[i].to == barrier) mine = i + 1;
    for (size_t i = 0; i < mine; i++) emulated::make(copies[i]);
    copies.erase(copies.begin(), copies.begin() + mine);
    while ((emulated::now->whole->arrivals.at(barrier).over & 1) == parity) emulated::yield();
}

// Lane 4 g + t: words 0 to 3 are of a, 4 and 5 of b; depth 8 has words 0, 1 and 4.
template <int DEPTH_OF>
inline void product_of_warp(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    using namespace emulated;
    auto& given = exchange(a0, a1, a2, a3, b0, b1);
    const int g = now->lane >> 2, t = now->lane & 3;
    for (int i = 0; i < 4; i++) {
        const int row = i >> 1, column = 2 * t + (i & 1);
        float total = 0;
        for (int k = 0; k < DEPTH_OF; k++) {
            const int part = k >> 3, lane = (k & 7) >> 1;
            const u32 a = given[4 * g + lane].words[2 * part + row], b = given[4 * column + lane].words[4 + part];
            total += half_of(a, k & 1) * half_of(b, k & 1);
        }
        c[i] += total;
    }
}

inline void mma16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    product_of_warp<16>(c, a0, a1, a2, a3, b0, b1);
}

inline void mma8(float (&c)[4], u32 a0, u32 a1, u32 b0) { product_of_warp<8>(c, a0, a1, 0, 0, b0, 0); }

inline void load_transposed(u32 (&v)[4], u32 place) {
    using namespace emulated;
    auto& given = exchange(place);
    const int g = now->lane >> 2, t = now->lane & 3;
    for (int m = 0; m < 4; m++) {
        u16 pair[2];
        for (int i = 0; i < 2; i++) std::memcpy(&pair[i], now->shared + given[8 * m + 2 * t + i].words[0] + 2 * g, 2);
        v[m] = pair[0] | (u32)pair[1] << 16;
    }
}

inline void count_release(u32* counter) { ++*counter; emulated::progress++; }

inline u32 count_both(u32* counter) { emulated::progress++; return (*counter)++; }
inline void give_up() { std::abort(); }

inline u32 read_acquire(const u32* counter) {
    emulated::yield();
    return *counter;
}

namespace emulated {

// Runs body(shared memory) in all threads; false: they wait for each other for ever.
template <typename Body>
bool run(int blocks, int threads, size_t shared_bytes, bool copies_late, unsigned seed, Body body) {
    static void (*entry)();
    static Body* called;
    late = copies_late;
    called = &body;
    entry = [] {
        (*called)(now->shared);
        now->done = true;
        progress++;
        for (;;) yield();
    };
    std::mt19937 draw(seed);
    std::vector<std::unique_ptr<char[]>> memory;
    std::vector<std::unique_ptr<Block>> wholes;
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<Fiber> fibers(blocks * threads);
    for (int block = 0; block < blocks; block++) {
        memory.emplace_back(new char[shared_bytes + 128]);
        std::memset(memory.back().get(), 0xff, shared_bytes + 128);
        wholes.emplace_back(new Block{{threads}});
        for (int i = 0; i < threads; i++) {
            if (i % 32 == 0) warps.emplace_back(new Warp);
            Fiber& f = fibers[block * threads + i];
            f.thread.x = i, f.block.x = block, f.lane = i % 32;
            f.shared = (char*)(((uintptr_t)memory.back().get() + 127) & ~(uintptr_t)127);
            f.warp = warps.back().get();
            f.whole = wholes.back().get();
            constexpr size_t SIZE = 1 << 16;
            f.stack.reset(new char[SIZE]);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.get();
            f.context.uc_stack.ss_size = SIZE;
            f.context.uc_link = nullptr;
            makecontext(&f.context, entry, 0);
        }
    }
    std::vector<int> order(warps.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    for (int idle = 0; idle < 3;) {
        const u64 before = progress;
        bool left = false;
        std::shuffle(order.begin(), order.end(), draw);
        for (int w : order)
            for (int times = 1 + draw() % 40; times; times--) {
                const u64 here = progress;
                for (int i = 0; i < 32; i++) {
                    now = &fibers[w * 32 + i];
                    if (!now->done) swapcontext(&scheduler, &now->context);
                    left |= !now->done;
                }
                if (progress == here) break;
            }
        if (!left) return true;
        idle = progress == before ? idle + 1 : 0;
    }
    return false;
}

}  // namespace emulated
