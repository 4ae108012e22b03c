// C ABI of recurl's native library, in plain C: neither torch nor Python is needed to build it.
//
// N tokens, I inputs, H hidden units, P outputs (P = H without projection), G gates. All matrices are row-major; a
// *_stride is the distance between rows in elements. A pointer may be null only if its comment says so.
#ifndef RECURL_NATIVE_H
#define RECURL_NATIVE_H

#include <stdint.h>

#if defined(_WIN32)
#define RECURL_EXPORT __declspec(dllexport)
#else
#define RECURL_EXPORT __attribute__((visibility("default")))
#endif

// Incremented whenever a structure or a function below changes; the loader rejects a library of another version.
#define RECURL_NATIVE_ABI 11

enum recurl_cell { RECURL_LSTM = 0, RECURL_GRU = 1 };
enum recurl_dtype { RECURL_FLOAT32 = 0, RECURL_FLOAT64 = 1, RECURL_BFLOAT16 = 2 };  // bfloat16: recurl_linear only
enum recurl_isa { RECURL_PORTABLE = 0, RECURL_AVX2 = 1, RECURL_AVX512 = 2, RECURL_ISA_COUNT = 3 };
enum recurl_status {
  RECURL_OK = 0,
  RECURL_NO_MEMORY = 1,
  RECURL_BAD_ARGUMENT = 2,
  RECURL_NAN = 3,        // a probability is NaN
  RECURL_NO_CHOICE = 4,  // a mask allows nothing
};

// One layer in one direction over a flat stream of tokens cut into segments.
//
// Gate columns are 4 H wide for both cells. LSTM: i, f, g, o. GRU: n, r, z, and W_hn h + b_hn separate from the other
// part of n, so that columns 0 to 3 H belong to the input product and columns H to 4 H to the hidden product.
typedef struct recurl_layer {
  int64_t cell, dtype, isa, threads;
  int64_t tokens, inputs, hidden, outputs;
  const uint8_t* starts;  // [N], nonzero at the first token of each segment; token 0 always starts one
  const void* x;          // [N, I]
  int64_t x_stride;
  const void *w_ih, *w_hh;  // [G H, I], [G H, P], contiguous, gate order of torch.nn
  const void *b_ih, *b_hh;  // [G H] or null
  const void* w_hr;         // [P, H], contiguous, or null without projection
  const void* h0;           // [N, P], stored states, read at segment starts only
  int64_t h0_stride;
  const void* c0;  // [N, H], LSTM only
  int64_t c0_stride;
  void* gates;        // [N, 4 H], contiguous like all below: gates after activation
  void* h;            // [N, P], after every token
  void* c;            // [N, H], after every token, LSTM only
  void* unprojected;  // [N, H], o tanh(c), only with projection
  // Backward only.
  const void* grad_h;  // [N, P], gradients of the states after every token
  int64_t grad_h_stride;
  const void* grad_c;  // [N, H], LSTM only
  int64_t grad_c_stride;
  void* grad_gates;   // [N, 4 H], same columns as gates
  void* grad_output;  // [N, P], gradient of the projection's result, only with projection
  void* h_before;     // [N, P], the output before every token, or null; needed for grad_w_hh and grad_b_hh
  void* grad_x;       // [N, I] or null
  void* grad_h0;      // [N, P] or null; only rows of segment starts are written
  void* grad_c0;      // [N, H] or null; only rows of segment starts are written
  void *grad_w_ih, *grad_w_hh, *grad_b_ih, *grad_b_hh;  // like the weights, or null
  void* grad_w_hr;                                      // [P, H] or null
} recurl_layer;

