// Wrappers of single sm_90 instructions, included before every kernel here.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

inline u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Dynamic shared memory, whose size is set at the launch.
inline u8* dynamic_shared() {
    extern __shared__ __align__(128) u8 found[];
    return found;
}

inline u32 address_in(u32 address, u32 member) {
    u32 found;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(found) : "r"(address), "r"(member));
    return found;
}

inline void send(u32 to, u32 barrier, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];"
                 ::"r"(to), "r"(barrier), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// A barrier for one arrival and the expected bytes.
inline void make_barrier(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
}

inline void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

inline void wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile("{ .reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    }
}

inline void meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

inline void stop() { asm volatile("trap;"); }

// Load four blocks of 8 x 8 float16 from shared memory as right operands; each lane gives the address of a row.
inline void load_operands(u32 (&b)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}

// Store the registers of a left operand, those of a lane next to each other.
inline void put_block(u32 address, const u32 (&a)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}

inline void load_block(u32 (&a)[4], u32 address) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address));
}

// Transpose 8 x 8 16-bit numbers, of which each lane holds two adjacent ones of a row.
inline u32 transposed(u32 pair) {
    u32 found;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(pair));
    return found;
}

inline void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

inline void multiply_half(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
}

inline u32 halves(float low, float high) {
    u32 found;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(found) : "f"(low), "f"(high));
    return found;
}

inline float2 of_halves(u32 pair) {
    float2 found;
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(found.x), "=f"(found.y) : "r"(pair));
    return found;
}

inline u32 bfloats(float low, float high) {
    u32 found;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(found) : "f"(low), "f"(high));
    return found;
}

inline float of_bfloat(u32 bits) { return __uint_as_float(bits << 16); }

// Predicated stores, without a branch.
inline void store(bool wanted, float* at, float value) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.f32 [%1], %2; }"
                 ::"r"((int)wanted), "l"(at), "f"(value));
}

inline void store(bool wanted, void* at, u32 a, u32 b) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.v2.b32 [%1], {%2, %3}; }"
                 ::"r"((int)wanted), "l"(at), "r"(a), "r"(b));
}

inline void store(bool wanted, void* at, u32 a) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.b32 [%1], %2; }"
                 ::"r"((int)wanted), "l"(at), "r"(a));
}

inline void store(bool wanted, u16* at, u16 a) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.b16 [%1], %2; }"
                 ::"r"((int)wanted), "l"(at), "h"(a));
}

inline void store(bool wanted, float4* at, float4 a) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.v4.f32 [%1], {%2, %3, %4, %5}; }"
                 ::"r"((int)wanted), "l"(at), "f"(a.x), "f"(a.y), "f"(a.z), "f"(a.w));
}

// Force x to be computed here, so that its inputs no longer occupy registers.
inline void settle(float& x) { asm volatile("" : "+f"(x)); }
inline void settle(u32& x) { asm volatile("" : "+r"(x)); }

// Keep an address in a register instead of computing it again in each step.
template <class T>
inline void keep(T*& at) {
    u64 address = __cvta_generic_to_global(at);
    asm volatile("" : "+l"(address));
    at = (T*)__cvta_global_to_generic(address);
}

inline u32 byte_at(const u8* at) {  // not as a byte, which the compiler would pack early, waiting for the load
    u32 found;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(found) : "l"(at));
    return found;
}

inline u32 is_set(u32 byte) {  // forced to be computed here, likewise
    u32 set;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; selp.u32 %0, 1, 0, p; }" : "=r"(set) : "r"(byte));
    return set;
}

// Clamp to the range of float16; infinity and NaN are unchanged.
inline float limited(float x) {
    float found;
    asm("{ .reg .f32 a; .reg .pred p; testp.infinite.f32 p, %1; min.NaN.f32 a, %1, 0f477FE000;\n"
        "max.NaN.f32 a, a, 0fC77FE000; selp.f32 %0, %1, a, p; }" : "=f"(found) : "f"(x));
    return found;
}

inline u32 largest_two(u32 a, u32 b) {  // of two 16-bit numbers each
    u32 found;
    asm("max.u16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
    return found;
}

inline float rough_tanh(float x) {  // with a relative error of 2^-11
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

inline float exponential(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}

inline float quotient(float x, float y) {
    float found;
    asm("div.full.f32 %0, %1, %2;" : "=f"(found) : "f"(x), "f"(y));
    return found;
}

// Access to shared memory by address, which then needn't be computed again in each step.
inline float number_at(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
    return x;
}

inline float2 two_at(u32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}

inline float4 four_at(u32 address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address));
    return x;
}

inline void put(bool wanted, u32 address, float x) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.shared.f32 [%1], %2; }"
                 ::"r"((int)wanted), "r"(address), "f"(x) : "memory");
}

inline void put(bool wanted, u32 address, float4 x) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.shared.v4.f32 [%1], {%2, %3, %4, %5}; }"
                 ::"r"((int)wanted), "r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

// Asynchronous copy of a word from global to shared memory; end_group closes the group of a thread's copies.
inline void copy_word(bool wanted, u32 to, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p cp.async.ca.shared.global [%1], [%2], 4; }"
                 ::"r"((int)wanted), "r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}

inline void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int NUMBER>
inline void wait_for_groups() {  // for all but the last NUMBER groups
    asm volatile("cp.async.wait_group %0;" ::"n"(NUMBER) : "memory");
}
