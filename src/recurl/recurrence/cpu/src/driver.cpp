// Driver: scheduling of kernels on threads. Segments are sorted by length and grouped into tiles. A thread owns a tile
// from its first step to its last, so no thread waits for another within a sequence. Compiled for the default target.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "kernels.h"

namespace recurl {
namespace {

constexpr int64_t kTokenBlock = 8 * kMaxTileRows;     // tokens per job where tokens are independent
constexpr double kWorkPerThread = 2e6;                // multiplications below which another thread doesn't pay off

bool processor_has(int64_t isa) {
#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__))
  switch (isa) {
    case RECURL_AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case RECURL_AVX512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && processor_has(RECURL_AVX2);
  }
#endif
  return isa == RECURL_PORTABLE;
}

const Kernels* kernels_of(int64_t isa, int64_t dtype) {
  if (!processor_has(isa)) return nullptr;
  switch (isa) {
    case RECURL_AVX512: return avx512_kernels(dtype);
    case RECURL_AVX2: return avx2_kernels(dtype);
    default: return portable_kernels(dtype);
  }
}

int64_t useful_threads(int64_t threads, double work) {
  return std::max<int64_t>(1, int64_t(std::min(double(threads), work / kWorkPerThread)));
}

constexpr int64_t kAlign = 64;

char* aligned(char* memory) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory) + kAlign - 1) / kAlign * kAlign);
}

// Allocations that live as long as a call.
class Memory {
 public:
  // Not initialized.
  void* space(int64_t bytes) {
    pieces_.emplace_back(new char[bytes + kAlign]);
    return aligned(pieces_.back().get());
  }
  void* zeros(int64_t bytes) { return std::memset(space(bytes), 0, bytes); }

 private:
  std::vector<std::unique_ptr<char[]>> pieces_;
};

// Calls work(job, worker) for jobs 0 to count - 1, each once, on up to `threads` threads.
template <class Work>
void parallel(int64_t threads, int64_t count, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto worker = [&](int64_t id) {
    for (int64_t job; (job = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(job, id);
  };
  std::vector<std::thread> others;
  try {
    for (int64_t id = 1; id < std::min(threads, count); ++id) others.emplace_back(worker, id);
  } catch (const std::system_error&) {
    // No more threads available: the existing threads and this one do all the work.
  }
  worker(0);
  for (auto& other : others) other.join();
}

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

// Number of multiplications for one row.
double work_of(const recurl_step& step) {
  const int64_t gates = step.cell == RECURL_GRU ? 3 : 4, deeper = (step.layers - 1) * step.outputs;
  return double(gates * step.hidden) * double(step.inputs + deeper + step.layers * step.outputs);
}

void step(const recurl_step& step, const recurl_step_weights* layers) {
  const Kernels* kernels = kernels_of(step.isa, step.dtype);
  const int64_t threads = useful_threads(step.threads, double(step.rows) * work_of(step));
  const int64_t elements = kernels->step_scratch(&step), size = elements * (step.dtype == RECURL_FLOAT64 ? 8 : 4);
  const std::unique_ptr<char[]> memory(new char[size * threads + kAlign]);
  char* scratch = aligned(memory.get());
  parallel(threads, (step.rows + kStepRows - 1) / kStepRows, [&](int64_t job, int64_t worker) {
    const int64_t end = std::min(step.rows, (job + 1) * kStepRows);
    kernels->step(&step, layers, job * kStepRows, end, scratch + worker * size);
  });
}

double work_of(const recurl_op& op) {
  if (op.kind == RECURL_LINEAR) return double(op.inputs) * double(op.outputs);
  return op.kind == RECURL_RECUR ? work_of(*op.step) : 0.;
}

int run(const recurl_program& program, const recurl_place* given, int64_t rows, int64_t most_threads) {
  const Kernels* kernels = kernels_of(program.isa, program.dtype);
  double work = 0;
  for (int64_t i = 0; i < program.count; ++i) work += work_of(program.ops[i]);
  const int64_t threads = useful_threads(most_threads, double(rows) * work);
  const int64_t size = kernels->program_scratch(&program) * (program.dtype == RECURL_FLOAT64 ? 8 : 4) + kAlign;
  const std::unique_ptr<char[]> memory(new char[size * threads]);
  std::atomic<int> worst{RECURL_OK};
  parallel(threads, (rows + kStepRows - 1) / kStepRows, [&](int64_t job, int64_t worker) {
    const int64_t end = std::min(rows, (job + 1) * kStepRows);
    char* scratch = aligned(memory.get() + worker * size);
    const int status = kernels->run_program(&program, given, job * kStepRows, end, scratch);
    for (int before = worst; status > before && !worst.compare_exchange_weak(before, status);) continue;
  });
  return worst;
}

#include "pass.inc"

// Cuts a stream into pieces of about equal length that begin at segment starts.
std::vector<LinearJob> linear_pieces(const recurl_linear& l, int64_t count) {
  std::vector<LinearJob> pieces;
  for (int64_t i = 0, begin = 0; begin < l.tokens; ++i) {
    int64_t end = std::min(l.tokens, std::max(begin + 1, l.tokens * (i + 1) / count));
    while (end < l.tokens && !l.starts[end]) ++end;
    pieces.push_back({begin, end, 0, l.width});
    begin = end;
  }
  return pieces;
}

constexpr int64_t kSummedTokens = 256, kMostSums = 32;
constexpr int64_t kPage = 4096;

// Splits a linear recurrence into jobs, with the same result for any number of threads: pieces of the stream, or column
// ranges if segments are too long for equal shares. Column ranges are at least a page wide: threads process the same
// rows at the same time, and prefetching by one core would evict lines that its neighbor has written.
std::vector<LinearJob> linear_jobs(const recurl_linear& l, int64_t threads, bool summed) {
  if (summed)  // a fixed number of pieces, whose sums are added in order
    return linear_pieces(l, std::min(kMostSums, std::max<int64_t>(1, l.tokens / kSummedTokens)));
  if (threads == 1) return {{0, l.tokens, 0, l.width}};
  std::vector<LinearJob> jobs = linear_pieces(l, 4 * threads);
  int64_t longest = 0;
  for (const LinearJob& job : jobs) longest = std::max(longest, job.end - job.begin);
  const int64_t page = kPage / (l.dtype == RECURL_FLOAT64 ? 8 : l.dtype == RECURL_BFLOAT16 ? 2 : 4);
  const int64_t share = ((l.width + threads - 1) / threads + page - 1) / page * page;
  if (share >= l.width || 2 * threads * longest <= l.tokens) return jobs;
  jobs.clear();
  for (int64_t first = 0; first < l.width; first += share)
    jobs.push_back({0, l.tokens, first, std::min(share, l.width - first)});
  return jobs;
}

constexpr double kLinearWork = 4;  // cost of one element of a linear recurrence, in multiplications

// If summed, the sums over tokens are in the second half of each job's scratch.
template <class Walk, class Sum>
void linear(const recurl_linear& l, bool summed, const Walk& walk, const Sum& sum) {
  const int64_t threads = useful_threads(l.threads, kLinearWork * double(l.tokens) * double(l.width));
  const std::vector<LinearJob> jobs = linear_jobs(l, threads, summed);
  const int64_t size = linear_scratch(l.width), count = int64_t(jobs.size());
  const std::unique_ptr<char[]> memory(new char[8 * size * (summed ? count : threads) + kAlign]);
  double* scratch = reinterpret_cast<double*>(aligned(memory.get()));
  parallel(threads, count, [&](int64_t job, int64_t worker) {
    walk(&l, &jobs[job], scratch + size * (summed ? job : worker));
  });
  if (summed) sum(&l, scratch + size / 2, size, count);
}

template <class Job>
int guarded(int64_t isa, const Job& job) {
  if (!recurl_cpu_has(isa)) return RECURL_BAD_ARGUMENT;
  try {
    job();
  } catch (const std::exception&) {  // only failed allocations throw
    return RECURL_NO_MEMORY;
  }
  return RECURL_OK;
}

}  // namespace
}  // namespace recurl

