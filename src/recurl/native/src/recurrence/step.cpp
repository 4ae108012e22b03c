// One step of all layers: jobs of a fixed number of rows.
#include "../driver.h"

namespace recurl {

double work_of(const recurl_step& step) {
  const int64_t gates = step.cell == RECURL_GRU ? 3 : 4, deeper = (step.layers - 1) * step.outputs;
  return double(gates * step.hidden) * double(step.inputs + deeper + step.layers * step.outputs);
}

namespace {

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

}  // namespace
}  // namespace recurl

int recurl_native_step(const recurl_step* step, const recurl_step_weights* layers) {
  return recurl::guarded(step->isa, [&] { recurl::step(*step, layers); });
}
