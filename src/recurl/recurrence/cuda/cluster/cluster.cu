// Recurrence of an LSTM or GRU with 65 to 512 hidden units: a cluster of CTAs processes eight slots together.
//
// The results are those of definition.py.
//
// Compiled at run time, with or without FORWARD, and with these macros: HIDDEN, WIDTH, MEMBERS (CTAs of a cluster:
// WIDTH is a multiple of 32 and of eight times their number), HELD (blocks of weights in registers), LSTM, EXACT, KEEP
// or TO_STORED, BITS (of input gates and of the gates' gradients: 32, or 16 for bfloat16). The arguments are those of
// resident_forward_kernel and resident_backward_kernel, with their layouts, without the exchange buffers in memory.
//
// A CTA owns its share of the hidden units, a warp eight of them, a thread one unit of two slots. Recurrent weights are
// the left operands of products [16 x 16] by [16 x 8 slots]. They are in registers as far as these suffice, else in
// shared memory, where each thread reads what it wrote itself.
//
// Operands are float16, which has the mantissa bits of tf32. Its range is no limit: weights are scaled by a power of
// two per CTA, gradients of gates per CTA and slot, and h is at most 1, except stored states, which are clamped to
// 65504 in products. With EXACT, an operand is two float16 numbers: its first eleven bits, and 2^11 times the rest. All
// their products are summed, except that of the two rests.
//
// CTAs send values to each other directly into shared memory (st.async), and the barrier of the receiving page counts
// the bytes. Two alternating pages are enough: see the loops. Threads wait with CTA scope, as in CUTLASS: a wait with
// cluster scope would invalidate the L1 cache, and only shared memory is exchanged.

constexpr int SLOTS = 8;
constexpr int UNITS = WIDTH / MEMBERS;
constexpr int WARPS = UNITS / 8;
constexpr int THREADS = 32 * WARPS;
constexpr int PARTS = EXACT ? 2 : 1;  // float16 numbers of an operand
constexpr float REST = 2048.0f;  // scale of the second part

// Scale that brings numbers with this biased exponent, or less, to the range from 2^14 to below 2^15; and its inverse.
inline float scale_up(u32 exponent) { return __uint_as_float((268 - max(exponent, 15u)) << 23); }
inline float scale_back(u32 exponent) { return __uint_as_float((max(exponent, 15u) - 14) << 23); }

// Two operands packed in words: their first parts, and their second parts.
inline void parts_of(u32 (&words)[PARTS], float low, float high) {
    words[0] = halves(low, high);
    if (EXACT) {
        const float2 first = of_halves(words[0]);
        const float a = (low - first.x) * REST, b = (high - first.y) * REST;
        words[PARTS - 1] = halves(a == a ? a : 0.0f, b == b ? b : 0.0f);  // infinity has no rest
    }
}

// Inputs of a unit, in their memory format until they are used.

#if BITS == 32
struct Raw { float a, b, c, d; };
#else
struct Raw { u32 a, b; };
#endif

// Read i, f, g, o, or r, z, n, of a row.
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

// The exponent of the largest finite weight of the CTA's units, in all threads.
inline u32 largest(const float* w_hh, int own) {
    __shared__ u32 found;
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    float most = 0.0f;
    const int numbers = max(min(UNITS, HIDDEN - own), 0) * HIDDEN;
    for (int gate = 0; gate < GATES; ++gate) {
        const float* weights = w_hh + (gate * HIDDEN + own) * HIDDEN;
#pragma unroll 32
        for (int i = threadIdx.x; i < numbers; i += THREADS) {
            const float size = fabsf(weights[i]);
            most = size < __int_as_float(0x7f800000) ? fmaxf(most, size) : most;
        }
    }
    atomicMax(&found, __float_as_uint(most));
    __syncthreads();
    return found >> 23;
}

