// Gate functions and memory layouts of gates, included before both kinds of kernels.
//
// Macros LSTM, EXACT and BITS are defined at compile time, and so are HIDDEN and WIDTH, the units of the layer and the
// padded number of units.

constexpr u32 ALL = 0xffffffff;
constexpr int GATES = LSTM ? 4 : 3;

inline float sigmoid_of(float x) {
    return EXACT ? quotient(1.0f, 1.0f + exponential(-x)) : 0.5f * rough_tanh(0.5f * x) + 0.5f;
}

// tanh of x, given the quotient for tanh of |x|, which cancels for small x.
inline float tanh_from(float x, float far) {
    const float square = x * x, third = 2.0f / 15 + square * (-17.0f / 315 + square * (62.0f / 2835));
    return square < 0.0625f ? x + x * square * (-1.0f / 3 + square * third) : copysignf(far, x);
}

inline float tanh_of(float x) {
    if (!EXACT) return rough_tanh(x);
    const float decay = exponential(-2.0f * fabsf(x));
    return tanh_from(x, quotient(1.0f - decay, 1.0f + decay));
}

#if BITS == 32
typedef float Number;
#else
typedef u16 Number;
#endif

// Gates as they are kept for the backward pass.
#if EXACT
typedef float4 Kept;
inline void store_kept(bool wanted, Kept* at, const float (&g)[4]) {
    store(wanted, at, make_float4(g[0], g[1], g[2], g[3]));
}
inline void take_kept(float (&g)[4], const Kept& kept) { g[0] = kept.x, g[1] = kept.y, g[2] = kept.z, g[3] = kept.w; }
#else
typedef uint2 Kept;
inline void store_kept(bool wanted, Kept* at, const float (&g)[4]) {
    store(wanted, at, halves(g[0], g[1]), halves(g[2], g[3]));
}
inline void take_kept(float (&g)[4], const Kept& kept) {
    const float2 low = of_halves(kept.x), high = of_halves(kept.y);
    g[0] = low.x, g[1] = low.y, g[2] = high.x, g[3] = high.y;
}
#endif

inline float weight(const float* w_hh, int gate, int unit, int column) {
    return gate < GATES && unit < HIDDEN && column < HIDDEN ? w_hh[(gate * HIDDEN + unit) * HIDDEN + column] : 0.0f;
}

// Advance a pointer by times * bytes.
template <class T>
inline T* moved(T* at, int times, int bytes) {
    return (T*)((char*)at + (i64)times * bytes);
}

#if FORWARD

struct Arguments {
    const Number* input_gates;
    const float *b_hn, *w_hh, *stored_h;
    i64 h_row, h_column;
    const float* stored_c;
    i64 c_row, c_column;
    const u8* starts;
    const i64* bounds;
    float *after_h, *after_c;
    Kept* gates;
};

#else

struct Arguments {
    const float* grad_h;
    i64 gh_row, gh_column;
    const float* grad_c;
    i64 gc_row, gc_column;
    const Kept* gates;
    const float *w_hh, *stored;
    i64 stored_row, stored_column;
    const float *after_h, *after_c;
    const u8* starts;
    const i64* bounds;
    Number* grad_gates;
    float* grad_stored;
};

// Inputs of a step.
struct Step {
    Kept gates;
    float dh, dc, state, before;  // state: c after the token (LSTM); before: the state before it
};

// Factors between the gradients of the gates and those of h and c.
struct Factors {
    float c, d0, d1, d2, d3, pass;
};

inline Factors factors_of(const Step& read) {
    float g[4];
    take_kept(g, read.gates);
    const float g0 = g[0], g1 = g[1], g2 = g[2], g3 = g[3];
    Factors f;
    if (LSTM) {
        const float tanh_c = tanh_of(read.state);
        f.c = g3 * (1.0f - tanh_c * tanh_c);
        f.d0 = g2 * g0 * (1.0f - g0);
        f.d1 = read.before * g1 * (1.0f - g1);
        f.d2 = g0 * (1.0f - g2 * g2);
        f.d3 = tanh_c * g3 * (1.0f - g3);
    } else {
        f.d3 = (1.0f - g1) * (1.0f - g2 * g2);
        f.d0 = f.d3 * g3 * g0 * (1.0f - g0);
        f.d1 = (read.before - g2) * g1 * (1.0f - g1);
        f.d2 = f.d3 * g0;
        f.c = 0.0f;
    }
    f.pass = g1;
    return f;
}

inline void store_gradients(bool wanted, Number* row, int unit, const float (&d)[4]) {
#if BITS == 32
    if (LSTM) {
        store(wanted, (float4*)row + unit, make_float4(d[0], d[1], d[2], d[3]));
    } else {
        store(wanted, (float2*)(row + WIDTH) + unit, __float_as_uint(d[0]), __float_as_uint(d[1]));
        store(wanted, row + unit, d[3]);
        store(wanted, row + 3 * WIDTH + unit, d[2]);
    }
#else
    if (LSTM) {
        store(wanted, (uint2*)row + unit, bfloats(d[0], d[1]), bfloats(d[2], d[3]));
    } else {
        const u32 others = bfloats(d[3], d[2]);
        store(wanted, (u32*)(row + WIDTH) + unit, bfloats(d[0], d[1]));
        store(wanted, row + unit, (u16)others);
        store(wanted, row + 3 * WIDTH + unit, (u16)(others >> 16));
    }
#endif
}

#endif
