// One step of a complete network: jobs of a fixed number of rows.
#include "../driver.h"

namespace recurl {
namespace {

double work_of(const recurl_op& op) {
  if (op.kind == RECURL_LINEAR) return double(op.inputs) * double(op.outputs);
  return op.kind == RECURL_RECUR ? recurl::work_of(*op.step) : 0.;
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

}  // namespace
}  // namespace recurl

int recurl_native_run(const recurl_program* program, const recurl_place* given, int64_t rows, int64_t threads) {
  int found = RECURL_OK;
  const int status = recurl::guarded(program->isa, [&] { found = recurl::run(*program, given, rows, threads); });
  return status == RECURL_OK ? found : status;
}
