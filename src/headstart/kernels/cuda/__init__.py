"""Kernels for NVIDIA cards. Beside every `.cu` file a module of its name launches what it holds."""
