// CPU emulation of instructions.cu: a CTA runs in a separate thread, with each of its threads as a fiber. Values that
// CTAs send each other arrive with a delay and in any order.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

using std::max;
using std::min;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }

#define __shared__ static thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __global__
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#define __grid_constant__

constexpr int LANES = 32, FIBERS = WIDTH / MEMBERS * 4;

struct Meeting {
    int arrived = 0, turn = 0;
};

struct Message {
    u32 to, barrier, words[4];
};

struct Warp {
    Meeting meeting;
    u32 a[LANES][4], b[LANES][2], values[LANES];
};

struct Copy {
    u32 to;
    const void* from;
};

struct Fiber {
    ucontext_t start;
    jmp_buf place;
    bool started = false;
};

struct Program {
    int number = 0;
    u32 block = 0;
    int current = 0;
    jmp_buf scheduler;
    std::vector<Fiber> fibers = std::vector<Fiber>(FIBERS);
    std::vector<char> done = std::vector<char>(FIBERS);
    std::vector<std::unique_ptr<char[]>> stacks;
    Warp warps[FIBERS / LANES];
    Meeting all;
    std::vector<Message> under_way;
    std::vector<std::deque<std::vector<Copy>>> copies{FIBERS, std::deque<std::vector<Copy>>(1)};
    std::mt19937 random;
};

struct Index {
    u32 x;
};

thread_local Program* program;
static thread_local char anchor;  // marks the shared memory of this CTA
char* anchors[MEMBERS];
std::atomic<int> met;
std::recursive_mutex memory;
#define threadIdx Index{(u32)program->current}
#define blockIdx Index{program->block}

// Fibers are started as contexts and then switched by jumps, which need no system call.
__attribute__((noinline)) void others() {
    if (!_setjmp(program->fibers[program->current].place)) _longjmp(program->scheduler, 1);
}

