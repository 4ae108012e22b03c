"""GPUs for which kernels are chosen and compiled in tests."""

from recurl.recurrence.cuda.hardware import Hardware

KIB = 1024
H200 = Hardware((9, 0), 132, 227 * KIB, nvrtc=True, clusters=(66, 30, 15))
WITHOUT_NVRTC = Hardware((9, 0), 132, 227 * KIB)
OTHERS = {
    "A100": Hardware((8, 0), 108, 163 * KIB, nvrtc=True),
    "RTX 3090": Hardware((8, 6), 82, 99 * KIB, nvrtc=True),
    "RTX 4090": Hardware((8, 9), 128, 99 * KIB, nvrtc=True),
    "B200": Hardware((10, 0), 148, 227 * KIB, nvrtc=True, clusters=(74, 36, 16)),
    "RTX 5090": Hardware((12, 0), 170, 99 * KIB, nvrtc=True, clusters=(85, 42, 20)),
}
