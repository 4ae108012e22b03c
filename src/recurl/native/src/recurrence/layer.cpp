// Layers over segments. Segments are sorted by length and grouped into tiles. A thread owns a tile from its first step
// to its last, so no thread waits for another within a sequence.
#include <utility>

#include "../driver.h"

namespace recurl {
namespace {

constexpr int64_t kTokenBlock = 8 * kMaxTileRows;  // tokens per job where tokens are independent

template <class Work>
void parallel_tokens(int64_t threads, int64_t tokens, const Work& work) {
  parallel(threads, (tokens + kTokenBlock - 1) / kTokenBlock, [&](int64_t job, int64_t worker) {
    work(job * kTokenBlock, std::min(tokens, (job + 1) * kTokenBlock), worker);
  });
}

// Groups segments, longest first (stable), into tiles with nearly equal numbers of rows. With fewer tiles than threads,
// the products with W_ih run in a separate pass that all threads share.
std::vector<Tile> plan(const recurl_layer& layer, int64_t threads, bool with_inputs) {
  std::vector<int64_t> first;
  for (int64_t n = 0; n < layer.tokens; ++n)
    if (n == 0 || layer.starts[n]) first.push_back(n);
  const int64_t segments = int64_t(first.size());
  first.push_back(layer.tokens);
  int64_t longest = 0;
  for (int64_t s = 0; s < segments; ++s) longest = std::max(longest, first[s + 1] - first[s]);
  std::vector<int64_t> place(longest + 1, 0);  // counting sort: position of the next segment of each length
  for (int64_t s = 0; s < segments; ++s) ++place[first[s + 1] - first[s]];
  for (int64_t length = longest, before = 0; length >= 0; --length) before += std::exchange(place[length], before);
  std::vector<int64_t> order(segments);
  for (int64_t s = 0; s < segments; ++s) order[place[first[s + 1] - first[s]]++] = s;

  const int64_t at_once = threads * kMaxTileRows;
  const int64_t count = std::min(segments, threads * ((segments + at_once - 1) / at_once));
  std::vector<Tile> tiles(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = segments * i / count, end = segments * (i + 1) / count;
    tiles[i].rows = int(end - begin);
    tiles[i].with_inputs = with_inputs && count >= threads;
    for (int64_t s = begin; s < end; ++s) {
      tiles[i].start[s - begin] = first[order[s]];
      tiles[i].length[s - begin] = first[order[s] + 1] - first[order[s]];
    }
  }
  return tiles;
}

// State of one call: kernels, number of threads and memory for packed weights.
class Run {
 public:
  explicit Run(const recurl_layer& layer)
      : layer(layer),
        kernels(kernels_of(layer.isa, layer.dtype)),
        size_(layer.dtype == RECURL_FLOAT64 ? 8 : 4),
        gates_(layer.cell == RECURL_GRU ? 3 * layer.hidden : 4 * layer.hidden),
        roll_(layer.cell == RECURL_GRU ? 2 * layer.hidden : 0) {
    const double work = double(layer.tokens) * double(gates_) * double(layer.inputs + layer.outputs);
    threads = useful_threads(layer.threads, work);
    weights.bias = space(4 * layer.hidden);
    kernels->bias(&layer, weights.bias);
    weights.zeros = zeros(std::max({layer.hidden, layer.outputs, layer.inputs}));
  }

  // Only the input product is rolled: the gate columns of the hidden product are in the order of torch.nn.
  void pack_forward() {
    weights.input = pack(layer.w_ih, layer.inputs, gates_, roll_, true);
    weights.hidden = pack(layer.w_hh, layer.outputs, gates_, 0, true);
    if (layer.w_hr) weights.projection = pack(layer.w_hr, layer.hidden, layer.outputs, 0, true);
  }
  void pack_backward() {
    if (layer.grad_x) weights.input = pack(layer.w_ih, gates_, layer.inputs, roll_, false);
    weights.hidden = pack(layer.w_hh, gates_, layer.outputs, 0, false);
    if (layer.w_hr) weights.projection = pack(layer.w_hr, layer.outputs, layer.hidden, 0, false);
  }

  // Allocates `elements` for each thread; those of worker w begin at scratch(memory, w, elements).
  void* scratch(int64_t elements) { return space(elements * threads); }
  void* scratch(void* memory, int64_t worker, int64_t elements) const {
    return static_cast<char*>(memory) + worker * elements * size_;
  }

