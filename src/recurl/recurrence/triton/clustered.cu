// The recurrence of an LSTM or GRU of 129 to 256 units: a cluster of four programs walks eight slots together.
//
// Compiled at run time, either FORWARD or not, with these numbers: HIDDEN, WIDTH (a multiple of 32), LSTM, KEEP or
// TO_STORED, BITS (of input gates and of the gates' gradients: 32 or 16, bfloat16), and types GRAD_H and GRAD_C (of
// incoming gradients: float, or u16 for bfloat16). The arguments are those of resident_forward_kernel and
// resident_backward_kernel, with their layouts, but for what goes by memory there.
//
// A program owns a quarter of the units, a warp eight of them, a thread one unit of two slots. Recurrent weights are in
// registers, as the left operands of products [16 x 16] by [16 x 8 slots].
//
// Operands are float16: it has tf32's bits of mantissa. Its range is no limit: weights are scaled by a power of two for
// each program, gradients of gates for each program and slot, and h is at most 1, but for stored states, which enter
// products cut at 65504.
//
// What programs tell each other goes straight into their shared memory (st.async), and the barrier of the page it goes
// to counts its bytes. Two pages in turn are enough: see the loops. Threads wait in the scope of their program, as
// CUTLASS does: a wait in that of the cluster would empty the first cache, and only shared memory is exchanged.

constexpr int MEMBERS = 4;
constexpr int SLOTS = 8;
constexpr int UNITS = WIDTH / MEMBERS;
constexpr int GATES = LSTM ? 4 : 3;
constexpr u32 ALL = 0xffffffff;

inline float sigmoid_of(float x) { return 0.5f * tanh_of(0.5f * x) + 0.5f; }

// What brings numbers of this biased exponent, or less, to 2^14 at least and below 2^15; and what takes it back.
inline float scale_up(u32 exponent) { return __uint_as_float((268 - max(exponent, 15u)) << 23); }
inline float scale_back(u32 exponent) { return __uint_as_float((max(exponent, 15u) - 14) << 23); }

// Inputs of a unit, as they are in memory until they are used.

#if BITS == 32
typedef float Number;
struct Raw { float a, b, c, d; };
#else
typedef u16 Number;
struct Raw { u32 a, b; };
#endif

// i, f, g, o, or r, z, n, of a row.
inline void read_inputs(Raw& raw, const Number* row, int unit) {
#if BITS == 32
    if (LSTM) {
        const float4 all = ((const float4*)row)[unit];
        raw = {all.x, all.y, all.z, all.w};
    } else {
        const float2 two = ((const float2*)(row + WIDTH))[unit];
        raw = {two.x, two.y, row[unit], 0.0f};
    }
#else
    if (LSTM) {
        const uint2 all = ((const uint2*)row)[unit];
        raw = {all.x, all.y};
    } else {
        raw = {((const u32*)(row + WIDTH))[unit], row[unit]};
    }
#endif
}

inline void unpack(float (&x)[4], const Raw& raw) {
#if BITS == 32
    x[0] = raw.a, x[1] = raw.b, x[2] = raw.c, x[3] = raw.d;
#else
    x[0] = of_bfloat(raw.a), x[1] = __uint_as_float(raw.a & 0xffff0000);
    x[2] = of_bfloat(raw.b), x[3] = __uint_as_float(raw.b & 0xffff0000);
#endif
}

inline float weight(const float* w_hh, int gate, int unit, int column) {
    return gate < GATES && unit < HIDDEN && column < HIDDEN ? w_hh[(gate * HIDDEN + unit) * HIDDEN + column] : 0.0f;
}

// The exponent of the largest finite weight of the program's units, in all threads.
inline u32 largest(const float* w_hh, int own) {
    __shared__ u32 found;
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    float most = 0.0f;
    const int numbers = max(min(UNITS, HIDDEN - own), 0) * HIDDEN;
    for (int gate = 0; gate < GATES; ++gate) {
        const float* weights = w_hh + (gate * HIDDEN + own) * HIDDEN;
#pragma unroll 32
        for (int i = threadIdx.x; i < numbers; i += WIDTH) {
            const float size = fabsf(weights[i]);
            most = size < __int_as_float(0x7f800000) ? fmaxf(most, size) : most;
        }
    }
    atomicMax(&found, __float_as_uint(most));
    __syncthreads();
    return found >> 23;
}

