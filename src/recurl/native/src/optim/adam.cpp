// A step of Adam, on one thread.
#include "../driver.h"

int recurl_native_adam(const recurl_adam* adam) {
  return recurl::guarded(adam->isa, [&] { recurl::kernels_of(adam->isa, adam->dtype)->adam(adam); });
}
