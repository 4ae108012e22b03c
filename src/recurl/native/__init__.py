"""C++ library: layers, recurrences, programs, losses and Adam on a CPU, with AVX-512, AVX2 and portable kernels.

The sources are in ``src``, with the C interface in ``src/recurl_native.h``.
"""