// The weights at(tile, block, register, which of two), scaled.
template <int BLOCKS, class At>
inline void hold(u32 (&held)[2][BLOCKS][4], float scale, At at) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int part = 0; part < 4; ++part)
                held[tile][block][part] = halves(at(tile, block, part, 0) * scale, at(tile, block, part, 1) * scale);
            if (block % 4 == 3) __syncwarp();  // no more of them at a time: registers are few
        }
}

struct Place {
    int lane, warp, row, pair;  // of the thread: its row and pair of columns in blocks of products
    u32 member;
    int unit;
    bool real;

    Place() {
        lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, pair = lane % 4;
        member = blockIdx.x % MEMBERS;
        unit = member * UNITS + warp * 8 + row;
        real = unit < HIDDEN;
    }
};

// Steps until the last of the program's slots is at its end. A slot whose end is near or past reads its last token
// instead of those there aren't, and an empty slot the first of all.
inline int longest(const i64* bounds, int lane) {
    bounds += blockIdx.x / MEMBERS * SLOTS + lane % SLOTS;
    int steps = max((int)(bounds[1] - bounds[0]), 0);
    for (int far = 4; far > 0; far /= 2) steps = max(steps, __shfl_xor_sync(ALL, steps, far));
    return steps;
}

// Barriers of two pages, each of which gets so many bytes.
inline u32 barriers(u64 (&full)[2], u32 bytes) {
    u32 address = shared_address(full);
    if (threadIdx.x == 0) {
        for (int page = 0; page < 2; ++page) make_barrier(address + 8 * page);
        for (int page = 0; page < 2; ++page) expect(address + 8 * page, bytes);
    }
    meet();
    return address;
}

#define KERNEL extern "C" __global__ void __cluster_dims__(MEMBERS, 1, 1) __launch_bounds__(WIDTH, 1)

#if FORWARD

// One of two turns, as a type: what a step keeps for the one after the next has a place of its own.
template <int NUMBER>
struct Turn {
    static constexpr int number = NUMBER;
};

struct Arguments {
    const Number* input_gates;
    const float *b_hn, *w_hh, *stored_h;
    i64 h_row, h_column;
    const float* stored_c;
    i64 c_row, c_column;
    const u8* starts;
    const i64* bounds;
    float *after_h, *after_c;
    uint2* gates;
};

