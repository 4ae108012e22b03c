// Differentiable run of a program over all tokens of a batch. The values of its slots and the saved tensors of
// recurrent layers persist from the forward to the backward pass; gradients of slots live only during the call.
#include "../driver.h"

namespace recurl {
namespace {

// Number of elements per row of a slot, padded to whole cache lines.
inline int64_t slot_columns(int64_t columns, int64_t size) {
  const int64_t line = kAlign / size;
  return (columns + line - 1) / line * line;
}

// Sizes, in elements, of what a recurrent layer saves: gates, h, c, o tanh(c).
struct Kept {
  explicit Kept(const recurl_op& op, int64_t layer, int64_t tokens)
      : gates(tokens * 4 * op.step->hidden),
        h(tokens * op.step->outputs),
        c(op.step->cell == RECURL_LSTM ? tokens * op.step->hidden : 0),
        unprojected(op.layers[layer].w_hr ? tokens * op.step->hidden : 0) {}
  int64_t all() const { return gates + h + c + unprojected; }
  int64_t gates, h, c, unprojected;
};

int64_t pass_memory(const recurl_program& program, int64_t tokens) {
  const int64_t size = program.dtype == RECURL_FLOAT64 ? 8 : 4;
  int64_t elements = 0;
  for (int64_t s = 0; s < program.inner; ++s) elements += tokens * slot_columns(program.columns[s], size);
  for (int64_t i = 0; i < program.count; ++i)
    for (int64_t l = 0; program.ops[i].kind == RECURL_RECUR && l < program.ops[i].step->layers; ++l)
      elements += Kept(program.ops[i], l, tokens).all();
  return elements * size + kAlign;
}

class Pass {
 public:
  explicit Pass(const recurl_pass& pass)
      : pass_(pass),
        program_(*pass.program),
        kernels_(kernels_of(program_.isa, program_.dtype)),
        size_(program_.dtype == RECURL_FLOAT64 ? 8 : 4),
        whole_{program_.dtype, program_.isa, program_.given + program_.inner, 0, nullptr, program_.count, program_.ops},
        values_(pass.given, pass.given + program_.given),
        end_(aligned(static_cast<char*>(pass.memory))) {
    for (int64_t s = 0; s < program_.inner; ++s) {
      const int64_t columns = slot_columns(program_.columns[s], size_);
      values_.push_back({take(pass.tokens * columns), columns});
    }
    for (int64_t i = 0; i < program_.count; ++i)
      if (program_.ops[i].kind == RECURL_RECUR) layers_of(program_.ops[i]);
  }

  void forward() {
    int64_t scratch = 0;
    for (int64_t i = 0; i < program_.count; ++i)
      if (program_.ops[i].kind != RECURL_RECUR) scratch = std::max(scratch, kernels_->op_scratch(&program_.ops[i]));
    void* memory = space(scratch);
    size_t layer = 0;
    for (int64_t i = 0; i < program_.count; ++i) {
      const recurl_op& op = program_.ops[i];
      if (op.kind != RECURL_RECUR) {
        kernels_->run_op(&whole_, values_.data(), &op, pass_.tokens, memory);
        continue;
      }
      for (int64_t l = 0; l < op.step->layers; ++l) recurl::forward(layers_[layer++]);
      const recurl_place to = place(values_, op.to, op.to_column);
      for (int64_t n = 0; n < pass_.tokens; ++n)
        std::memcpy(at(to.data, n * to.stride), at(layers_[layer - 1].h, n * op.outputs), op.outputs * size_);
    }
  }

  void backward() {
    find_gradients();
    size_t layer = layers_.size();
    for (int64_t i = program_.count - 1; i >= 0; --i) {
      const recurl_op& op = program_.ops[i];
      const bool wanted = grads_[op.to].data;
      if (op.kind == RECURL_RECUR) {
        layer -= op.step->layers;
        if (wanted) recur(op, layer);
      } else if (wanted && op.kind == RECURL_LINEAR) {
        linear(op);
      } else if (wanted && (op.kind == RECURL_LAYER_NORM || grads_[op.from].data)) {
        kernels_->op_backward(&op, values_.data(), grads_.data(), pass_.tokens, grad_of(op.w), grad_of(op.b));
      }
    }
  }