int64_t recurl_cpu_abi(void) { return RECURL_CPU_ABI; }
int recurl_cpu_has(int64_t isa) { return recurl::kernels_of(isa, RECURL_FLOAT32) != nullptr; }
int recurl_cpu_forward(const recurl_layer* layer) {
  return recurl::guarded(layer->isa, [&] { recurl::forward(*layer); });
}
int recurl_cpu_gates(const recurl_layer* layer) {
  return recurl::guarded(layer->isa, [&] { recurl::gates(*layer); });
}
int recurl_cpu_backward(const recurl_layer* layer) {
  return recurl::guarded(layer->isa, [&] { recurl::backward(*layer); });
}
int recurl_cpu_step(const recurl_step* step, const recurl_step_weights* layers) {
  return recurl::guarded(step->isa, [&] { recurl::step(*step, layers); });
}
int recurl_cpu_run(const recurl_program* program, const recurl_place* given, int64_t rows, int64_t threads) {
  int found = RECURL_OK;
  const int status = recurl::guarded(program->isa, [&] { found = recurl::run(*program, given, rows, threads); });
  return status == RECURL_OK ? found : status;
}
int64_t recurl_cpu_pass_memory(const recurl_program* program, int64_t tokens) {
  return recurl::pass_memory(*program, tokens);
}
int recurl_cpu_pass_forward(const recurl_pass* pass) {
  return recurl::guarded(pass->program->isa, [&] { recurl::Pass(*pass).forward(); });
}
int recurl_cpu_pass_backward(const recurl_pass* pass) {
  return recurl::guarded(pass->program->isa, [&] { recurl::Pass(*pass).backward(); });
}
int recurl_cpu_surrogate(const recurl_pass* pass, const recurl_surrogate* surrogate) {
  return recurl::guarded(pass->program->isa, [&] { recurl::Pass(*pass).descend(*surrogate); });
}
int recurl_cpu_adam(const recurl_adam* adam) {
  return recurl::guarded(adam->isa, [&] { recurl::kernels_of(adam->isa, adam->dtype)->adam(adam); });
}
void recurl_cpu_write(const recurl_memory* memory, int64_t step, const int64_t* pairs, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const recurl_memory& m = memory[pairs[2 * i]];
    const char* from = reinterpret_cast<const char*>(pairs[2 * i + 1]);
    char* to = static_cast<char*>(m.data) + step * m.step_stride;
    for (int64_t r = 0; r < m.rows; ++r) std::memcpy(to + r * m.row_stride, from + r * m.bytes, m.bytes);
  }
}
int recurl_cpu_linear_forward(const recurl_linear* l) {
  return recurl::guarded(l->isa, [&] {
    const recurl::Kernels* kernels = recurl::kernels_of(l->isa, l->dtype);
    recurl::linear(*l, false, kernels->linear_forward, kernels->linear_sum);
  });
}
int recurl_cpu_linear_backward(const recurl_linear* l) {
  const bool summed = l->a_stride == 0 && l->grad_a;  // a is the same at every token
  return recurl::guarded(l->isa, [&] {
    const recurl::Kernels* kernels = recurl::kernels_of(l->isa, l->dtype);
    recurl::linear(*l, summed, kernels->linear_backward, kernels->linear_sum);
  });
}