// A warp writes h of step s + 1 to all programs when it has read all of h of step s, which came when every warp of
// every program had read h of step s - 1: that page is free. A program leaves when all of the last h has come, so that
// nothing is under way to it.
KERNEL clustered_forward_kernel(const __grid_constant__ Arguments a) {
    constexpr int BLOCKS = WIDTH / 16;
    constexpr u32 PAGE = WIDTH * SLOTS * 2;
    __shared__ __align__(128) u8 pages[2][PAGE];  // [WIDTH, SLOTS]
    __shared__ u64 full[2];
    const Place my;
    const float bias = LSTM || !my.real ? 0.0f : a.b_hn[my.unit];
    const u32 page0 = shared_address(pages), full0 = barriers(full, PAGE);
    // Each lane sends a row, that of its number modulo 8, to one program.
    const u32 to = address_in(page0 + (my.unit - my.row + my.lane % 8) * (SLOTS * 2), my.lane / 8);
    const u32 to_full = address_in(full0, my.lane / 8);
    const u32 rows = page0 + my.lane * (SLOTS * 2);
    int steps = longest(a.bounds, my.lane);
    steps += steps % 2;
    int length[2], last[2] = {};
    i64 begin[2] = {};
    const Number* input_gates[2];
    const u8* starts[2];
    float *after_h[2], *after_c[2], h[2] = {}, c[2] = {};
    uint2* gates[2];
    // By turns, each for two steps on when it has served: inputs, whether the token after this one is a first one, its
    // stored states, and the flag for the step after the next.
    Raw x[2][2];
    u32 first[2][2];
    float stored_h[2][2], stored_c[2][2];
    u32 flag[2][2];

    auto stored_states = [&](float& to_h, float& to_c, int e, int step) {
        const i64 token = begin[e] + min(step, last[e]);
        to_h = my.real ? a.stored_h[token * a.h_row + my.unit * a.h_column] : 0.0f;
        if (LSTM) to_c = my.real ? a.stored_c[token * a.c_row + my.unit * a.c_column] : 0.0f;
    };
    auto send_h = [&](int page) {
        const u32 pair = halves(limited(h[0]), limited(h[1]));
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = __shfl_sync(ALL, pair, 4 * (my.lane % 8) + i);
        send(to + page * PAGE, to_full + 8 * page, word[0], word[1], word[2], word[3]);
    };
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int slot = blockIdx.x / MEMBERS * SLOTS + 2 * my.pair + e;
        length[e] = (int)(a.bounds[slot + 1] - a.bounds[slot]);
        last[e] = max(length[e] - 1, 0);
        begin[e] = length[e] > 0 ? a.bounds[slot] : 0;
        input_gates[e] = a.input_gates + begin[e] * (GATES * WIDTH);
        starts[e] = a.starts + begin[e];
        after_h[e] = a.after_h + begin[e] * HIDDEN + my.unit;
        after_c[e] = a.after_c + begin[e] * HIDDEN + my.unit;
        gates[e] = a.gates + begin[e] * WIDTH + my.unit;
        stored_states(h[e], c[e], e, 0);
#pragma unroll
        for (int turn = 0; turn < 2; ++turn) {
            read_inputs(x[turn][e], input_gates[e] + min(turn, last[e]) * (GATES * WIDTH), my.unit);
            first[turn][e] = byte_at(starts[e] + min(turn + 1, last[e]));
            stored_states(stored_h[turn][e], stored_c[turn][e], e, turn + 1);
            flag[turn][e] = byte_at(starts[e] + min(turn + 3, last[e]));
        }
    }
    u32 held[2][BLOCKS][4];
    const u32 exponent = largest(a.w_hh, my.member * UNITS);
    const float back = scale_back(exponent);
    hold<BLOCKS>(held, scale_up(exponent), [&](int tile, int block, int part, int which) {
        return weight(a.w_hh, 2 * tile + part % 2, my.unit, 16 * block + 8 * (part / 2) + 2 * my.pair + which);
    });
    send_h(0);
    auto take = [&](auto turn, int step) {
        constexpr int page = decltype(turn)::number;
        wait(full0 + 8 * page, step / 2 % 2);
        if (threadIdx.x == 0) expect(full0 + 8 * page, PAGE);
        float sums[2][2][4] = {};
#pragma unroll
        for (int two = 0; two < BLOCKS / 2; ++two) {
            u32 b[4];
            load_operands(b, rows + page * PAGE + two * (32 * SLOTS * 2));
#pragma unroll
            for (int one = 0; one < 2; ++one)
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
                    multiply(sums[one][tile], held[tile][2 * two + one], b[2 * one], b[2 * one + 1]);
        }
        float kept[2][4], out_h[2], out_c[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float given[4], hidden[4];
            unpack(given, x[page][e]);
#pragma unroll
            for (int gate = 0; gate < 4; ++gate)
                hidden[gate] = sums[0][gate / 2][gate % 2 * 2 + e] + sums[1][gate / 2][gate % 2 * 2 + e];
            const float g0 = sigmoid_of(hidden[0] * back + given[0]), g1 = sigmoid_of(hidden[1] * back + given[1]);
            float g2, g3;
            if (LSTM) {
                g2 = tanh_of(hidden[2] * back + given[2]);
                g3 = sigmoid_of(hidden[3] * back + given[3]);
                c[e] = g1 * c[e] + g0 * g2;
                h[e] = g3 * tanh_of(c[e]);
            } else {
                g3 = hidden[2] * back + bias;
                g2 = tanh_of(given[2] + g0 * g3);
                g3 = fminf(fmaxf(g3, -65504.0f), 65504.0f);  // the one kept value that has no bound
                h[e] = g2 + g1 * (h[e] - g2);
            }
            kept[e][0] = g0, kept[e][1] = g1, kept[e][2] = g2, kept[e][3] = g3;
            out_h[e] = h[e], out_c[e] = c[e];
            h[e] = first[page][e] ? stored_h[page][e] : h[e];
            c[e] = first[page][e] ? stored_c[page][e] : c[e];
        }
        send_h(1 - page);
        // While that is under way.
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            read_inputs(x[page][e], input_gates[e] + (i64)min(step + 2, last[e]) * (GATES * WIDTH), my.unit);
            first[page][e] = flag[page][e];
            flag[page][e] = byte_at(starts[e] + min(step + 5, last[e]));
            if (first[page][e]) stored_states(stored_h[page][e], stored_c[page][e], e, step + 3);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (step < length[e]) {
                const i64 at = (i64)step * HIDDEN;
                if (my.real) {
                    after_h[e][at] = out_h[e];
                    if (LSTM) after_c[e][at] = out_c[e];
                }
                if (KEEP)
                    gates[e][(i64)step * WIDTH] =
                        make_uint2(halves(kept[e][0], kept[e][1]), halves(kept[e][2], kept[e][3]));
            }
        }
    };
