// Kernels for the compiler's default target, with 16-byte vectors.
#define RECURL_VECTOR_BYTES 16
#define RECURL_PANEL_VECTORS 2
#include "kernels.inc"

namespace recurl {
const Kernels* portable_kernels(int64_t dtype) { return kernels(dtype); }
}  // namespace recurl
