// Linear recurrences: jobs of whole segments, or of ranges of columns.
#include "../driver.h"

namespace recurl {
namespace {

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

}  // namespace
}  // namespace recurl

int recurl_native_linear_forward(const recurl_linear* l) {
  return recurl::guarded(l->isa, [&] {
    const recurl::Kernels* kernels = recurl::kernels_of(l->isa, l->dtype);
    recurl::linear(*l, false, kernels->linear_forward, kernels->linear_sum);
  });
}
int recurl_native_linear_backward(const recurl_linear* l) {
  const bool summed = l->a_stride == 0 && l->grad_a;  // a is the same at every token
  return recurl::guarded(l->isa, [&] {
    const recurl::Kernels* kernels = recurl::kernels_of(l->isa, l->dtype);
    recurl::linear(*l, summed, kernels->linear_backward, kernels->linear_sum);
  });
}
