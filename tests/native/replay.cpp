// Replays the calls that recorder.py recorded, with the library of this machine, and compares what they wrote. Needs
// only the header. Prints, for each function and kind of numbers, how many were compared and the largest relative error.
//
//     replay FILE
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "recurl_native.h"

namespace {

enum Kind { RAW, FLOAT32, FLOAT64, INT64, BFLOAT16 };  // as in recorder.py
const char* const kNames[] = {"raw", "float32", "float64", "int64", "bfloat16"};
// Largest relative error of the numbers that a call writes to one tensor, in the Frobenius norm.
const double kAllowed[] = {0, 2e-5, 1e-12, 0, 4e-3};
constexpr int64_t kAlign = 64;

std::FILE* file;

void read(void* to, size_t bytes) {
  if (std::fread(to, 1, bytes, file) != bytes) std::fprintf(stderr, "the file ends early\n"), std::exit(2);
}
int64_t number() {
  int64_t value;
  read(&value, sizeof value);
  return value;
}
std::string text() {
  std::string value(number(), ' ');
  read(&value[0], value.size());
  return value;
}

struct Pointer {
  int64_t offset, block, inner;
};

struct Block {
  int64_t kind, size;
  std::vector<char> memory, before, after;
  char* data;
  std::vector<Pointer> pointers;

  Block() : kind(number()), size(number()) {
    const int64_t shift = number();  // the same alignment as where it was recorded
    pointers.resize(number());
    for (Pointer& pointer : pointers) pointer = {number(), number(), number()};
    before.resize(size), after.resize(size), memory.resize(size + 2 * kAlign);
    read(before.data(), size), read(after.data(), size);
    data = memory.data() + (kAlign - reinterpret_cast<uintptr_t>(memory.data()) % kAlign) + shift;
    std::memcpy(data, before.data(), size);
  }
};

double value_of(int64_t kind, const char* p) {
  if (kind == FLOAT32) {
    float x;
    return std::memcpy(&x, p, sizeof x), x;
  }
  if (kind == FLOAT64) {
    double x;
    return std::memcpy(&x, p, sizeof x), x;
  }
  uint32_t bits = 0;
  std::memcpy(reinterpret_cast<char*>(&bits) + 2, p, 2);
  float x;
  return std::memcpy(&x, &bits, sizeof x), x;
}

// Relative error of what was written, here or where it was recorded; counts these numbers.
double error_of(const Block& block, int64_t* numbers) {
  const int64_t size = block.kind == FLOAT32 ? 4 : block.kind == BFLOAT16 ? 2 : 8;
  double error = 0, norm = 0;
  for (int64_t i = 0; i + size <= block.size; i += size) {
    const char *before = &block.before[i], *after = &block.after[i], *found = block.data + i;
    if (!std::memcmp(before, after, size) && !std::memcmp(before, found, size)) continue;
    ++*numbers;
    if (block.kind == INT64) {
      if (std::memcmp(after, found, size)) return INFINITY;
      continue;
    }
    const double a = value_of(block.kind, after), b = value_of(block.kind, found);
    if (std::isnan(a) && std::isnan(b)) continue;
    if (a == b) {
      if (std::isfinite(a)) norm += a * a;
      continue;
    }
    if (!std::isfinite(a) || !std::isfinite(b)) return INFINITY;
    error += (a - b) * (a - b), norm += a * a;
  }
  return error == 0 ? 0 : norm == 0 ? INFINITY : std::sqrt(error / norm);
}

template <class T>
const T* as(const void* p) {
  return static_cast<const T*>(p);
}

int call(const std::string& name, const std::vector<void*>& p, const std::vector<int64_t>& n) {
  if (name == "forward") return recurl_native_forward(as<recurl_layer>(p[0]));
  if (name == "gates") return recurl_native_gates(as<recurl_layer>(p[0]));
  if (name == "backward") return recurl_native_backward(as<recurl_layer>(p[0]));
  if (name == "linear_forward") return recurl_native_linear_forward(as<recurl_linear>(p[0]));
  if (name == "linear_backward") return recurl_native_linear_backward(as<recurl_linear>(p[0]));
  if (name == "step") return recurl_native_step(as<recurl_step>(p[0]), as<recurl_step_weights>(p[1]));
  if (name == "run") return recurl_native_run(as<recurl_program>(p[0]), as<recurl_place>(p[1]), n[2], n[3]);
  if (name == "pass_forward") return recurl_native_pass_forward(as<recurl_pass>(p[0]));
  if (name == "pass_backward") return recurl_native_pass_backward(as<recurl_pass>(p[0]));
  if (name == "surrogate") return recurl_native_surrogate(as<recurl_pass>(p[0]), as<recurl_surrogate>(p[1]));
  if (name == "adam") return recurl_native_adam(as<recurl_adam>(p[0]));
  std::fprintf(stderr, "%s: not a function that can be replayed\n", name.c_str());
  std::exit(2);
}

struct Row {
  int64_t calls = 0, numbers = 0, failed = 0;
  double worst = 0;
};

}  // namespace

int main(int, char** arguments) {
  file = std::fopen(arguments[1], "rb");
  if (!file) return std::perror(arguments[1]), 2;
  std::map<std::string, Row> rows;
  int64_t failed = 0;
  for (int next; (next = std::fgetc(file)) != EOF;) {
    std::ungetc(next, file);
    const std::string name = text(), test = text();
    const int64_t status = number();
    std::vector<int64_t> of(number()), numbers(of.size());
    for (size_t i = 0; i < of.size(); ++i) of[i] = number(), numbers[i] = number();
    std::vector<Block> blocks(number());
    for (Block& block : blocks)
      for (const Pointer& pointer : block.pointers) {
        char* target = blocks[pointer.block].data + pointer.inner;
        std::memcpy(block.data + pointer.offset, &target, sizeof target);
      }
    std::vector<void*> pointers(of.size());
    for (size_t i = 0; i < of.size(); ++i) pointers[i] = of[i] < 0 ? nullptr : blocks[of[i]].data + numbers[i];
    const int found = call(name, pointers, numbers);
    if (found != status) {
      ++failed;
      std::printf("FAILED %s: %s returns %d, not %d\n", test.c_str(), name.c_str(), found, int(status));
    }
    for (int64_t kind = FLOAT32; kind <= BFLOAT16; ++kind) {
      double worst = 0;
      int64_t count = 0;
      for (const Block& block : blocks)
        if (block.kind == kind) worst = std::fmax(worst, error_of(block, &count));
      if (!count) continue;
      Row& row = rows[name + ", " + kNames[kind]];
      ++row.calls, row.numbers += count, row.worst = std::fmax(row.worst, worst);
      if (worst <= kAllowed[kind]) continue;
      ++row.failed, ++failed;
      std::printf("FAILED %s: %s, %s: relative error %.1e > %.0e\n", test.c_str(), name.c_str(), kNames[kind], worst,
                  kAllowed[kind]);
    }
  }
  for (const auto& row : rows)
    std::printf("%-26s %5lld calls, %8lld numbers, largest error %.1e%s\n", row.first.c_str(),
                static_cast<long long>(row.second.calls), static_cast<long long>(row.second.numbers), row.second.worst,
                row.second.failed ? "  FAILED" : "");
  if (rows.empty()) std::printf("FAILED: the file has no calls\n");
  return failed || rows.empty();
}