// The weights of a warp's TILES x BLOCKS products, four registers per thread each, all first parts before the second
// ones: HELD blocks of them in registers, the others in shared memory.
template <int TILES, int BLOCKS>
struct Weights {
    static constexpr int NUMBER = PARTS * BLOCKS * TILES, HERE = NUMBER < HELD ? NUMBER : HELD;
    u32 held[HERE][4], rest;

    // Weights are at(tile, block, register, which of two) * scale; shared memory starts at address.
    template <class At>
    Weights(u32 address, float scale, At at) {
        auto block_of = [&](u32 (&block)[4], int number) {
            const int place = number % (BLOCKS * TILES);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int tile = place % TILES;
                u32 words[PARTS];
                parts_of(words, at(tile, place / TILES, i, 0) * scale, at(tile, place / TILES, i, 1) * scale);
                block[i] = words[number / (BLOCKS * TILES)];
            }
        };
#pragma unroll
        for (int number = 0; number < HERE; ++number) {
            block_of(held[number], number);
            if (number % 8 == 7) __syncwarp();  // limits the blocks in progress: registers are scarce
        }
        rest = address + (NUMBER - HERE) * (threadIdx.x / 32) * 512 + threadIdx.x % 32 * 16;
#pragma unroll 1
        for (int number = HERE; number < NUMBER; ++number) {
            u32 block[4];
            block_of(block, number);
            put_block(rest + (number - HERE) * 512, block);
        }
    }

    // Get one block; the numbers are compile-time constants.
    void take(u32 (&block)[4], int part, int tile, int place) const {
        const int number = (part * BLOCKS + place) * TILES + tile;
        if (number >= HERE) return load_block(block, rest + (number - HERE) * 512);
#pragma unroll
        for (int i = 0; i < 4; ++i) block[i] = held[number][i];
    }
};

struct Place {
    int lane, warp, row, pair;  // row and pair: the thread's row and pair of columns in blocks of products
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

// Steps until the last of the CTA's slots ends. Slots that have ended, or are about to, read their last token again
// instead of tokens past it; an empty slot reads the first token of the batch.
inline int longest(const i64* bounds, int lane) {
    bounds += blockIdx.x / MEMBERS * SLOTS + lane % SLOTS;
    int steps = max((int)(bounds[1] - bounds[0]), 0);
    for (int far = 4; far > 0; far /= 2) steps = max(steps, __shfl_xor_sync(ALL, steps, far));
    return steps;
}

// Barriers of two pages, each of which receives this number of bytes.
inline u32 barriers(u64 (&full)[2], u32 bytes) {
    u32 address = shared_address(full);
    if (threadIdx.x == 0) {
        for (int page = 0; page < 2; ++page) make_barrier(address + 8 * page);
        for (int page = 0; page < 2; ++page) expect(address + 8 * page, bytes);
    }
    meet();
    return address;
}

// Sums of products by tile: of first parts and, with EXACT, of a first and a second part. They have as many chains as
// give the hardware four independent products at a time.
template <int TILES>
struct Sums {
    static constexpr int CHAINS = TILES < 4 ? 4 / TILES : 1;
    float of[PARTS][CHAINS][TILES][4] = {};

    template <int BLOCKS>
    void add(const Weights<TILES, BLOCKS>& weights, int tile, int place, const u32 (&b)[PARTS][4], int half,
             bool narrow) {
        u32 a[PARTS][4];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) weights.take(a[part], part, tile, place);
        auto multiply_into = [&](float (&sum)[4], const u32 (&left)[4], const u32 (&right)[4]) {
            if (narrow) multiply_half(sum, left[0], left[1], right[2 * half]);
            else multiply(sum, left, right[2 * half], right[2 * half + 1]);
        };
        multiply_into(of[0][place % CHAINS][tile], a[0], b[0]);
        if (EXACT) {
            multiply_into(of[PARTS - 1][2 * place % CHAINS][tile], a[0], b[PARTS - 1]);
            multiply_into(of[PARTS - 1][(2 * place + 1) % CHAINS][tile], a[PARTS - 1], b[0]);
        }
    }

