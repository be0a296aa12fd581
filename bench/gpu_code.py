"""Compile a model's CUDA kernels on a machine without a card, and print what their machine code is like.

    python bench/gpu_code.py [27b | 35b ...] [--rows 1 16] [--k 0 3]

A layer's kernel is limited by its code: how large it is, and how many instructions the inner loops of its products
have, reads of spilled registers among them. A small change of the source can change both (docs/gpu.md).

Needs NVRTC (`pip install nvidia-cuda-nvrtc`; name its folder in LD_LIBRARY_PATH), the headers of CUDA, and its
cuobjdump and nvdisasm on PATH (Triton's package has them). The kernels are described by steps of four layers whose
arrays are never computed.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx

from headstart.kernels.cuda import device

ATTRIBUTES = {75: 9, 76: 0, 16: 132, 97: 232448}  # of an H200: compute capability, multiprocessors, shared memory


def simulate_card(folder: Path) -> dict[str, str]:
    """Have kernels described and compiled as on an H200, and nothing evaluated. Return a place for their texts, by
    the names of their files."""
    device.on_cuda = lambda: True
    device.device_attribute = ATTRIBUTES.__getitem__
    mx.cuda.is_available = lambda: True
    mx.default_device = lambda: mx.gpu  # which `choose_backend` asks for
    mx.eval = mx.async_eval = mx.synchronize = lambda *arrays: None

    def cuda_kernel(**text: Any) -> Any:
        def launch(*, output_shapes: Any, output_dtypes: Any, **rest: Any) -> list[mx.array]:
            return [mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    mx.fast.cuda_kernel = cuda_kernel
    from headstart.kernels.cuda import compiler, full_matrix  # which take the functions above
    from headstart.models import reading

    full_matrix.heights_of = lambda *shape: full_matrix.HEIGHTS  # which are tried on a card
    reading._problem = lambda *models: None

    def compile_here(path: Path, name: str, text: str) -> None:
        found[path.stem] = text
        compile_kernel(path, name, text)

    compile_kernel, found = compiler._compile, dict[str, str]()
    compiler._compile, compiler.compiled_folder = compile_here, lambda: folder
    compiler._warn = lambda reason: sys.exit(f"not compiled: {reason}")
    return found


def describe(shape: dict[str, Any], rows: list[int], depths: list[int]) -> None:
    """Describe steps of a model of this shape."""
    import gpu

    from headstart.engine.step import prefill_prompts, step

    model, _ = gpu.random_model(shape | {"num_hidden_layers": 4})
    for count in rows:
        for k in depths:
            batch = prefill_prompts(model, gpu.prompts(count), max_k=k)
            for _ in range(3):
                step(model, batch, k)


def read_code(code: Path) -> tuple[int, list[str]]:
    """Return how many KB of instructions a kernel has, and a line for every innermost loop that multiplies in tensor
    cores."""
    listing = subprocess.run(["nvdisasm", "-c", code], capture_output=True, text=True, check=True).stdout
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?) *;", line):
            lines.append(instruction[1])
    jumps = [(i, re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) for i, line in enumerate(lines)]
    loops = sorted((labels[to[1]], i) for i, to in jumps if to and labels[to[1]] <= i)
    loops = [(a, b) for a, b in loops if any(line.startswith("HMMA") for line in lines[a : b + 1])]
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    made = []
    for begin, end in inner:
        of = Counter(line.split(".")[0].split()[0] for line in lines[begin : end + 1])
        made.append(f"at {begin * 16 // 1024} KB: {end - begin + 1} ({of['HMMA']}, {of['LDL']})")
    return len(lines) * 16 // 1024, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["27b", "35b"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--k", type=int, nargs="+", default=[0, 3])
    given = parser.parse_args()
    if missing := [tool for tool in ("cuobjdump", "nvdisasm") if shutil.which(tool) is None]:
        sys.exit(f"{' and '.join(missing)} not found: put CUDA's tools, or those in Triton's package, on PATH")
    with tempfile.TemporaryDirectory() as folder:
        texts = simulate_card(Path(folder))
        import gpu

        from headstart.kernels.cuda.compiler import _nvrtc_version

        print(f"NVRTC {_nvrtc_version()}\n")
        print(
            "| kernel | KB | registers | spilled, bytes | inner loops: instructions (in tensor cores, spills read) |"
        )
        print("| --- | --- | --- | --- | --- |")
        seen: set[str] = set()
        for name in given.shapes:
            describe(gpu.SHAPES[name], given.rows, given.k)
            for code in sorted(Path(folder).glob("*.ptx")):
                if code.stem in seen:
                    continue
                seen.add(code.stem)
                text, kind = texts[code.stem], re.sub("custom_kernel_|_[0-9a-f]{12,16}$", "", code.stem)
                if "decoder_layer" in kind:
                    kind = f"{name}: layer, {'GatedDeltaNet' if 'run_heads' in text else 'attention'}"
                    kind += ", with drafts" * ("old_drafts" in text)
                used = subprocess.run(["cuobjdump", "-res-usage", code], capture_output=True, text=True, check=True)
                registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", used.stdout + used.stderr)[0]
                size, loops = read_code(code)
                print(f"| {kind} | {size} | {registers} | {stack} | {'; '.join(loops)} |", flush=True)


if __name__ == "__main__":
    main()
