// What one instruction set offers to the driver: a table of functions over type-erased pointers.
//
// Each instruction set is a translation unit of its own, compiled with its own flags. Such a unit must not include
// headers with inline functions (the linker could keep the copy with the newer instructions for everybody).
#ifndef RECURL_CPU_KERNELS_H
#define RECURL_CPU_KERNELS_H

#include "recurl_cpu.h"

namespace recurl {

constexpr int kMaxTileRows = 12;
constexpr int64_t kStepRows = 64;  // rows that one thread takes at once in a step: whole vectors of them, in every build

// Segments that one thread carries together through time, longest first.
struct Tile {
  int rows;
  bool with_inputs;  // the thread also runs the products with W_ih of these tokens
  int64_t start[kMaxTileRows];
  int64_t length[kMaxTileRows];
};

// Weights rearranged for the products (see pack in kernels.inc) and what else is shared by all tiles.
struct Weights {
  void* input;       // forward: x -> gate columns; backward: gate gradients -> x
  void* hidden;      // forward: h -> gate columns; backward: gate gradients -> h
  void* projection;  // forward: o tanh(c) -> h; backward: gradient of h -> gradient of o tanh(c)
  void* bias;        // [4 H]
  void* zeros;       // [max(H, P)]
};

// Sums of outer products over tokens: result[r, j] = sum over n of a[n, r] b[n, j], where the rows of two matrices a
// follow each other, and sums[j] = sum over n of b[n, j].
struct Outer {
  const void* a[2];  // [tokens, rows]; at least one has rows
  int64_t a_stride[2], rows[2];
  const void* b;  // [tokens, columns]
  int64_t b_stride, columns;
  int64_t tokens;
  void* result;  // [rows of both, columns padded to whole panels], zeros at first
  void* sums;    // [columns padded to whole panels], zeros at first
};

// The part of a linear recurrence that one thread computes: whole segments, numbers first to first + width of each row.
struct LinearJob {
  int64_t begin, end, first, width;
};

// Doubles that such a job needs: two rows, each padded to whole vectors.
constexpr int64_t linear_scratch(int64_t width) { return 2 * ((width + 7) / 8 * 8); }

struct Kernels {
  // Elements that a packed [depth, columns] matrix takes.
  int64_t (*packed_size)(int64_t depth, int64_t columns);
  // Packs B [depth, columns]: B[k, j] = w[j, k] if transposed, else w[k, j]; rows of w are rolled: row i of the gate
  // columns is row (i + roll) % rows of w.
  void (*pack)(void* packed, const void* w, int64_t depth, int64_t columns, int64_t roll, bool transposed);
  void (*bias)(const recurl_layer* layer, void* bias);
  // Gate columns of tokens begin to end: x W_ih^T + biases.
  void (*input_gates)(const recurl_layer* layer, const Weights* weights, int64_t begin, int64_t end);
  // Finishes the gates of tokens begin to end given the states before them. scratch: 2 H elements.
  void (*finish_gates)(const recurl_layer* layer, const Weights* weights, int64_t begin, int64_t end, void* scratch);
  void (*input_gradient)(const recurl_layer* layer, const Weights* weights, int64_t begin, int64_t end);
  void (*forward_tile)(const recurl_layer* layer, const Weights* weights, const Tile* tile);
  // scratch: kMaxTileRows * (P + 2 H) elements.
  void (*backward_tile)(const recurl_layer* layer, const Weights* weights, const Tile* tile, void* scratch);
  // One step of rows begin to end. scratch: step_scratch elements.
  int64_t (*step_scratch)(const recurl_step* step);
  void (*step)(const recurl_step* step, const recurl_step_weights* layers, int64_t begin, int64_t end, void* scratch);
  // One step of a program. scratch: program_scratch elements.
  int64_t (*program_scratch)(const recurl_program* program);
  int (*run_program)(const recurl_program* program, const recurl_place* given, int64_t begin, int64_t end,
                     void* scratch);
  // One operation of a program whose slots all lie outside, and its backward, which adds to the gradients; those of
  // weights are of layer normalisation alone. scratch: op_scratch elements.
  int64_t (*op_scratch)(const recurl_op* op);
  int (*run_op)(const recurl_program* program, const recurl_place* slots, const recurl_op* op, int64_t rows,
                void* scratch);
  void (*op_backward)(const recurl_op* op, const recurl_place* values, const recurl_place* grads, int64_t rows,
                      void* grad_w, void* grad_b);
  // to += from packed, to += from.
  void (*add_product)(const void* packed, int64_t depth, int64_t columns, recurl_place from, recurl_place to,
                      int64_t rows);
  void (*add_rows)(recurl_place from, recurl_place to, int64_t rows, int64_t columns);
  // scratch: as many elements as a surrogate has columns, twice, in whole vectors.
  void (*surrogate)(const recurl_surrogate* surrogate, int64_t tokens, void* scratch);
  void (*adam)(const recurl_adam* adam);
  // How many units of work such a sum is cut into, each with all tokens.
  int64_t (*outer_units)(const Outer* job);
  // Units begin to end. scratch: outer_scratch elements.
  void (*outer)(const Outer* job, int64_t begin, int64_t end, void* scratch);
  // Writes the result for one a transposed, [columns, rows], and the sums, rolled like pack's w; each if not null.
  void (*store_outer)(const Outer* job, int which, int64_t roll, void* matrix, void* vector);
  int64_t panel_columns, outer_scratch;
  // One job. scratch: linear_scratch doubles.
  void (*linear_forward)(const recurl_linear* linear, const LinearJob* job, double* scratch);
  void (*linear_backward)(const recurl_linear* linear, const LinearJob* job, double* scratch);
  // Stores the total of sums of the gradient of a, which are so many doubles apart.
  void (*linear_sum)(const recurl_linear* linear, const double* sums, int64_t apart, int64_t count);
};

// By dtype; null where this build lacks the instruction set.
const Kernels* portable_kernels(int64_t dtype);
const Kernels* avx2_kernels(int64_t dtype);
const Kernels* avx512_kernels(int64_t dtype);

}  // namespace recurl
#endif
