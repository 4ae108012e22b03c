// Interface between the driver and the kernels of one instruction set: a table of functions over type-erased pointers.
//
// Each instruction set is a separate translation unit, compiled with its own flags. Such a unit must not include
// headers with inline functions: the linker could keep the copy with the newer instructions for all units.
#ifndef RECURL_NATIVE_KERNELS_H
#define RECURL_NATIVE_KERNELS_H

#include "recurl_native.h"

namespace recurl {

constexpr int kMaxTileRows = 12;
constexpr int64_t kStepRows = 64;  // rows per job of a step, a multiple of the vector width in every build

// Segments that one thread steps through time together, longest first.
struct Tile {
  int rows;
  bool with_inputs;  // the thread also computes the products with W_ih of these tokens
  int64_t start[kMaxTileRows];
  int64_t length[kMaxTileRows];
};

// Weights packed for the products (see pack in products.inc) and other data shared by all tiles.
struct Weights {
  void* input;       // forward: x -> gate columns; backward: gate gradients -> x
  void* hidden;      // forward: h -> gate columns; backward: gate gradients -> h
  void* projection;  // forward: o tanh(c) -> h; backward: gradient of h -> gradient of o tanh(c)
  void* bias;        // [4 H]
  void* zeros;       // [max(H, P)]
};

// Sums of outer products over tokens: result[r, j] = sum over n of a[n, r] b[n, j], with the rows r of the two matrices
// a concatenated, and sums[j] = sum over n of b[n, j].
struct Outer {
  const void* a[2];  // [tokens, rows]; at least one has rows
  int64_t a_stride[2], rows[2];
  const void* b;  // [tokens, columns]
  int64_t b_stride, columns;
  int64_t tokens;
  void* result;  // [rows of both, columns padded to whole panels], initially zeros
  void* sums;    // [columns padded to whole panels], initially zeros
};

// Part of a linear recurrence for one thread: whole segments, elements first to first + width - 1 of each row.
struct LinearJob {
  int64_t begin, end, first, width;
};

// Number of doubles that such a job needs: two rows, each padded to whole vectors.
constexpr int64_t linear_scratch(int64_t width) { return 2 * ((width + 7) / 8 * 8); }

struct Kernels {
  // Number of elements of a packed [depth, columns] matrix.
  int64_t (*packed_size)(int64_t depth, int64_t columns);
  // Packs B [depth, columns]: B[k, j] = w[j, k] if transposed, else w[k, j]. Rows of w are rolled: index i of the gate
  // columns is row (i + roll) % rows of w.
  void (*pack)(void* packed, const void* w, int64_t depth, int64_t columns, int64_t roll, bool transposed);
  void (*bias)(const recurl_layer* layer, void* bias);
  // Computes the gate columns of tokens begin to end: x W_ih^T + biases.
  void (*input_gates)(const recurl_layer* layer, const Weights* weights, int64_t begin, int64_t end);
  // Completes the gates of tokens begin to end from the states before them. scratch: 2 H elements.
  void (*finish_gates)(const recurl_layer* layer, const Weights* weights, int64_t begin, int64_t end, void* scratch);
  void (*input_gradient)(const recurl_layer* layer, const Weights* weights, int64_t begin, int64_t end);
  void (*forward_tile)(const recurl_layer* layer, const Weights* weights, const Tile* tile);
  // scratch: kMaxTileRows * (P + 2 H) elements.
  void (*backward_tile)(const recurl_layer* layer, const Weights* weights, const Tile* tile, void* scratch);
  // Runs one step of rows begin to end. scratch: step_scratch elements.
  int64_t (*step_scratch)(const recurl_step* step);
  void (*step)(const recurl_step* step, const recurl_step_weights* layers, int64_t begin, int64_t end, void* scratch);
  // Runs a program on rows begin to end. scratch: program_scratch elements.
  int64_t (*program_scratch)(const recurl_program* program);
  int (*run_program)(const recurl_program* program, const recurl_place* given, int64_t begin, int64_t end,
                     void* scratch);
  // Runs one operation of a program whose slots are all external, or its backward pass, which adds to the gradients.
  // Weight gradients are computed for layer normalization only. scratch: op_scratch elements.
  int64_t (*op_scratch)(const recurl_op* op);
  int (*run_op)(const recurl_program* program, const recurl_place* slots, const recurl_op* op, int64_t rows,
                void* scratch);
  void (*op_backward)(const recurl_op* op, const recurl_place* values, const recurl_place* grads, int64_t rows,
                      void* grad_w, void* grad_b);
  // add_product: to += from * packed. add_rows: to += from.
  void (*add_product)(const void* packed, int64_t depth, int64_t columns, recurl_place from, recurl_place to,
                      int64_t rows);
  void (*add_rows)(recurl_place from, recurl_place to, int64_t rows, int64_t columns);
  // scratch: two rows of the surrogate's columns, each padded to whole vectors.
  void (*surrogate)(const recurl_surrogate* surrogate, int64_t tokens, void* scratch);
  void (*adam)(const recurl_adam* adam);
  // Number of work units that such a sum is split into; each covers all tokens.
  int64_t (*outer_units)(const Outer* job);
  // Computes units begin to end. scratch: outer_scratch elements.
  void (*outer)(const Outer* job, int64_t begin, int64_t end, void* scratch);
  // Writes the transposed result for a[which], [columns, rows], and the sums, rolled like pack's w; null skips either.
  void (*store_outer)(const Outer* job, int which, int64_t roll, void* matrix, void* vector);
  int64_t panel_columns, outer_scratch;
  // Runs one job. scratch: linear_scratch doubles.
  void (*linear_forward)(const recurl_linear* linear, const LinearJob* job, double* scratch);
  void (*linear_backward)(const recurl_linear* linear, const LinearJob* job, double* scratch);
  // Adds `count` partial sums of the gradient of a, which are `apart` doubles apart, and stores the total.
  void (*linear_sum)(const recurl_linear* linear, const double* sums, int64_t apart, int64_t count);
};

// Kernels by dtype; null if this build lacks the instruction set.
const Kernels* portable_kernels(int64_t dtype);
const Kernels* avx2_kernels(int64_t dtype);
const Kernels* avx512_kernels(int64_t dtype);

}  // namespace recurl
#endif
