// An empty kernel, used to query the driver for the number of clusters that fit on a GPU.

extern "C" __global__ void nothing_kernel() {}
