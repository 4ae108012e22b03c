// What all calls of the library share: the kernels of an instruction set, threads, and memory that lives as long as a
// call. Compiled for the default target only: the units of the instruction sets don't include this header.
#ifndef RECURL_DRIVER_H
#define RECURL_DRIVER_H

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels.h"

namespace recurl {

constexpr double kWorkPerThread = 2e6;  // multiplications below which another thread doesn't pay off
constexpr int64_t kAlign = 64;

// Null if the processor or this build lacks the instruction set.
const Kernels* kernels_of(int64_t isa, int64_t dtype);

// Of one layer, for runs of programs.
void forward(const recurl_layer& layer);
void backward(const recurl_layer& layer);
// Number of multiplications for one row.
double work_of(const recurl_step& step);

inline int64_t useful_threads(int64_t threads, double work) {
  return std::max<int64_t>(1, int64_t(std::min(double(threads), work / kWorkPerThread)));
}

inline char* aligned(char* memory) {
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

template <class Job>
int guarded(int64_t isa, const Job& job) {
  if (!kernels_of(isa, RECURL_FLOAT32)) return RECURL_BAD_ARGUMENT;
  try {
    job();
  } catch (const std::exception&) {  // only failed allocations throw
    return RECURL_NO_MEMORY;
  }
  return RECURL_OK;
}

}  // namespace recurl
#endif
