// Kernels for AVX-512: setup.py compiles this file with the corresponding flags on x86-64; elsewhere it provides none.
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define RECURL_VECTOR_BYTES 64
#define RECURL_PANEL_VECTORS 4
#include "kernels.inc"

namespace recurl {
const Kernels* avx512_kernels(int64_t dtype) { return kernels(dtype); }
}  // namespace recurl
#else
#include "kernels.h"

namespace recurl {
const Kernels* avx512_kernels(int64_t) { return nullptr; }
}  // namespace recurl
#endif
