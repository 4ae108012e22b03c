// Recurrence of an LSTM or GRU with few hidden units: a CTA processes one slot, with four threads per hidden unit.
//
// The results are those of definition.py.
//
// Compiled at run time, with or without FORWARD, and with these macros: HIDDEN, WIDTH (a multiple of 16), PROGRAMS
// (CTAs per multiprocessor), LSTM, EXACT (for activations and kept gates: products are float32 anyway), KEEP or
// TO_STORED, and BITS (32). The arguments are those of cluster.cu.
//
// All weights are in registers. A thread computes its part of so many sums that each number read from shared memory
// enters four or more products. Exchanges between threads complete the sums and leave each of the four threads of a
// unit with one gate (forward), or all of them with the gradient of h (backward). The inputs of a step are copied from
// global to shared memory seven steps ahead; a warp copies for its own units only.

constexpr int THREADS = 4 * WIDTH;
constexpr int AHEAD = 7, RING = 8;

// Flags of tokens that start segments, of this step and at least the 32 after it, in all threads of a warp.
struct Starts {
    const u8* first;
    int direction, length, lane;
    u64 bits;
    u32 then;

    Starts(const u8* first, int direction, int length) : first(first), direction(direction), length(length) {
        lane = threadIdx.x % 32, bits = 0;
        for (int step = 0; step < 64; step += 32) bits |= (u64)__ballot_sync(ALL, flag(lane + step)) << step;
        then = flag(lane + 64);
    }

    u32 flag(int step) const { return step < length ? byte_at(first + (i64)step * direction) : 0; }

    bool at(int later) const { return (u32)bits >> later & 1; }

    void next() { bits >>= 1; }

    // Load more flags, every 32 steps.
    void refill(int step) { bits |= (u64)__ballot_sync(ALL, then) << 32, then = flag(lane + step + 64); }
};

inline float completed(float x, int far) { return x + __shfl_xor_sync(ALL, x, far); }

// The sum of the value that this lane keeps and of the one sent by the lane at distance far.
inline float exchanged(bool upper, float low, float high, int far) {
    return (upper ? high : low) + __shfl_xor_sync(ALL, upper ? low : high, far);
}

// tanh or the logistic function of x.
inline float either_of(bool tanh, float x) {
    if (!EXACT) {
        const float y = rough_tanh(tanh ? x : 0.5f * x);
        return tanh ? y : 0.5f * y + 0.5f;
    }
    const float decay = exponential(tanh ? -2.0f * fabsf(x) : -fabsf(x));
    const float far = quotient(tanh ? 1.0f - decay : x < 0.0f ? decay : 1.0f, 1.0f + decay);
    return tanh ? tanh_from(x, far) : far;
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS)

#if FORWARD

// A thread sums for all gates of two hidden units, over an eighth of the columns.
KERNEL rows_forward_kernel(const __grid_constant__ Arguments a) {
    constexpr int PAIRS = WIDTH / 16, ROW = GATES * WIDTH;
    __shared__ __align__(16) float pages[2][WIDTH];  // h, alternating
    __shared__ float inputs[RING][THREADS], stored[RING][2][WIDTH];
    const i64 begin = a.bounds[blockIdx.x];
    const int steps = (int)(a.bounds[blockIdx.x + 1] - begin);
    if (steps <= 0) return;
    const int lane = threadIdx.x % 32, unit = threadIdx.x / 4, mine = lane % 4, eighth = lane % 8;
    const bool real = unit < HIDDEN;
    float w[2][GATES][PAIRS][2];
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate)
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    w[which][gate][pair][i] = weight(a.w_hh, gate, unit / 2 * 2 + which, 2 * (eighth + 8 * pair) + i);
    const float bias = LSTM || !real ? 0.0f : a.b_hn[unit];
    Starts starts(a.starts + begin, 1, steps);
    const bool copies = LSTM || mine < 3, copies_state = real && mine < (LSTM ? 2 : 1);
    const Number* input = a.input_gates + begin * ROW + (LSTM ? threadIdx.x : mine < 2 ? WIDTH + 2 * unit + mine : unit);
    const float* state = mine == 0 ? a.stored_h + begin * a.h_row + unit * a.h_column
                                   : a.stored_c + begin * a.c_row + unit * a.c_column;
    const i64 state_row = mine == 0 ? a.h_row : a.c_row;
    const u32 to_input = shared_address(&inputs[0][threadIdx.x]);
    const u32 to_state = shared_address(&stored[0][mine % 2][unit]);
    const u32 h_at = shared_address(pages) + 8 * eighth, input_at = to_input, stored_at = shared_address(&stored[0][0][unit]);
    const u32 own_h = shared_address(&pages[0][unit]);
    float* after = (mine == 0 ? a.after_h : a.after_c) + begin * HIDDEN + unit;
