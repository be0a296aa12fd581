"""Measure what an image costs, beside mlx-vlm: time to decode and resize it, time and memory of the vision tower.

    python bench/images.py [--mlx-vlm PYTHON] [--sizes 512x512 1280x960] [--repeats 3]
                           [--depth 12] [--hidden 768] [--heads 12] [--dtype float32]

`--mlx-vlm` is the interpreter of an environment with `mlx-vlm[cpu]`; without it only Headstart is measured. The model
is random, its tower by default twelve blocks of width 768. Both run in processes of their own, and take turns, so
that a noisy machine shifts both; medians are printed, and the ratio within each repeat. Embeddings are compared.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
MAX_PIXELS = 16_777_216


def measure_headstart(folder: str) -> None:
    import mlx.core as mx
    import numpy as np

    from headstart.checkpoint import load_model
    from headstart.images import read_image

    tower = load_model(folder, vision=True, max_image_pixels=MAX_PIXELS).tower
    assert tower is not None

    def see(path: str) -> tuple[float, float, Any]:
        start = time.perf_counter()
        pixels = read_image(path, tower.rules)
        patches = tower.rules.patches(pixels)
        read = time.perf_counter()
        made = deque(tower.run(mx.array(patches), tower.rules.grid(pixels)), maxlen=1).pop()  # kept as in the engine
        mx.eval(made)
        return read - start, time.perf_counter() - read, np.array(made.astype(mx.float32))

    answer(see)


def measure_mlx_vlm(folder: str) -> None:
    import mlx.core as mx
    import numpy as np
    from mlx_vlm.utils import load_model
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = load_model(Path(folder))
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def see(path: str) -> tuple[float, float, Any]:
        start = time.perf_counter()
        made = processor(images=Image.open(path), return_tensors="np")
        read = time.perf_counter()
        dtype = model.vision_tower.patch_embed.proj.weight.dtype
        grid = mx.array(made["image_grid_thw"])
        found = model.vision_tower(mx.array(made["pixel_values"]).astype(dtype), grid)
        found = found[0] if isinstance(found, tuple) else found
        mx.eval(found)
        return read - start, time.perf_counter() - read, np.array(found.astype(mx.float32))

    answer(see)


def answer(see: Any) -> None:
    """Answer a line with a path by a line with what the image cost."""
    import mlx.core as mx

    print("ready", flush=True)
    for line in sys.stdin:
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        read, tower, made = see(line.strip())
        peak = mx.get_peak_memory() - held
        print(
            json.dumps({"read": read, "tower": tower, "peak": peak, "sample": made[::50, ::50].tolist()}), flush=True
        )


def start(python: str, kind: str, folder: str) -> "subprocess.Popen[str]":
    command = [python, __file__, "--measure", kind, folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while (line := process.stdout.readline()) and line != "ready\n":
        pass
    return process


def ask(process: "subprocess.Popen[str]", path: Path) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    print(path, file=process.stdin, flush=True)
    return dict(json.loads(process.stdout.readline()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlx-vlm", metavar="PYTHON")
    parser.add_argument("--sizes", nargs="+", default=["512x512", "1280x960"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        kind, folder = arguments.measure
        (measure_headstart if kind == "headstart" else measure_mlx_vlm)(folder)
        return

    sys.path.insert(0, str(TESTS))
    import mlx.core as mx
    import numpy as np

    from reference.pictures import picture
    from vision_models import encoded, write_with_tower

    with tempfile.TemporaryDirectory() as folder:
        sizes = {"depth": arguments.depth, "hidden_size": arguments.hidden, "intermediate_size": 4 * arguments.hidden,
                 "num_heads": arguments.heads, "patch_size": 16, "num_position_embeddings": 2304}  # fmt: skip
        write_with_tower(Path(folder), layout="converted", tower=sizes, dtype=getattr(mx, arguments.dtype))
        settings = json.loads((Path(folder) / "preprocessor_config.json").read_text())
        settings["size"] = {"shortest_edge": 65536, "longest_edge": MAX_PIXELS}
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(settings))
        processes = {"headstart": start(sys.executable, "headstart", folder)}
        if arguments.mlx_vlm:
            processes["mlx-vlm"] = start(arguments.mlx_vlm, "mlx-vlm", folder)
        print(f"| size | {arguments.dtype} | read, ms | tower, ms | memory, MB | tower relative to mlx-vlm |")
        print("| --- | --- | ---: | ---: | ---: | ---: |")
        for size in arguments.sizes:
            width, height = map(int, size.split("x"))
            path = Path(folder) / "picture.png"
            path.write_bytes(encoded(picture(width, height)))
            for process in processes.values():
                ask(process, path)  # compiles
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in processes}
            for _ in range(arguments.repeats):
                for name, process in processes.items():
                    found[name].append(ask(process, path))
            if "mlx-vlm" in found:
                samples = [np.array(found[name][0]["sample"]) for name in found]
                assert np.abs(samples[0] - samples[1]).max() < 0.05 * np.abs(samples[0]).max()
            for name, runs in found.items():
                read, tower = (1000 * statistics.median(run[each] for run in runs) for each in ("read", "tower"))
                others = found.get("mlx-vlm", runs)
                ratio = statistics.median(b["tower"] / a["tower"] for a, b in zip(runs, others, strict=True))
                peak = max(run["peak"] for run in runs) / 1e6
                print(f"| {size} | {name} | {read:.0f} | {tower:.0f} | {peak:.0f} | {ratio:.2f} × |")
        for process in processes.values():
            process.stdin.close()  # type: ignore[union-attr]
            process.wait()


if __name__ == "__main__":
    main()