__attribute__((noinline)) void resume(Fiber& fiber) {
    if (_setjmp(program->scheduler)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}

inline void join(Meeting& meeting, int number) {
    const int turn = meeting.turn;
    if (++meeting.arrived == number) meeting.arrived = 0, ++meeting.turn;
    while (meeting.turn == turn) others();
}

inline Warp& warp() { return program->warps[program->current / LANES]; }
inline int lane() { return program->current % LANES; }
inline void __syncwarp() { join(warp().meeting, LANES); }
inline void __syncthreads() { join(program->all, FIBERS); }

template <class T>
inline T __shfl_sync(u32, T value, int from) {
    std::memcpy(&warp().values[lane()], &value, 4);
    __syncwarp();
    std::memcpy(&value, &warp().values[from], 4);
    __syncwarp();
    return value;
}

template <class T>
inline T __shfl_xor_sync(u32 all, T value, int far) {
    return __shfl_sync(all, value, lane() ^ far);
}

inline u32 __ballot_sync(u32, u32 set) {
    warp().values[lane()] = set;
    __syncwarp();
    u32 found = 0;
    for (int i = 0; i < LANES; ++i) found |= (u32)(warp().values[i] != 0) << i;
    __syncwarp();
    return found;
}

inline u32 __float_as_uint(float x) { u32 bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline float __int_as_float(int bits) { return __uint_as_float((u32)bits); }
inline void atomicMax(u32* at, u32 value) { *at = max(*at, value); }

inline u32 __byte_perm(u32 low, u32 high, u32 which) {
    const u64 bytes = (u64)high << 32 | low;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= (u32)(bytes >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return found;
}

constexpr u32 MIDDLE = 1 << 26;
inline u32 shared_address(const void* at) { return (u32)((const char*)at - &anchor + MIDDLE); }
inline u32 address_in(u32 address, u32 member) { return address | (member + 1) << 28; }

// Outside the function: libraries in one process would share a local one, far away from their other data.
static thread_local u8 asked_for[200 << 10];
inline u8* dynamic_shared() { return asked_for; }

inline char* place(u32 address) {
    const u32 member = address >> 28;
    return (member ? anchors[member - 1] : &anchor) + (int)(address & 0xfffffff) - (int)MIDDLE;
}

struct Barrier {  // fits in the eight bytes of an mbarrier
    int bytes : 24, arrivals : 8, phase;
};

inline void change(u32 address, int bytes, int arrivals) {
    std::lock_guard<std::recursive_mutex> guard(memory);
    Barrier* barrier = (Barrier*)place(address);
    barrier->bytes += bytes, barrier->arrivals -= arrivals;
    if (barrier->bytes == 0 && barrier->arrivals == 0) barrier->arrivals = 1, ++barrier->phase;
}

inline void make_barrier(u32 address) { *(Barrier*)place(address) = {0, 1, 0}; }
inline void expect(u32 barrier, u32 bytes) { change(barrier, (int)bytes, 1); }

inline void deliver(const Message& message) {
    std::lock_guard<std::recursive_mutex> guard(memory);
    std::memcpy(place(message.to), message.words, 16);
    change(message.barrier, -16, 0);
}

inline void send(u32 to, u32 barrier, u32 a, u32 b, u32 c, u32 d) {
    program->under_way.push_back({to, barrier, {a, b, c, d}});
}

inline void wait(u32 address, u32 parity) {
    for (;;) {
        {
            std::lock_guard<std::recursive_mutex> guard(memory);
            if (((Barrier*)place(address))->phase % 2 != (int)parity) return;
        }
        others();
    }
}

inline void meet() {
    __syncthreads();
    if (program->current == 0) {
        anchors[program->number] = &anchor;
        const int turn = met++ / MEMBERS;
        while (met / MEMBERS == turn) std::this_thread::yield();
    }
    __syncthreads();
}

inline void stop() { std::abort(); }

typedef _Float16 half;
inline float half_of(u32 pair, int which) {
    half x;
    const u16 bits = (u16)(pair >> 16 * which);
    std::memcpy(&x, &bits, 2);
    return (float)x;
}

inline void load_operands(u32 (&b)[4], u32 address) {
    Warp& mine = warp();
    mine.values[lane()] = address;
    __syncwarp();
    for (int block = 0; block < 4; ++block) {
        b[block] = 0;
        for (int i = 0; i < 2; ++i)
            b[block] |= (u32)((u16*)place(mine.values[8 * block + lane() % 4 * 2 + i]))[lane() / 4] << 16 * i;
    }
    __syncwarp();
}

inline u32 transposed(u32 pair) {
    Warp& mine = warp();
    mine.values[lane()] = pair;
    __syncwarp();
    u32 found = 0;
    for (int i = 0; i < 2; ++i) {
        const u32 there = mine.values[4 * (lane() % 4 * 2 + i) + lane() / 8];
        found |= (there >> 16 * (lane() / 4 % 2) & 0xffff) << 16 * i;
    }
    __syncwarp();
    return found;
}

inline void put_block(u32 address, const u32 (&a)[4]) { std::memcpy(place(address), a, 16); }
inline void load_block(u32 (&a)[4], u32 address) { std::memcpy(a, place(address), 16); }

template <class T>
inline T taken(u32 address) {
    T x;
    std::memcpy(&x, place(address), sizeof x);
    return x;
}
inline float number_at(u32 address) { return taken<float>(address); }
inline float2 two_at(u32 address) { return taken<float2>(address); }
inline float4 four_at(u32 address) { return taken<float4>(address); }
template <class T>
inline void put(bool wanted, u32 address, T x) { if (wanted) std::memcpy(place(address), &x, sizeof x); }

// Copies are done when they are waited for, not before.
inline std::deque<std::vector<Copy>>& groups() { return program->copies[program->current]; }
inline void copy_word(bool wanted, u32 to, const void* from) {
    if (wanted) groups().back().push_back({to, from});
}

inline void end_group() { groups().emplace_back(); }

template <int NUMBER>
inline void wait_for_groups() {
    for (; groups().size() > NUMBER + 1; groups().pop_front())
        for (const Copy& copy : groups().front()) std::memcpy(place(copy.to), copy.from, 4);
}

inline void multiply_columns(float (&c)[4], const u32* a, int registers, const u32* b, int columns) {
    Warp& mine = warp();
    std::memcpy(mine.a[lane()], a, 4 * registers), std::memcpy(mine.b[lane()], b, columns / 2);
    __syncwarp();
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < columns; ++k) {
            const int row = lane() / 4, column = lane() % 4 * 2 + i % 2, holder = k % 8 / 2;
            const float left = half_of(mine.a[row * 4 + holder][k / 8 * 2 + i / 2], k % 2);
            c[i] += left * half_of(mine.b[column * 4 + holder][k / 8], k % 2);
        }
    __syncwarp();
}

inline void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    multiply_columns(c, a, 4, b, 16);
}

inline void multiply_half(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    const u32 a[2] = {a0, a1};
    multiply_columns(c, a, 2, &b0, 8);
}

inline u32 halves(float low, float high) {
    const half pair[2] = {(half)low, (half)high};
    u32 bits;
    std::memcpy(&bits, pair, 4);
    return bits;
}

inline float2 of_halves(u32 pair) { return {half_of(pair, 0), half_of(pair, 1)}; }

inline u32 bfloats(float low, float high) {
    auto rounded = [](float x) { const u32 bits = __float_as_uint(x); return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; };
    return rounded(low) | rounded(high) << 16;
}

inline float of_bfloat(u32 bits) { return __uint_as_float(bits << 16); }

inline void store(bool wanted, float* at, float value) { if (wanted) *at = value; }
inline void store(bool wanted, void* at, u32 a, u32 b) { if (wanted) ((u32*)at)[0] = a, ((u32*)at)[1] = b; }
inline void store(bool wanted, void* at, u32 a) { if (wanted) *(u32*)at = a; }
inline void store(bool wanted, u16* at, u16 a) { if (wanted) *at = a; }
inline void store(bool wanted, float4* at, float4 a) { if (wanted) *at = a; }
inline void settle(float&) {}
inline void settle(u32&) {}
template <class T> inline void keep(T*&) {}
inline u32 byte_at(const u8* at) { return *at; }
inline u32 is_set(u32 byte) { return byte != 0; }
inline float limited(float x) { return std::isfinite(x) ? min(max(x, -65504.0f), 65504.0f) : x; }
inline u32 largest_two(u32 a, u32 b) { return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16; }
inline float rough_tanh(float x) { return std::tanh(x); }
inline float exponential(float x) { return std::exp(x); }
inline float quotient(float x, float y) { return x / y; }

// body runs the kernel for one of its threads.
template <class Body>
void run_clusters(int clusters, Body body) {
    static thread_local Body* of_fibers;
    for (int cluster = 0; cluster < clusters; ++cluster) {
        std::vector<std::thread> threads;
        for (int number = 0; number < MEMBERS; ++number)
            threads.emplace_back([&, number] {
                Program mine;
                program = &mine;
                of_fibers = &body;
                mine.number = number, mine.block = cluster * MEMBERS + number;
                mine.random.seed(mine.block);
                for (int i = 0; i < FIBERS; ++i) {
                    mine.stacks.emplace_back(new char[1 << 17]);
                    ucontext_t& start = mine.fibers[i].start;
                    getcontext(&start);
                    start.uc_stack.ss_sp = mine.stacks[i].get();
                    start.uc_stack.ss_size = 1 << 17;
                    start.uc_link = nullptr;
                    makecontext(&start, +[] { (*of_fibers)(); program->done[program->current] = 1; others(); }, 0);
                }
                for (int left = FIBERS; left || !mine.under_way.empty();) {
                    for (int i = 0; i < FIBERS; ++i)
                        if (!mine.done[mine.current = i]) {
                            resume(mine.fibers[i]);
                            left -= mine.done[i];
                        }
                    std::shuffle(mine.under_way.begin(), mine.under_way.end(), mine.random);
                    for (size_t n = (mine.under_way.size() + 1) / 2; n > 0; --n) {
                        deliver(mine.under_way.back());
                        mine.under_way.pop_back();
                    }
                    if (MEMBERS > 1) std::this_thread::yield();  // the other CTAs' values are needed for progress
                }
            });
        for (std::thread& thread : threads) thread.join();
    }
}