  void descend(const recurl_surrogate& surrogate) {
    once_ = true;
    forward();
    kernels_->surrogate(&surrogate, pass_.tokens, space(2 * slot_columns(surrogate.columns, size_)));
    for (int64_t i = 0; i < pass_.weight_count; ++i)
      std::memset(pass_.weights[i].grad, 0, pass_.weights[i].count * size_);
    backward();
  }

 private:
  static recurl_place place(const std::vector<recurl_place>& places, int64_t slot, int64_t column, int64_t size) {
    return {static_cast<char*>(places[slot].data) + column * size, places[slot].stride};
  }
  recurl_place place(const std::vector<recurl_place>& places, int64_t slot, int64_t column) const {
    return place(places, slot, column, size_);
  }
  void* at(void* p, int64_t elements) const { return static_cast<char*>(p) + elements * size_; }
  void* take(int64_t elements) {
    void* found = end_;
    end_ += elements * size_;
    return found;
  }
  void* space(int64_t elements) { return memory_.space(elements * size_); }
  void* zeros(int64_t elements) { return memory_.zeros(elements * size_); }

  // Adds the layers of a recurrent operation, with memory for what they save.
  void layers_of(const recurl_op& op) {
    const recurl_step& s = *op.step;
    const bool lstm = s.cell == RECURL_LSTM;
    for (int64_t l = 0; l < s.layers; ++l) {
      const recurl_step_weights& w = op.layers[l];
      const Kept kept(op, l, pass_.tokens);
      recurl_layer layer = {};
      layer.cell = s.cell, layer.dtype = program_.dtype, layer.isa = program_.isa, layer.threads = pass_.threads;
      layer.tokens = pass_.tokens, layer.hidden = s.hidden, layer.outputs = s.outputs;
      layer.starts = pass_.starts;
      const recurl_place x = l ? recurl_place{layers_.back().h, s.outputs} : place(values_, op.from, op.from_column);
      layer.x = x.data, layer.x_stride = x.stride, layer.inputs = l ? s.outputs : s.inputs;
      layer.w_ih = w.w_ih, layer.w_hh = w.w_hh, layer.b_ih = w.b_ih, layer.b_hh = w.b_hh, layer.w_hr = w.w_hr;
      const recurl_place h = state(op.slots[1], l, s.layers, s.outputs);
      layer.h0 = h.data, layer.h0_stride = h.stride;
      const recurl_place c = lstm ? state(op.slots[2], l, s.layers, s.hidden) : recurl_place{};
      layer.c0 = c.data, layer.c0_stride = c.stride;
      layer.gates = take(kept.gates), layer.h = take(kept.h), layer.c = lstm ? take(kept.c) : nullptr;
      layer.unprojected = w.w_hr ? take(kept.unprojected) : nullptr;
      layers_.push_back(layer);
    }
  }

  // Stored states of a layer, or zeros if there are none.
  recurl_place state(int64_t slot, int64_t layer, int64_t layers, int64_t columns) {
    if (slot < 0) return {zeros(columns), 0};
    return {at(values_[slot].data, layer * columns), layers * columns};
  }

  void* grad_of(const void* weight) const {
    for (int64_t i = 0; weight && i < pass_.weight_count; ++i)
      if (pass_.weights[i].weight == weight) return pass_.weights[i].grad;
    return nullptr;
  }

  bool has_weights(const recurl_op& op) const {
    bool found = grad_of(op.w) || grad_of(op.b);
    for (int64_t l = 0; op.kind == RECURL_RECUR && l < op.step->layers; ++l) {
      const recurl_step_weights& w = op.layers[l];
      for (const void* weight : {w.w_ih, w.w_hh, w.b_ih, w.b_hh, w.w_hr}) found = found || grad_of(weight);
    }
    return found;
  }

  // Allocates zero gradients for every internal slot that depends on a weight; those of external slots are given.
  void find_gradients() {
    grads_.assign(pass_.grads, pass_.grads + program_.given);
    grads_.resize(values_.size());
    for (int64_t i = 0; i < program_.count; ++i) {
      const recurl_op& op = program_.ops[i];
      const bool depends = has_weights(op) || (op.from >= program_.given && grads_[op.from].data);
      if (!depends || op.to < program_.given || grads_[op.to].data) continue;
      grads_[op.to] = {zeros(pass_.tokens * values_[op.to].stride), values_[op.to].stride};
    }
  }