#if EXACT
    float* gates = (float*)a.gates + begin * (4 * WIDTH) + threadIdx.x;
#else
    u16* gates = (u16*)a.gates + begin * (4 * WIDTH) + threadIdx.x;
#endif
    auto copy = [&](int step, int later) {  // later: steps between the position of starts and this step
        const bool there = step < steps;
        copy_word(there & copies, to_input + step % RING * (THREADS * 4), input);
        copy_word(there & copies_state & starts.at(later), to_state + step % RING * (2 * WIDTH * 4), state);
        end_group();
        input += ROW, state += state_row;
    };
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) copy(step, step);
    wait_for_groups<AHEAD - 2>();
    float h = real ? a.stored_h[begin * a.h_row + unit * a.h_column] : 0.0f;
    float c = LSTM && real ? a.stored_c[begin * a.c_row + unit * a.c_column] : 0.0f;
    put(mine == 0, own_h, h);
    float out = 0.0f, kept = 0.0f;
    auto store_found = [&](bool wanted) {
        store(copies_state & wanted, after, out);
#if EXACT
        store(KEEP & wanted, gates, kept);
#else
        store(KEEP & wanted, gates, (u16)halves(kept, 0.0f));
#endif
        after += wanted ? HIDDEN : 0, gates += wanted ? 4 * WIDTH : 0;
    };
    u32 from_page = h_at, to_page = own_h + WIDTH * 4;
    auto take = [&](int step) {
        settle(from_page);
        __syncthreads();
        float2 h_of[PAIRS];
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair)
            h_of[pair] = two_at(from_page + 64 * pair);
        // While these loads are in flight.
        store_found(step > 0);
        copy(step + AHEAD, AHEAD);
        wait_for_groups<AHEAD - 2>();  // inputs of the next step, and the stored states after it
        const bool first = starts.at(1);
        starts.next();
        const float given = number_at(input_at + step % RING * (THREADS * 4));
        const float stored_h = number_at(stored_at + (step + 1) % RING * (2 * WIDTH * 4));
        const float stored_c = LSTM ? number_at(stored_at + (step + 1) % RING * (2 * WIDTH * 4) + WIDTH * 4) : 0.0f;
        float sums[2][4] = {};
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair)
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int which = 0; which < 2; ++which)
#pragma unroll
                    for (int gate = 0; gate < GATES; ++gate)
                        sums[which][gate] = fmaf(w[which][gate][pair][i], i ? h_of[pair].y : h_of[pair].x, sums[which][gate]);
        float of[4] = {};
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate) of[gate] = exchanged(lane & 4, sums[0][gate], sums[1][gate], 4);
        const float low = exchanged(lane & 2, of[0], of[2], 2), high = exchanged(lane & 2, of[1], of[3], 2);
        const float hidden = exchanged(lane & 1, low, high, 1);
        auto from = [&](float x, int gate) { return __shfl_sync(ALL, x, lane / 4 * 4 + gate); };
        if (LSTM) {
            kept = either_of(mine == 2, hidden + given);
            const float i = from(kept, 0), f = from(kept, 1), g = from(kept, 2), o = from(kept, 3);
            c = f * c + i * g;
            h = o * tanh_of(c);
        } else {
            const float gate = sigmoid_of(hidden + given);
            const float r = from(gate, 0), z = from(gate, 1), inner = from(hidden + bias, 2);
            const float n = tanh_of(from(given, 2) + r * inner);
            h = n + z * (h - n);
            const float held = EXACT ? inner : fminf(fmaxf(inner, -65504.0f), 65504.0f);
            kept = mine < 2 ? gate : mine == 2 ? n : held;
        }
        out = mine == 0 ? h : c;
        h = first ? real ? stored_h : 0.0f : h;
        c = first ? real ? stored_c : 0.0f : c;
        put(mine == 0, to_page, h);
        from_page = 2 * h_at + WIDTH * 4 - from_page, to_page = 2 * own_h + WIDTH * 4 - to_page;
    };
