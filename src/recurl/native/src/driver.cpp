// The instruction sets of the processor, and calls that need no kernels.
#include "driver.h"

namespace recurl {
namespace {

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

}  // namespace

const Kernels* kernels_of(int64_t isa, int64_t dtype) {
  if (!processor_has(isa)) return nullptr;
  switch (isa) {
    case RECURL_AVX512: return avx512_kernels(dtype);
    case RECURL_AVX2: return avx2_kernels(dtype);
    default: return portable_kernels(dtype);
  }
}

}  // namespace recurl

int64_t recurl_native_abi(void) { return RECURL_NATIVE_ABI; }
const int64_t* recurl_native_sizes(void) {
  static const int64_t sizes[] = {
      sizeof(recurl_layer),     sizeof(recurl_step_weights), sizeof(recurl_step),   sizeof(recurl_op),
      sizeof(recurl_program),   sizeof(recurl_place),        sizeof(recurl_weight), sizeof(recurl_pass),
      sizeof(recurl_surrogate), sizeof(recurl_parameter),    sizeof(recurl_adam),   sizeof(recurl_memory),
      sizeof(recurl_linear),    0};
  return sizes;
}
int recurl_native_has(int64_t isa) { return recurl::kernels_of(isa, RECURL_FLOAT32) != nullptr; }
void recurl_native_write(const recurl_memory* memory, int64_t step, const int64_t* pairs, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const recurl_memory& m = memory[pairs[2 * i]];
    const char* from = reinterpret_cast<const char*>(pairs[2 * i + 1]);
    char* to = static_cast<char*>(m.data) + step * m.step_stride;
    for (int64_t r = 0; r < m.rows; ++r) std::memcpy(to + r * m.row_stride, from + r * m.bytes, m.bytes);
  }
}
