"""Measure what an image costs, beside mlx-vlm: time to decode and resize it, time and memory of the vision tower.

    python bench/images.py [--mlx-vlm PYTHON] [--sizes 512x512 1280x960] [--repeats 3]
                           [--depth 12] [--hidden 768] [--heads 12] [--dtype float32]

`--mlx-vlm` is the interpreter of an environment with `mlx-vlm[cpu]`; without it only Headstart is measured. The model
is random, its tower by default twelve blocks of width 768. Both run in processes of their own, and take turns, so
that a noisy machine shifts both; medians are printed, and the ratio within each repeat. Embeddings are compared.
"""

import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

MAX_PIXELS = 16_777_216
See = Callable[[str], tuple[float, mx.array]]  # when the image was read, and its embeddings


def headstart(folder: str) -> See:
    from headstart.checkpoint import load_model
    from headstart.images import read_image

    model = load_model(folder, vision=True, max_image_pixels=MAX_PIXELS)
    tower, backend = model.tower, model.backend
    assert tower is not None

    def see(path: str) -> tuple[float, mx.array]:
        pixels = read_image(path, tower.rules)
        read = time.perf_counter()  # the last of the steps, as the engine keeps it
        return read, deque(tower.run(backend, pixels), maxlen=1).pop()

    return see


def mlx_vlm(folder: str) -> See:
    from mlx_vlm.utils import load_model
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = load_model(Path(folder))
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def see(path: str) -> tuple[float, mx.array]:
        made = processor(images=Image.open(path), return_tensors="np")
        read = time.perf_counter()
        pixels = mx.array(made["pixel_values"]).astype(model.vision_tower.patch_embed.proj.weight.dtype)
        found = model.vision_tower(pixels, mx.array(made["image_grid_thw"]))
        return read, found[0] if isinstance(found, tuple) else found

    return see


def work(kind: str, folder: str) -> None:
    """Answer a path by what the image cost."""
    see = {"headstart": headstart, "mlx-vlm": mlx_vlm}[kind](folder)
    print("{}", flush=True)
    for path in sys.stdin:
        mx.reset_peak_memory()
        held, start = mx.get_active_memory(), time.perf_counter()
        read, made = see(json.loads(path))
        mx.eval(made)
        found = {"read": read - start, "tower": time.perf_counter() - read, "peak": mx.get_peak_memory() - held}
        sample = np.array(made.astype(mx.float32))[::50, ::50].tolist()
        print(json.dumps(found | {"sample": sample}), flush=True)


def write_model(folder: Path, given: Any) -> None:
    from vision_models import write_with_tower

    sizes = {"depth": given.depth, "hidden_size": given.hidden, "intermediate_size": 4 * given.hidden,
             "num_heads": given.heads, "patch_size": 16, "num_position_embeddings": 2304}  # fmt: skip
    write_with_tower(folder, layout="converted", tower=sizes, dtype=getattr(mx, given.dtype))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": 65536, "longest_edge": MAX_PIXELS}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def main() -> None:
    from harness import Worker, line, median, options, ratio, table, turns

    from reference.pictures import picture
    from vision_models import encoded

    given = options(
        __doc__, mlx_vlm="", sizes=["512x512", "1280x960"], repeats=3, depth=12, hidden=768, heads=12, dtype="float32"
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), given)
        pythons = {"headstart": sys.executable} | ({"mlx-vlm": given.mlx_vlm} if given.mlx_vlm else {})
        workers = {name: Worker(python, __file__, name, folder) for name, python in pythons.items()}
        table("size", given.dtype, "read, ms", "tower, ms", "memory, MB", "tower relative to mlx-vlm")
        for size in given.sizes:
            path = Path(folder) / "picture.png"
            path.write_bytes(encoded(picture(*map(int, size.split("x")))))
            found = turns({name: partial(each.ask, str(path)) for name, each in workers.items()}, given.repeats)
            samples = [np.array(several[0]["sample"]) for several in found.values()]
            assert np.abs(samples[0] - samples[-1]).max() < 0.05 * np.abs(samples[0]).max()
            columns = {name: {key: [run[key] for run in runs] for key in runs[0]} for name, runs in found.items()}
            for name, own in columns.items():
                times = [1e3 * median(own[key]) for key in ("read", "tower")]
                theirs = columns.get("mlx-vlm", own)["tower"]
                line(size, name, *times, max(own["peak"]) / 1e6, ratio(theirs, own["tower"]))
        for each in workers.values():
            each.end()


if __name__ == "__main__":
    work(*sys.argv[1:]) if sys.argv[1:2] in (["headstart"], ["mlx-vlm"]) else main()