  void linear(const recurl_op& op) {
    const recurl_place y = place(grads_, op.to, op.to_column), x = place(values_, op.from, op.from_column);
    if (grads_[op.from].data) {
      void* packed = space(kernels_->packed_size(op.outputs, op.inputs));
      kernels_->pack(packed, op.w, op.outputs, op.inputs, 0, false);
      kernels_->add_product(packed, op.outputs, op.inputs, y, place(grads_, op.from, op.from_column), pass_.tokens);
    }
    if (!grad_of(op.w) && !grad_of(op.b)) return;
    const int64_t panel = kernels_->panel_columns, padded = (op.outputs + panel - 1) / panel * panel;
    Outer job = {{x.data, nullptr}, {x.stride, 0}, {op.inputs, 0}, y.data, y.stride, op.outputs, pass_.tokens,
                 zeros(op.inputs * padded), zeros(padded)};
    kernels_->outer(&job, 0, kernels_->outer_units(&job), space(kernels_->outer_scratch));
    void *w = new_grad(op.w, op.inputs * op.outputs), *b = new_grad(op.b, op.outputs);
    kernels_->store_outer(&job, 0, 0, w, b);
    add(op.w, w, op.inputs * op.outputs), add(op.b, b, op.outputs);
  }

  void recur(const recurl_op& op, size_t first) {
    const recurl_step& s = *op.step;
    recurl_place above = place(grads_, op.to, op.to_column);
    for (int64_t l = s.layers - 1; l >= 0; --l) {
      recurl_layer layer = layers_[first + l];
      const bool wants_x = l > 0 || grads_[op.from].data;
      layer.grad_h = above.data, layer.grad_h_stride = above.stride;
      layer.grad_c = zeros(s.hidden), layer.grad_c_stride = 0;
      layer.grad_gates = once_ ? layer.gates : space(pass_.tokens * 4 * s.hidden);
      layer.grad_output = layer.w_hr ? space(pass_.tokens * s.outputs) : nullptr;
      layer.h_before = space(pass_.tokens * s.outputs);
      layer.grad_x = wants_x ? space(pass_.tokens * layer.inputs) : nullptr;
      const int64_t gates = (s.cell == RECURL_GRU ? 3 : 4) * s.hidden;
      const int64_t counts[] = {gates * layer.inputs, gates * s.outputs, gates, gates, s.outputs * s.hidden};
      const void* weights[] = {layer.w_ih, layer.w_hh, layer.b_ih, layer.b_hh, layer.w_hr};
      void** found[] = {&layer.grad_w_ih, &layer.grad_w_hh, &layer.grad_b_ih, &layer.grad_b_hh, &layer.grad_w_hr};
      for (int i = 0; i < 5; ++i) *found[i] = new_grad(weights[i], counts[i]);
      recurl::backward(layer);
      for (int i = 0; i < 5; ++i) add(weights[i], *found[i], counts[i]);
      above = {layer.grad_x, layer.inputs};
    }
    if (grads_[op.from].data)
      kernels_->add_rows(above, place(grads_, op.from, op.from_column), pass_.tokens, op.inputs);
  }

  // Allocates memory for a gradient before it is added to that of its weight; null if no gradient is needed.
  void* new_grad(const void* weight, int64_t count) { return grad_of(weight) ? space(count) : nullptr; }
  void add(const void* weight, void* grad, int64_t count) {
    if (grad) kernels_->add_rows({grad, 0}, {grad_of(weight), 0}, 1, count);
  }

  const recurl_pass& pass_;
  const recurl_program& program_;
  const Kernels* kernels_;
  int64_t size_;
  recurl_program whole_;
  std::vector<recurl_place> values_, grads_;
  std::vector<recurl_layer> layers_;
  char* end_;
  bool once_ = false;  // backward may overwrite the results of forward
  Memory memory_;
};

}  // namespace
}  // namespace recurl

int64_t recurl_native_pass_memory(const recurl_program* program, int64_t tokens) {
  return recurl::pass_memory(*program, tokens);
}
int recurl_native_pass_forward(const recurl_pass* pass) {
  return recurl::guarded(pass->program->isa, [&] { recurl::Pass(*pass).forward(); });
}
int recurl_native_pass_backward(const recurl_pass* pass) {
  return recurl::guarded(pass->program->isa, [&] { recurl::Pass(*pass).backward(); });
}
int recurl_native_surrogate(const recurl_pass* pass, const recurl_surrogate* surrogate) {
  return recurl::guarded(pass->program->isa, [&] { recurl::Pass(*pass).descend(*surrogate); });
}