#pragma unroll 1
    for (int done = 0; done < steps; done += 32) {
        if (done) starts.refill(done);
#pragma unroll 1
        for (int step = done; step < min(done + 32, steps); ++step) take(step);
    }
    store_found(true);
}

#else

// A thread sums the gradients of four hidden units, over the gates of a sixteenth of the units.
KERNEL rows_backward_kernel(const __grid_constant__ Arguments a) {
    constexpr int PLACES = WIDTH / 16, OTHERS = 4;
    constexpr int EARLY = WIDTH > 96 ? 2 : PLACES;  // read before the wait for memory; more would be spilled
    constexpr u32 PLACE = WIDTH * 2 * OTHERS * 4;
    __shared__ __align__(16) float4 pages[2][WIDTH];           // gradients of gates, alternating
    __shared__ __align__(16) float read[RING][WIDTH][2 * OTHERS];  // kept gates; gradients of h, c; state; stored one
    const i64 begin = a.bounds[blockIdx.x], end = a.bounds[blockIdx.x + 1] - 1;
    const int steps = (int)(end + 1 - begin);
    if (steps <= 0) return;
    const int lane = threadIdx.x % 32, unit = threadIdx.x / 4, mine = lane % 4, sixteenth = lane % 16;
    const bool real = unit < HIDDEN;
    const int real_unit = min(unit, HIDDEN - 1);  // padding units read these; their gradients are zero
    float w[4][GATES][PLACES];
#pragma unroll
    for (int which = 0; which < 4; ++which)
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate)
#pragma unroll
            for (int place = 0; place < PLACES; ++place) {
                const int column = threadIdx.x / 16 * 4 + which, row = sixteenth + 16 * place;
                w[which][gate][place] = weight(a.w_hh, gate, row, column);
            }
    Starts starts(a.starts + end, -1, steps);
    const float* after = LSTM ? a.after_c : a.after_h;
    const float* source = mine == 0 ? a.grad_h + end * a.gh_row + real_unit * a.gh_column
                          : mine == 1 ? a.grad_c + end * a.gc_row + real_unit * a.gc_column
                          : mine == 2 ? after + end * HIDDEN + real_unit
                                      : a.stored + end * a.stored_row + real_unit * a.stored_column;
    const i64 source_row = mine == 0 ? a.gh_row : mine == 1 ? a.gc_row : mine == 2 ? HIDDEN : a.stored_row;
    constexpr int WORDS = sizeof(Kept) / 4;
    const u32* gates = (const u32*)(a.gates + end * WIDTH + unit) + mine;
    const u32 to = shared_address(&read[0][unit][mine]);
    const bool copies_gates = mine < WORDS, copies = (LSTM || mine != 1) && mine < 3, copies_first = mine == 3;
    auto copy = [&](int step, int later) {
        const bool there = step < steps;
        const u32 at = to + step % RING * PLACE;
        copy_word(there & copies_gates, at, gates);
        copy_word(there & (copies | copies_first & starts.at(later)), at + 4 * OTHERS, source);
        end_group();
        gates -= WIDTH * WORDS, source -= source_row;
    };
    // The lane's own gate: where its gradient is stored.
    const int own = LSTM ? threadIdx.x : mine < 2 ? WIDTH + 2 * unit + mine : mine == 2 ? unit : 3 * WIDTH + unit;
    Number* grad_gates = a.grad_gates + end * (4 * WIDTH) + own;
    const u32 d_at = shared_address(&pages[0][sixteenth]), own_d = shared_address(&pages[0][unit]);
    const u32 read_at = shared_address(read[0][unit]);
    // Requires that the inputs of this step and the next one have arrived.
    Step now;
    auto take = [&](int step, bool first) {
        const u32 at = read_at + step % RING * PLACE, next = read_at + (step + 1) % RING * PLACE;
#if EXACT
        now.gates = four_at(at);
#else
        const float2 words = two_at(at);
        now.gates = make_uint2(__float_as_uint(words.x), __float_as_uint(words.y));
#endif
        const float4 others = four_at(at + 4 * OTHERS);
        const float state_before = number_at(next + 4 * (OTHERS + 2));
        now.dh = real ? others.x : 0.0f;
        now.dc = LSTM && real ? others.y : 0.0f;
        now.state = others.z;
        now.before = first ? others.w : state_before;
    };
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) copy(step, step);
    wait_for_groups<AHEAD - 3>();
    __syncwarp();
    bool first = starts.at(0);
    take(0, first);
    Factors f = factors_of(now);
    float total = now.dh, carried = now.dc;  // gradients of h and c; GRU: carried is the part of h's without products
    u32 from_page = d_at, to_page = own_d;
    auto walk = [&](int step) {
        const float all = LSTM ? carried + total * f.c : total;
        const float d[4] = {all * f.d0, all * f.d1, all * f.d2, total * f.d3};
        carried = all * f.pass;
        put(mine == 0, to_page, make_float4(d[0], d[1], d[2], d[3]));
        settle(from_page);
        __syncthreads();
        float4 d_of[PLACES];
#pragma unroll
        for (int place = 0; place < EARLY; ++place) d_of[place] = four_at(from_page + 256 * place);
        // While these loads are in flight.
        store(true, grad_gates, mine == 0 ? d[0] : mine == 1 ? d[1] : (mine == 2) == LSTM ? d[2] : d[3]);
        if (TO_STORED) store((mine == 0) & first & real, a.grad_stored + (end - step) * HIDDEN + unit, carried);
        const bool linked = !first;  // the first token of a segment passes no gradient to the previous token
        grad_gates -= 4 * WIDTH;
        first = starts.at(1);
        copy(step + AHEAD, AHEAD);
        wait_for_groups<AHEAD - 3>();
        starts.next();
        take(step + 1, first);
        f = factors_of(now);
        float sums[4] = {};
#pragma unroll
        for (int place = 0; place < PLACES; ++place) {
            if (place >= EARLY) d_of[place] = four_at(from_page + 256 * place);
#pragma unroll
            for (int which = 0; which < 4; ++which) {
                sums[which] = fmaf(w[which][0][place], d_of[place].x, sums[which]);
                sums[which] = fmaf(w[which][1][place], d_of[place].y, sums[which]);
                sums[which] = fmaf(w[which][2][place], d_of[place].z, sums[which]);
                if (LSTM) sums[which] = fmaf(w[which][GATES - 1][place], d_of[place].w, sums[which]);
            }
        }
        const float low = exchanged(lane & 8, sums[0], sums[2], 8), high = exchanged(lane & 8, sums[1], sums[3], 8);
        const float sum = completed(completed(exchanged(lane & 4, low, high, 4), 2), 1);
        const float through = linked ? carried : 0.0f;
        total = now.dh + (linked ? sum : 0.0f) + (LSTM ? 0.0f : through);
        carried = LSTM ? now.dc + through : 0.0f;
        from_page = 2 * d_at + WIDTH * 16 - from_page, to_page = 2 * own_d + WIDTH * 16 - to_page;
    };
#pragma unroll 1
    for (int done = 0; done < steps; done += 32) {
        if (done) starts.refill(done);
#pragma unroll 1
        for (int step = done; step < min(done + 32, steps); ++step) walk(step);
    }
}

#endif