#ifdef __cplusplus
extern "C" {
#endif

RECURL_EXPORT int64_t recurl_native_abi(void);
// Sizes in bytes of the structures, in the order of this header, then 0; the loader compares them with its own.
RECURL_EXPORT const int64_t* recurl_native_sizes(void);
// Returns whether the library was built with this instruction set and the processor supports it.
RECURL_EXPORT int recurl_native_has(int64_t isa);
// Fills gates, h, c and unprojected.
RECURL_EXPORT int recurl_native_forward(const recurl_layer* layer);
// Recomputes gates and unprojected bit for bit from x, the stored states, h and c, for all tokens at once.
RECURL_EXPORT int recurl_native_gates(const recurl_layer* layer);
// Fills everything marked "backward only".
RECURL_EXPORT int recurl_native_backward(const recurl_layer* layer);

// Weights of one layer of a step, as in recurl_layer.
typedef struct recurl_step_weights {
  const void *w_ih, *w_hh, *b_ih, *b_hh, *w_hr;
} recurl_step_weights;

// One step of B rows through L layers in one direction.
typedef struct recurl_step {
  int64_t cell, dtype, isa, threads;
  int64_t rows, layers, inputs, hidden, outputs;
  const void* x;  // [B, I]
  int64_t x_stride;
  const uint8_t* is_init;  // [B], nonzero where the states are treated as zero and not read; or null
  int64_t is_init_stride;
  const void* h;           // [B, L, P], or null for zero states
  int64_t h_stride, h_layer_stride;
  const void* c;  // [B, L, H], LSTM only
  int64_t c_stride, c_layer_stride;
  void* features;           // [B, P], h of the last layer
  int64_t features_stride;
  void* h_after;  // [B, L, P], each row contiguous, like those of c_after
  int64_t h_after_stride;
  void* c_after;  // [B, L, H], LSTM only
  int64_t c_after_stride;
} recurl_step;
RECURL_EXPORT int recurl_native_step(const recurl_step* step, const recurl_step_weights* layers);

// One step of a complete network: operations on slots, which hold one row of numbers per batch row. Slots 0 to
// `given` - 1 are external: each call passes their places. The following `inner` slots are in memory of the library.
enum recurl_op_kind {
  RECURL_COPY = 0,        // converts from the dtype `variant`, divides by `low`
  RECURL_ONE_HOT = 1,     // one-hot encoding of an int64
  RECURL_LINEAR = 2,      // w [outputs, inputs], b [outputs] or null
  RECURL_ACTIVATE = 3,    // activation `variant`
  RECURL_NORMALIZE = 4,   // (x - w) b, clipped to [low, high]
  RECURL_LAYER_NORM = 5,  // weight w, bias b, or null; low is added to the variance; variant 1: without centering
  RECURL_RECUR = 6,       // slots: is_init, h, c, h_after, c_after
  RECURL_POSITIVE = 7,    // softplus(x + w[0]) + low, at least high
  RECURL_CHOOSE = 8,      // choice from logits; slots: exponential noise, mask, log-probability
  RECURL_SQUASH = 9,      // w + b (1 + tanh) of a normal; slots: scale, normal noise, log-probability
};
enum recurl_activation {
  RECURL_TANH = 0,
  RECURL_SIGMOID = 1,
  RECURL_SILU = 2,
  RECURL_ELU = 3,    // low (e^x - 1) below 0
  RECURL_LEAKY = 4,  // low x below 0
  RECURL_CLAMP = 5,  // clipped to [low, high]
};
enum recurl_source {
  RECURL_FROM_FLOAT32 = 0,
  RECURL_FROM_FLOAT64 = 1,
  RECURL_FROM_UINT8 = 2,
  RECURL_FROM_INT16 = 3,
  RECURL_FROM_INT32 = 4,
  RECURL_FROM_INT64 = 5,
};
enum recurl_choice {           // bit flags
  RECURL_ONE_HOT_CHOICE = 1,   // write the choice as a one-hot vector
  RECURL_REFUSES = 2,          // report RECURL_NAN and RECURL_NO_CHOICE
  RECURL_VALUE_OF_CHOICE = 4,  // write the logit of the choice instead of its log-probability
};

typedef struct recurl_op {
  int64_t kind, variant;
  int64_t from, from_column, inputs;
  int64_t to, to_column, outputs;
  const void *w, *b;
  double low, high;
  const recurl_step* step;  // sizes, RECURL_RECUR only
  const recurl_step_weights* layers;
  int64_t slots[5];  // additional slots, -1 for none
} recurl_op;

typedef struct recurl_program {
  int64_t dtype, isa;
  int64_t given, inner;
  const int64_t* columns;  // of each inner slot
  int64_t count;
  const recurl_op* ops;
} recurl_program;

typedef struct recurl_place {
  void* data;
  int64_t stride;  // distance between rows in elements
} recurl_place;
// Runs B rows through all operations; `given` has one place per external slot.
RECURL_EXPORT int recurl_native_run(const recurl_program* program, const recurl_place* given, int64_t rows,
                                 int64_t threads);

// Forward and backward pass over all tokens of a batch, for programs whose operations have derivatives; recurrent
// layers run over sequences. RECURL_RECUR uses only the slots h and c: tokens where `starts` is set start from the
// states stored there. Slots of states after a step are not written.
typedef struct recurl_weight {
  const void* weight;
  void* grad;  // like the weight, contiguous; the gradient is added to it
  int64_t count;
} recurl_weight;
typedef struct recurl_pass {
  const recurl_program* program;
  const recurl_place* given;
  int64_t tokens, threads;
  const uint8_t* starts;  // [N], nonzero at the first token of each segment; token 0 always starts one
  void* memory;           // recurl_native_pass_memory bytes, unchanged between forward and backward
  // Backward only.
  const recurl_place* grads;  // of the external slots; null for none
  int64_t weight_count;
  const recurl_weight* weights;  // the weights that have a gradient
} recurl_pass;
RECURL_EXPORT int64_t recurl_native_pass_memory(const recurl_program* program, int64_t tokens);
RECURL_EXPORT int recurl_native_pass_forward(const recurl_pass* pass);
RECURL_EXPORT int recurl_native_pass_backward(const recurl_pass* pass);

// PPO losses of the outputs of a pass, and their gradients with respect to these outputs, over all N tokens.
enum recurl_density {
  RECURL_CHOICES = 0,   // categorical over n logits; actions are int64
  RECURL_SQUASHED = 1,  // the distribution of RECURL_SQUASH, n components
};
enum recurl_distance { RECURL_SMOOTH_L1 = 0, RECURL_L1 = 1, RECURL_L2 = 2 };
typedef struct recurl_surrogate {
  int64_t density, columns;
  const void *location, *scale, *value;  // [N, n], logits of choices; [N, n], squashed only; [N]
  const uint8_t* mask;                   // [N, n] or null, choices only
  const void* action;                    // [N] or [N, n]
  const void *low, *half;                // [n], squashed only
  const void *log_prob, *advantage, *target, *old_value;  // [N]; old_value may be null
  int64_t normalize, distance, entropy;                   // entropy: whether to compute it
  double clip_epsilon, clip_value, entropy_coeff, critic_coeff;
  void *grad_location, *grad_scale, *grad_value;  // written
  void* results;                                  // enum recurl_result
} recurl_surrogate;
enum recurl_result {
  RECURL_OBJECTIVE = 0,
  RECURL_CRITIC = 1,
  RECURL_ENTROPY = 2,
  RECURL_KL = 3,
  RECURL_CLIPPED = 4,
  RECURL_ESS = 5,
  RECURL_MAX_RATIO = 6,
  RECURL_MEAN_RATIO = 7,
  RECURL_EXPLAINED = 8,
  RECURL_RESULTS = 9,
};
// Runs the forward pass, the losses and the backward pass. Gradients of weights are overwritten.
RECURL_EXPORT int recurl_native_surrogate(const recurl_pass* pass, const recurl_surrogate* surrogate);

// Adam step with gradients clipped by their total norm. If that norm or the loss is not finite, values and optimizer
// state are left unchanged.
typedef struct recurl_parameter {
  void *value, *grad, *mean, *square;  // contiguous; gradients are overwritten by the clipped ones
  float* steps;                        // one number
  int64_t count;
} recurl_parameter;
typedef struct recurl_adam {
  int64_t dtype, isa, count;
  const recurl_parameter* parameters;
  const void* loss;
  void* norm;  // written
  double max_norm, rate, beta1, beta2, epsilon;
} recurl_adam;
RECURL_EXPORT int recurl_native_adam(const recurl_adam* adam);

// Memory layout of a batch entry that is written step by step.
typedef struct recurl_memory {
  void* data;
  int64_t rows, bytes;              // number of rows per step, and size of a row
  int64_t row_stride, step_stride;  // bytes
} recurl_memory;
// Writes a step: for each of `count` pairs (index, address), copies contiguous rows at the address to that entry.
RECURL_EXPORT void recurl_native_write(const recurl_memory* memory, int64_t step, const int64_t* pairs, int64_t count);

// Linear recurrence h[n] = a[n] h[n - 1] + b[n] over a flat stream of tokens cut into segments, elementwise. Where a
// segment starts, the stored state replaces h[n - 1]. A row has W numbers; a complex number counts as two.
typedef struct recurl_linear {
  int64_t dtype, isa, threads;
  int64_t tokens, width, is_complex;
  const uint8_t* starts;  // [N], nonzero at the first token of each segment; token 0 always starts one
  const void* a;          // [N, W], or [W] with a stride of 0 if it is the same at every token
  int64_t a_stride;
  const void* b;  // [N, W], forward only
  int64_t b_stride;
  const void* states;  // [N, W], stored states, read at segment starts only
  int64_t states_stride;
  void* h;  // [N, W], contiguous like all below
  // Backward only.
  const void* grad;  // [N, W], gradient of h
  int64_t grad_stride;
  void* grad_a;       // like a, or null; for a constant a, summed over tokens from last to first
  void* grad_b;       // [N, W] or null
  void* grad_states;  // [N, W] or null; zeros except at segment starts
} recurl_linear;
RECURL_EXPORT int recurl_native_linear_forward(const recurl_linear* linear);
RECURL_EXPORT int recurl_native_linear_backward(const recurl_linear* linear);

// Carves a maze of side x side cells for each row by the algorithm Hunt-and-Kill, and writes all its squares: 0 where one
// may go, 1 for a wall. Of three chances per step, from 0 to 1, the first two decide where a hunt ends and how long it
// takes, the third which neighbor is opened.
RECURL_EXPORT int recurl_native_hunt_and_kill(int64_t side, int64_t rows, const int64_t* starts,  // [rows], cells
                                              const double* chances,  // [3 (side^2 - 1), rows]
                                              int64_t chance_stride, int64_t row_stride,
                                              void* squares);  // int8 [(2 side + 1)^2, rows]

#ifdef __cplusplus
}
#endif
#endif