    float operator()(int tile, int i) const {
        auto all = [&](int part) {
            auto two = [&](int chain) { return of[part][chain][tile][i] + of[part][(chain + 1) % CHAINS][tile][i]; };
            return CHAINS == 4 ? two(0) + two(2 % CHAINS) : CHAINS == 2 ? two(0) : of[part][0][tile][i];
        };
        return EXACT ? all(0) + all(PARTS - 1) * (1.0f / REST) : all(0);
    }
};

#define KERNEL extern "C" __global__ void __cluster_dims__(MEMBERS, 1, 1) __launch_bounds__(THREADS, 1)

#if FORWARD

// One of two alternating turns, as a type: values that a step keeps for the one after the next have their own
// registers.
template <int NUMBER>
struct Turn {
    static constexpr int number = NUMBER;
};

// A warp sends h of step s + 1 to all CTAs after it has read all of h of step s. That arrived after every warp of every
// CTA had read h of step s - 1, so its page is free. A CTA exits after all of the last h has arrived, so that nothing
// is in flight to it.
KERNEL cluster_forward_kernel(const __grid_constant__ Arguments a) {
    constexpr int BLOCKS = WIDTH / 16;
    constexpr u32 PART = WIDTH * SLOTS * 2, PAGE = PARTS * PART;
    __shared__ __align__(128) u8 pages[2][PAGE];  // [PARTS, WIDTH, SLOTS] float16
    __shared__ u64 full[2];
    const Place my;
    const float bias = LSTM || !my.real ? 0.0f : a.b_hn[my.unit];
    const u32 page0 = shared_address(pages), full0 = barriers(full, PAGE);
    // A warp has eight rows of each part for each CTA. A lane sends the row of its index modulo 8, to one or more CTAs.
    constexpr int ROWS = 8 * MEMBERS * PARTS, SENDS = (ROWS + 31) / 32;
    u32 to[SENDS], to_full[SENDS];
#pragma unroll
    for (int i = 0; i < SENDS; ++i) {
        const int row = my.lane + 32 * i, member = row / 8 % MEMBERS, part = row / (8 * MEMBERS) % PARTS;
        to[i] = address_in(page0 + part * PART + (my.unit - my.row + my.lane % 8) * (SLOTS * 2), member);
        to_full[i] = address_in(full0, member);
    }
    const u32 rows = page0 + my.lane * (SLOTS * 2);
    int steps = longest(a.bounds, my.lane);
    steps += steps % 2;
    int length[2], last[2] = {};
    i64 begin[2] = {};
    const Number* input_gates[2];
    const u8* starts[2];
    float *after_h[2], *after_c[2], h[2] = {}, c[2] = {};
    Kept* gates[2];
    // By turn, each replaced after use by the value for two steps later: inputs, whether the next token starts a
    // segment, its stored states, and the flag for the step after the next.
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
        u32 pair[PARTS], word[PARTS][4];
        parts_of(pair, limited(h[0]), limited(h[1]));
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 4; ++i) word[part][i] = __shfl_sync(ALL, pair[part], 4 * (my.lane % 8) + i);
#pragma unroll
        for (int i = 0; i < SENDS; ++i) {
            const int row = my.lane + 32 * i;
            const bool second = row / (8 * MEMBERS) % 2;
            u32 sent[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) sent[k] = second ? word[PARTS - 1][k] : word[0][k];
            if (row < ROWS) send(to[i] + page * PAGE, to_full[i] + 8 * page, sent[0], sent[1], sent[2], sent[3]);
        }
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
    const u32 exponent = largest(a.w_hh, my.member * UNITS);
    const float back = scale_back(exponent);
    auto weight_at = [&](int tile, int block, int i, int which) {
        return weight(a.w_hh, 2 * tile + i % 2, my.unit, 16 * block + 8 * (i / 2) + 2 * my.pair + which);
    };
    const Weights<2, BLOCKS> weights(shared_address(dynamic_shared()), scale_up(exponent), weight_at);
    send_h(0);
    auto take = [&](auto turn, int step) {
        constexpr int page = decltype(turn)::number;
        wait(full0 + 8 * page, step / 2 % 2);
        if (threadIdx.x == 0) expect(full0 + 8 * page, PAGE);
        Sums<2> sums;
#pragma unroll
        for (int two = 0; two < BLOCKS / 2; ++two) {
            u32 b[PARTS][4];
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                load_operands(b[part], rows + page * PAGE + part * PART + two * (32 * SLOTS * 2));
#pragma unroll
            for (int one = 0; one < 2; ++one)
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) sums.add(weights, tile, 2 * two + one, b, one, false);
        }
        float kept[2][4], out_h[2], out_c[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float given[4], hidden[4];
            unpack(given, x[page][e]);
#pragma unroll
            for (int gate = 0; gate < 4; ++gate) hidden[gate] = sums(gate / 2, gate % 2 * 2 + e);
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
                if (!EXACT) g3 = fminf(fmaxf(g3, -65504.0f), 65504.0f);  // the only kept value without a bound
                h[e] = g2 + g1 * (h[e] - g2);
            }
            kept[e][0] = g0, kept[e][1] = g1, kept[e][2] = g2, kept[e][3] = g3;
            out_h[e] = h[e], out_c[e] = c[e];
            h[e] = first[page][e] ? stored_h[page][e] : h[e];
            c[e] = first[page][e] ? stored_c[page][e] : c[e];
        }
        send_h(1 - page);
        // While that is in flight.
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            constexpr int ROW = GATES * WIDTH * (int)sizeof(Number);
            read_inputs(x[page][e], moved(input_gates[e], min(step + 2, last[e]), ROW), my.unit);
            first[page][e] = flag[page][e];
            flag[page][e] = byte_at(moved(starts[e], min(step + 5, last[e]), 1));
            if (first[page][e]) stored_states(stored_h[page][e], stored_c[page][e], e, step + 3);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const bool there = step < length[e];
            store(there && my.real, moved(after_h[e], step, HIDDEN * 4), out_h[e]);
            if (LSTM) store(there && my.real, moved(after_c[e], step, HIDDEN * 4), out_c[e]);
            if (KEEP) store_kept(there, moved(gates[e], step, WIDTH * (int)sizeof(Kept)), kept[e]);
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

