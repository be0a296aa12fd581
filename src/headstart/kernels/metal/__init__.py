"""Kernels for Apple GPUs, the counterparts of `kernels/cuda`. They have never been run on a Mac by us.

Each `.metal` file holds functions, and the module of its name launches them. When a model is loaded, `tune.py` says
what it computes and what may compute it, and `choice.py` compiles, checks and times that on the user's machine: a
kernel that does not compile, does not agree with stock ops or is not the fastest exact one is not used there.

Emulated, in `tests/kernels/metal_on_cpu.py`: the sources as they are, put together as MLX does it, with IEEE float32,
bfloat16 and float16 arithmetic; simdgroups of 32 lanes that meet in shuffles and barriers; threadgroup memory, at
first full of NaN; 8 x 8 matrices as MLX's own products have them in the lanes, and as much of Metal Performance
Primitives as is used, with another layout than any chip's; Metal's limits on buffers (31), threads (1024) and
threadgroup memory (32 KB). The texts as MLX makes them, with Metal's address spaces: checked by clang
in `tests/kernels/metal_as_opencl.py`.

Only a Mac can show:
- that Metal's own compiler takes the sources, on every macOS (language 3.1 to 4), and how long it takes;
- that it neither reorders nor fuses what `math_mode="safe"` and `#pragma METAL fp contract(off)` forbid, in one way
  for one row and in another for four: the check at load compares bits for 1 to 16 rows and for windows of any width;
- that units for matrices sum in the order of the kernel for one and two rows, and lie in the lanes as MLX has them:
  the check compares these, too; and that Metal Performance Primitives (M5) are called as their header has it;
- that a pipeline has enough registers for its threads: 512 of the gated delta rule, 256 of attention and of
  products of matrices. MLX refuses a launch of more than the pipeline takes: the last are then launched with 128, and
  stock ops compute instead of the others;
- the rounding of `precise::exp`, `exp2`, `log`, `sin`, `cos` and of division, which may differ from g++'s in the last
  bit, and of bfloat16 on M1 and M2, whose compiler emulates it;
- barriers and shuffles where hardware runs simdgroups side by side: the emulator takes turns in a fixed order, so it
  finds a missing barrier only where the order or the NaN shows it;
- stock ops by chip: from which number of rows on they change their kernel;
- every time, and so every choice: the figures that the layout of the kernels follows are others' (4 outputs by 4
  simdgroups that split k, or by each of 2; at most 16 sums a thread, so at most 4 rows a pass; passes over more rows
  beside each other, so that they share weights in a cache).
"""