#pragma unroll 1
    for (int step = 0; step < steps; step += 2) {
        take(Turn<0>(), step);
        take(Turn<1>(), step + 1);
    }
    wait(full0, steps / 2 % 2);
}

#else

struct Arguments {
    const GRAD_H* grad_h;
    i64 gh_row, gh_column;
    const GRAD_C* grad_c;
    i64 gc_row, gc_column;
    const uint2* gates;
    const float *w_hh, *stored;
    i64 stored_row, stored_column;
    const float *after_h, *after_c;
    const u8* starts;
    const i64* bounds;
    Number* grad_gates;
    float* grad_stored;
};

inline float of_grad(float x) { return x; }
inline float of_grad(u16 x) { return of_bfloat(x); }

// What a step reads.
struct Step {
    uint2 gates;
    GRAD_H dh;
    GRAD_C dc;
    float state, before;  // after the token, of an LSTM, and before it
};

// What the gradients of the gates are to those of h and c.
struct Factors {
    float c, d0, d1, d2, d3, pass;
};

inline Factors factors_of(const Step& read) {
    const float2 low = of_halves(read.gates.x), high = of_halves(read.gates.y);
    const float g0 = low.x, g1 = low.y, g2 = high.x, g3 = high.y;
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

// A program multiplies the gradients of its own gates by their weights to all units, and sends each program the parts
// of its units, which that one adds in the order of the programs.
//
// A step has two barriers of the program: when the largest gradients of all warps are known, and when the operands are
// written. Behind the first nobody reads the operands of the step before. A warp sends parts of step s + 2 over those of
// s behind the second of its program in step s + 2, so after parts of s + 1 had come from the receiver, whose warps send
// them behind barriers which none of them reaches before it has read the parts of s. Who leaves has got the last parts.
KERNEL clustered_backward_kernel(const __grid_constant__ Arguments a) {
    constexpr int WARPS = WIDTH / 32;
    constexpr u32 PAGE = MEMBERS * UNITS * SLOTS * 4;
    __shared__ __align__(128) u8 parts[2][PAGE];  // [MEMBERS, UNITS, SLOTS]
    __shared__ __align__(128) u32 operands[WARPS][4][32];  // [gates, 8 units, SLOTS] float16 for each warp
    __shared__ __align__(16) u32 exponents[SLOTS / 2][8];  // the largest of each warp, for two slots
    __shared__ u64 full[2];
    if ((a.gh_row | a.gc_row | a.stored_row) >> 32) stop();  // no tensor has rows that far apart
    const Place my;
    const u32 rows = shared_address(operands) + my.lane * 16, full0 = barriers(full, PAGE);
    // Of each two blocks of eight units, which are all of one program, a lane sends four slots of one.
    const bool odd = my.pair % 2;
    u32 to[2], to_full[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        const int eight = my.warp * 4 + 2 * tile + odd;
        const u32 at = ((my.member * UNITS + eight % WARPS * 8 + my.row) * SLOTS + my.pair / 2 * 4) * 4;
        to[tile] = address_in(shared_address(parts) + at, eight / WARPS);
        to_full[tile] = address_in(full0, eight / WARPS);
    }
    for (int i = threadIdx.x; i < SLOTS / 2 * 8; i += WIDTH) exponents[i / 8][i % 8] = 0;  // of warps there aren't
    const int steps = longest(a.bounds, my.lane);
    const int real_unit = min(my.unit, HIDDEN - 1);  // what the others read; their gradients are zero
    int length[2], last[2] = {};
    const u8* starts[2] = {};
    const uint2* gates[2] = {};
    const GRAD_H* grad_h[2] = {};
    const GRAD_C* grad_c[2] = {};
    const float *after[2] = {}, *stored[2] = {};
    Number* grad_gates[2];
    float* grad_stored[2];
    const u32 gh_row = a.gh_row, gc_row = a.gc_row, stored_row = a.stored_row;
    Step read[2];              // by the next step
    bool first[2], second[2];  // this token, and that of the next step
    u32 flag[2];               // of the step after that
    Factors factors[2];
    float total[2], carried[2];  // gradients of h and c; of a GRU's h, in carried, what doesn't come through products

    auto read_step = [&](int e, int step, bool is_first) {
        const int at = min(step, last[e]);
        const u64 tokens = at;
        const float* before = after[e] - (i64)min(step + 1, last[e]) * HIDDEN;
        read[e].gates = gates[e][-(i64)at * WIDTH];
        read[e].dh = *(grad_h[e] - tokens * gh_row);
        if (LSTM) read[e].dc = *(grad_c[e] - tokens * gc_row);
        if (LSTM) read[e].state = after[e][-(i64)at * HIDDEN];
        read[e].before = *(is_first ? stored[e] - tokens * stored_row : before);
    };
    auto flag_of = [&](int e, int step) -> u32 { return byte_at(starts[e] - min(step, last[e])); };
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int slot = blockIdx.x / MEMBERS * SLOTS + 2 * my.pair + e;
        length[e] = (int)(a.bounds[slot + 1] - a.bounds[slot]);
        last[e] = max(length[e] - 1, 0);
        const i64 token = length[e] > 0 ? a.bounds[slot + 1] - 1 : 0;
        starts[e] = a.starts + token;
        gates[e] = a.gates + token * WIDTH + my.unit;
        grad_h[e] = a.grad_h + token * a.gh_row + real_unit * a.gh_column;
        grad_c[e] = a.grad_c + token * a.gc_row + real_unit * a.gc_column;
        after[e] = (LSTM ? a.after_c : a.after_h) + token * HIDDEN + real_unit;
        stored[e] = a.stored + token * a.stored_row + real_unit * a.stored_column;
        grad_gates[e] = a.grad_gates + token * (4 * WIDTH);
        grad_stored[e] = a.grad_stored + token * HIDDEN + my.unit;
        keep(starts[e]), keep(gates[e]), keep(grad_h[e]), keep(after[e]), keep(stored[e]), keep(grad_gates[e]);
        if (LSTM) keep(grad_c[e]);
        if (TO_STORED) keep(grad_stored[e]);
        first[e] = flag_of(e, 0);
        second[e] = flag_of(e, 1);
        flag[e] = flag_of(e, 2);
        read_step(e, 0, first[e]);
        factors[e] = factors_of(read[e]);
        total[e] = my.real ? of_grad(read[e].dh) : 0.0f;
        carried[e] = LSTM && my.real ? of_grad(read[e].dc) : 0.0f;
        read_step(e, 1, second[e]);
    }
    const int own = my.member * UNITS;
    u32 held[2][2 * WARPS][4];
    const u32 exponent = largest(a.w_hh, own);
    const float back = scale_back(exponent);
    hold<2 * WARPS>(held, scale_up(exponent), [&](int tile, int block, int part, int which) {
        const int to = (my.warp * 4 + 2 * tile + part % 2) * 8 + my.row, gate = 2 * (block % 2) + part / 2;
        return weight(a.w_hh, gate, own + block / 2 * 8 + 2 * my.pair + which, to);
    });
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const int page = step % 2;
        float d[2][4], dh[2], dc[2] = {};
        bool linked[2];
        u32 most[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const Factors& f = factors[e];
            const float all = LSTM ? carried[e] + total[e] * f.c : total[e];
            d[e][0] = all * f.d0, d[e][1] = all * f.d1, d[e][2] = all * f.d2, d[e][3] = total[e] * f.d3;
            carried[e] = all * f.pass;
            most[e] = __float_as_uint(fmaxf(fmaxf(fabsf(d[e][0]), fabsf(d[e][1])),
                                            LSTM ? fmaxf(fabsf(d[e][2]), fabsf(d[e][3])) : fabsf(d[e][2])));
        }
        // The largest of the warp's eight units, for two slots at once by the upper halves of their bits.
        u32 both = __byte_perm(most[0], most[1], 0x7632);
#pragma unroll
        for (int far = 4; far < 32; far *= 2) {
            const u32 other = __shfl_xor_sync(ALL, both, far);
            both = largest_two(both, other);
        }
        if (my.row == 0) exponents[my.pair][my.warp] = both;
        __syncthreads();
        const uint4 low = *(const uint4*)exponents[my.pair], high = *(const uint4*)(exponents[my.pair] + 4);
        both = largest_two(largest_two(largest_two(low.x, low.y), largest_two(low.z, low.w)),
                           largest_two(largest_two(high.x, high.y), largest_two(high.z, high.w)));
        const u32 each[2] = {both >> 7 & 255, both >> 23};
        const float up[2] = {scale_up(each[0]), scale_up(each[1])};
        const float down[2] = {scale_back(each[0]) * back, scale_back(each[1]) * back};
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate)
            operands[my.warp][gate][my.lane] = halves(d[0][gate] * up[0], d[1][gate] * up[1]);
        __syncthreads();
        float sums[2][2][4] = {};