// The same value, but not before a zero is known.
inline float behind(float x, u32 zero) { return __uint_as_float(__float_as_uint(x) | zero); }
inline uint2 behind(uint2 x, u32 zero) { return make_uint2(x.x | zero, x.y | zero); }
inline float4 behind(float4 x, u32 zero) {
    return make_float4(behind(x.x, zero), behind(x.y, zero), behind(x.z, zero), behind(x.w, zero));
}
inline Step behind(const Step& read, u32 zero) {
    return {behind(read.gates, zero), read.dh, read.dc, behind(read.state, zero), behind(read.before, zero)};
}

// A CTA multiplies the gradients of its own gates by their weights to all units, and sends each CTA the partial sums of
// its units. The receiver adds them in the order of the CTAs.
//
// A step has two CTA barriers: after the largest gradients of all warps are known, and after the operands are written.
// After the first one, no thread reads the operands of the previous step. A warp sends the parts of step s + 2 over
// those of s after the second barrier of its CTA in step s + 2, hence after parts of s + 1 had come from the receiver.
// The warps of the receiver send those after barriers that none of them reaches before it has read the parts of s. A
// CTA exits after it has received the last parts.
KERNEL cluster_backward_kernel(const __grid_constant__ Arguments a) {
    constexpr int TILES = MEMBERS / 2, BLOCKS = 2 * WARPS;
    constexpr u32 PAGE = MEMBERS * UNITS * SLOTS * 4;
    __shared__ __align__(128) u8 parts[2][PAGE];  // [MEMBERS, UNITS, SLOTS]
    __shared__ __align__(128) u32 operands[WARPS][PARTS][4][32];  // [gates, 8 units, SLOTS] float16
    __shared__ __align__(16) u16 exponents[SLOTS][8];  // the largest exponent of each warp
    __shared__ u64 full[2];
    if ((a.gh_row | a.gc_row | a.stored_row) >> 29) stop();  // no tensor has a row stride that large
    const Place my;
    const u32 rows = shared_address(operands) + my.lane * 16, full0 = barriers(full, PAGE);
    const u32 zero = (u32)(a.gh_row >> 40);  // the compiler doesn't know that it is zero
    // Of every two blocks of eight units, each of a single CTA, a lane sends four slots of one.
    const bool odd = my.pair % 2;
    u32 to[TILES], to_full[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int eight = my.warp * MEMBERS + 2 * tile + odd;
        const u32 at = ((my.member * UNITS + eight % WARPS * 8 + my.row) * SLOTS + my.pair / 2 * 4) * 4;
        to[tile] = address_in(shared_address(parts) + at, eight / WARPS);
        to_full[tile] = address_in(full0, eight / WARPS);
    }
    for (int i = threadIdx.x; i < SLOTS * 8; i += THREADS) exponents[i / 8][i % 8] = 0;  // for warps that don't exist
    const int steps = longest(a.bounds, my.lane);
    const int real_unit = min(my.unit, HIDDEN - 1);  // padding units read these; their gradients are zero
    int length[2], last[2] = {};
    const u8* starts[2] = {};
    const Kept* gates[2] = {};
    const float *grad_h[2] = {}, *grad_c[2] = {};
    const float *after[2] = {}, *stored[2] = {};
    Number* grad_gates[2];
    float* grad_stored[2];
    // Bytes from a row to the previous one, in 32 bits, so that an address takes one instruction.
    const int gh_back = -(int)a.gh_row * 4, gc_back = -(int)a.gc_row * 4, stored_back = -(int)a.stored_row * 4;
    constexpr int KEPT_BACK = -WIDTH * (int)sizeof(Kept), STATE_BACK = -HIDDEN * 4;
    Step read[2];              // for the next step
    bool first[2], second[2];  // of this token, and of that of the next step
    u32 flag[2];               // of the following step
    Factors factors[2];
    float total[2], carried[2];  // gradients of h and c; GRU: carried is the part of h's that bypasses the products

    auto read_step = [&](int e, int step, bool is_first) {
        const int at = min(step, last[e]), one_more = min(step + 1, last[e]);
        read[e].gates = *moved(gates[e], at, KEPT_BACK);
        read[e].dh = *moved(grad_h[e], at, gh_back);
        if (LSTM) read[e].dc = *moved(grad_c[e], at, gc_back);
        if (LSTM) read[e].state = *moved(after[e], at, STATE_BACK);
        const float* before = is_first ? stored[e] : after[e];
        read[e].before = *moved(before, is_first ? at : one_more, is_first ? stored_back : STATE_BACK);
    };
    auto flag_of = [&](int e, int step) -> u32 { return byte_at(moved(starts[e], min(step, last[e]), -1)); };
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
        total[e] = my.real ? read[e].dh : 0.0f;
        carried[e] = LSTM && my.real ? read[e].dc : 0.0f;
        read_step(e, 1, second[e]);
    }
    const int own = my.member * UNITS;
    const u32 exponent = largest(a.w_hh, own);
    const float back = scale_back(exponent);
    auto weight_at = [&](int tile, int block, int i, int which) {
        const int to = (my.warp * MEMBERS + 2 * tile + i % 2) * 8 + my.row, gate = 2 * (block % 2) + i / 2;
        return weight(a.w_hh, gate, own + block / 2 * 8 + 2 * my.pair + which, to);
    };
    const Weights<TILES, BLOCKS> weights(shared_address(dynamic_shared()), scale_up(exponent), weight_at);
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
        // The largest gradient of the warp's eight units, by the upper halves of its bits. After transposition a lane
        // has two units of one slot. A transposition by whole warps also tells the compiler that threads have converged
        // again after the waiting loop: otherwise it would make the exchanges between them wait for all loads.
        const u32 turned = transposed(__byte_perm(most[0], most[1], 0x7632));
        u32 largest_own = max(turned & 0xffff, turned >> 16);
