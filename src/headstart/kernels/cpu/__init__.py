"""Kernels for CPUs in C++, compiled on first use: `build.py` compiles, `load.py` loads, `kernels.h` lists them."""