#pragma unroll
        for (int from = 0; from < WARPS; ++from) {
            u32 b[4];
            load_operands(b, rows + from * 512);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                multiply(sums[0][tile], held[tile][2 * from], b[0], b[1]);
                if (LSTM) multiply(sums[1][tile], held[tile][2 * from + 1], b[2], b[3]);
                else multiply_half(sums[1][tile], held[tile][2 * from + 1][0], held[tile][2 * from + 1][1], b[2]);
            }
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            u32 word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                word[i] = __float_as_uint((sums[0][tile][i] + sums[1][tile][i]) * down[i % 2]);
            const u32 low = __shfl_xor_sync(ALL, odd ? word[0] : word[2], 1);
            const u32 high = __shfl_xor_sync(ALL, odd ? word[1] : word[3], 1);
            send(to[tile] + page * PAGE, to_full[tile] + 8 * page, odd ? low : word[0], odd ? high : word[1],
                 odd ? word[2] : low, odd ? word[3] : high);
        }
        // While that is under way; what was fetched is used before more is, since the hardware waits for both together.
        __syncwarp();
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const bool active = step < length[e];
            factors[e] = factors_of(read[e]);
            dh[e] = my.real ? of_grad(read[e].dh) : 0.0f;
            if (LSTM) dc[e] = my.real ? of_grad(read[e].dc) : 0.0f;
            Factors& f = factors[e];
            settle(f.c), settle(f.d0), settle(f.d1), settle(f.d2), settle(f.d3), settle(f.pass);
            settle(dh[e]), settle(dc[e]);
            store_gradients(active, grad_gates[e] - (i64)step * (4 * WIDTH), my.unit, d[e]);
            if (TO_STORED) store(active && first[e] && my.real, grad_stored[e] - (i64)step * HIDDEN, carried[e]);
            linked[e] = active && !first[e];  // a segment's first token passes nothing on to the token before it
            first[e] = second[e], second[e] = is_set(flag[e]);
        }
        if (step + 2 < steps) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                read_step(e, step + 2, second[e]);
                flag[e] = flag_of(e, step + 3);
            }
        }
        wait(full0 + 8 * page, step / 2 % 2);
        if (threadIdx.x == 0) expect(full0 + 8 * page, PAGE);
        float2 from[MEMBERS];
#pragma unroll
        for (int i = 0; i < MEMBERS; ++i)
            from[i] = *(const float2*)(parts[page] + (((i * UNITS + my.warp * 8 + my.row) * SLOTS + 2 * my.pair) * 4));
        const float sum[2] = {(from[0].x + from[1].x) + (from[2].x + from[3].x),
                              (from[0].y + from[1].y) + (from[2].y + from[3].y)};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float through = linked[e] ? carried[e] : 0.0f;
            total[e] = dh[e] + (linked[e] ? sum[e] : 0.0f) + (LSTM ? 0.0f : through);
            carried[e] = LSTM ? dc[e] + through : 0.0f;
        }
    }
}

#endif