#pragma unroll
        for (int far = 1; far < 4; far *= 2) largest_own = max(largest_own, __shfl_xor_sync(ALL, largest_own, far));
        if (my.pair == 0) exponents[my.row][my.warp] = (u16)largest_own;
        __syncthreads();
        u32 each[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const uint4 all = *(const uint4*)exponents[2 * my.pair + e];
            const u32 two = largest_two(largest_two(all.x, all.y), largest_two(all.z, all.w));
            each[e] = max(two & 0xffff, two >> 16) >> 7;
        }
        const float up[2] = {scale_up(each[0]), scale_up(each[1])};
        const float down[2] = {scale_back(each[0]) * back, scale_back(each[1]) * back};
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
            u32 pair[PARTS];
            parts_of(pair, d[0][gate] * up[0], d[1][gate] * up[1]);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) operands[my.warp][part][gate][my.lane] = pair[part];
        }
        __syncthreads();
        Sums<TILES> sums;
        u32 late = 0;
#pragma unroll
        for (int from = 0; from < WARPS; ++from) {
            u32 b[PARTS][4];
#pragma unroll
            for (int part = 0; part < PARTS; ++part) load_operands(b[part], rows + (from * PARTS + part) * 512);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
                    sums.add(weights, tile, 2 * from + half, b, half, !LSTM && half == 1);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            u32 word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) word[i] = __float_as_uint(sums(tile, i) * down[i % 2]);
            const u32 low = __shfl_xor_sync(ALL, odd ? word[0] : word[2], 1);
            const u32 high = __shfl_xor_sync(ALL, odd ? word[1] : word[3], 1);
            send(to[tile] + page * PAGE, to_full[tile] + 8 * page, odd ? low : word[0], odd ? high : word[1],
                 odd ? word[2] : low, odd ? word[3] : high);
            late = low & zero;
        }
        // While that is in flight. Fetched values are used before more are fetched, because the hardware waits for both
        // together, and not before the send, on which they are made to depend.
        __syncwarp();
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const bool active = step < length[e];
            factors[e] = factors_of(behind(read[e], late));
            dh[e] = my.real ? behind(read[e].dh, late) : 0.0f;
            if (LSTM) dc[e] = my.real ? behind(read[e].dc, late) : 0.0f;
            Factors& f = factors[e];
            settle(f.c), settle(f.d0), settle(f.d1), settle(f.d2), settle(f.d3), settle(f.pass);
            settle(dh[e]), settle(dc[e]);
            store_gradients(active, moved(grad_gates[e], step, -4 * WIDTH * (int)sizeof(Number)), my.unit, d[e]);
            if (TO_STORED) store(active && first[e] && my.real, moved(grad_stored[e], step, STATE_BACK), carried[e]);
            linked[e] = active && !first[e];  // the first token of a segment passes no gradient to the previous one
            first[e] = second[e], second[e] = is_set(flag[e] | late);
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
#pragma unroll
        for (int far = 1; far < MEMBERS; far *= 2)
#pragma unroll
            for (int i = 0; i < MEMBERS; i += 2 * far) from[i].x += from[i + far].x, from[i].y += from[i + far].y;
        const float sum[2] = {from[0].x, from[0].y};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float through = linked[e] ? carried[e] : 0.0f;
            total[e] = dh[e] + (linked[e] ? sum[e] : 0.0f) + (LSTM ? 0.0f : through);
            carried[e] = LSTM ? dc[e] + through : 0.0f;
        }
    }
}

#endif