  // Computes the gradients of all weights. The two products of an LSTM have the same gate columns, so they share the
  // passes over them.
  void weight_gradients() {
    const recurl_layer& l = layer;
    const int64_t width = 4 * l.hidden;
    const void* of_hidden = static_cast<const char*>(l.grad_gates) + (width - gates_) * size_;
    Outer input = outer(l.x, l.x_stride, l.inputs, l.grad_gates, width, gates_);
    Outer hidden = outer(l.h_before, l.outputs, l.outputs, of_hidden, width, gates_);
    const bool wants_input = l.grad_w_ih || l.grad_b_ih, wants_hidden = l.grad_w_hh || l.grad_b_hh;
    if (wants_input && l.h_before && l.cell == RECURL_LSTM) {
      input.a[1] = l.h_before, input.a_stride[1] = l.outputs, input.rows[1] = l.outputs;
      sum(&input);
      kernels->store_outer(&input, 0, roll_, l.grad_w_ih, l.grad_b_ih);
      kernels->store_outer(&input, 1, 0, l.grad_w_hh, l.grad_b_hh);
    } else {
      if (wants_input) sum(&input), kernels->store_outer(&input, 0, roll_, l.grad_w_ih, l.grad_b_ih);
      if (wants_hidden) sum(&hidden), kernels->store_outer(&hidden, 0, 0, l.grad_w_hh, l.grad_b_hh);
    }
    if (!l.grad_w_hr) return;
    Outer projection = outer(l.unprojected, l.hidden, l.hidden, l.grad_output, l.outputs, l.outputs);
    sum(&projection);
    kernels->store_outer(&projection, 0, 0, l.grad_w_hr, nullptr);
  }

  const recurl_layer& layer;
  const Kernels* kernels;
  int64_t threads = 1;
  Weights weights{};

 private:
  void* pack(const void* w, int64_t depth, int64_t columns, int64_t roll, bool transposed) {
    void* packed = space(kernels->packed_size(depth, columns));
    kernels->pack(packed, w, depth, columns, roll, transposed);
    return packed;
  }

  Outer outer(const void* a, int64_t a_stride, int64_t rows, const void* b, int64_t b_stride, int64_t columns) const {
    return {{a, nullptr}, {a_stride, 0}, {rows, 0}, b, b_stride, columns, layer.tokens, nullptr, nullptr};
  }

  void sum(Outer* job) {
    const int64_t panel = kernels->panel_columns, padded = (job->columns + panel - 1) / panel * panel;
    job->result = zeros((job->rows[0] + job->rows[1]) * padded);
    job->sums = zeros(padded);
    const int64_t units = kernels->outer_units(job), jobs = std::min(threads, units);
    void* panels = scratch(kernels->outer_scratch);
    parallel(threads, jobs, [&](int64_t i, int64_t worker) {
      kernels->outer(job, units * i / jobs, units * (i + 1) / jobs, scratch(panels, worker, kernels->outer_scratch));
    });
  }

  void* space(int64_t elements) { return memory_.space(elements * size_); }
  void* zeros(int64_t elements) { return memory_.zeros(elements * size_); }

  int64_t size_, gates_, roll_;
  Memory memory_;
};

void gates(const recurl_layer& layer) {
  Run run(layer);
  run.pack_forward();
  const int64_t elements = 2 * layer.hidden;
  void* scratch = run.scratch(elements);
  parallel_tokens(run.threads, layer.tokens, [&](int64_t begin, int64_t end, int64_t worker) {
    run.kernels->input_gates(&layer, &run.weights, begin, end);
    run.kernels->finish_gates(&layer, &run.weights, begin, end, run.scratch(scratch, worker, elements));
  });
}

}  // namespace

void forward(const recurl_layer& layer) {
  Run run(layer);
  run.pack_forward();
  const std::vector<Tile> tiles = plan(layer, run.threads, true);
  if (tiles.empty()) return;
  if (!tiles[0].with_inputs)
    parallel_tokens(run.threads, layer.tokens, [&](int64_t begin, int64_t end, int64_t) {
      run.kernels->input_gates(&layer, &run.weights, begin, end);
    });
  parallel(run.threads, int64_t(tiles.size()),
           [&](int64_t job, int64_t) { run.kernels->forward_tile(&layer, &run.weights, &tiles[job]); });
}

void backward(const recurl_layer& layer) {
  Run run(layer);
  run.pack_backward();
  const std::vector<Tile> tiles = plan(layer, run.threads, layer.grad_x);
  if (tiles.empty()) return;
  const int64_t elements = kMaxTileRows * (layer.outputs + 2 * layer.hidden);
  void* scratch = run.scratch(elements);
  parallel(run.threads, int64_t(tiles.size()), [&](int64_t job, int64_t worker) {
    run.kernels->backward_tile(&layer, &run.weights, &tiles[job], run.scratch(scratch, worker, elements));
  });
  if (layer.grad_x && !tiles[0].with_inputs)
    parallel_tokens(run.threads, layer.tokens, [&](int64_t begin, int64_t end, int64_t) {
      run.kernels->input_gradient(&layer, &run.weights, begin, end);
    });
  run.weight_gradients();
}

}  // namespace recurl

int recurl_native_forward(const recurl_layer* layer) {
  return recurl::guarded(layer->isa, [&] { recurl::forward(*layer); });
}
int recurl_native_gates(const recurl_layer* layer) {
  return recurl::guarded(layer->isa, [&] { recurl::gates(*layer); });
}
int recurl_native_backward(const recurl_layer* layer) {
  return recurl::guarded(layer->isa, [&] { recurl::backward(*layer); });
}
