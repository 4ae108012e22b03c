// Kernels for AVX2 and FMA: setup.py compiles this file with the corresponding flags on x86-64; elsewhere it provides
// none.
#if defined(__AVX2__) && defined(__FMA__)
#define RECURL_VECTOR_BYTES 32
#define RECURL_PANEL_VECTORS 2
#include "kernels.inc"

namespace recurl {
const Kernels* avx2_kernels(int64_t dtype) { return kernels(dtype); }
}  // namespace recurl
#else
#include "kernels.h"

namespace recurl {
const Kernels* avx2_kernels(int64_t) { return nullptr; }
}  // namespace recurl
#endif
