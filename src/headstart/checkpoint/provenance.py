"""Is a file as released or converted to MLX? It decides whether its norms are stored as w or as 1 + w.

Never by the values: the mean of a converted `pre_fc_norm_embedding` is 0.27 and looks raw (omlx#3742). What
counts is where the file comes from, and where that cannot be told nothing is guessed.
"""

import re
from typing import Literal

from .headers import Header
from .untrusted import read_object

Provenance = Literal["raw", "converted"]

PER_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
FUSED = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj")


def of_shards(headers: list[Header]) -> list[Provenance | None]:
    """For files of one index: a file's conv1d decides, or that of others saved in the same format."""
    by_format = {header.format: kind for header in headers if (kind := _of_conv1d(header))}
    return [_of_conv1d(header) or by_format.get(header.format) or _of_marks(header) for header in headers]


def of_sidecar(header: Header) -> Provenance | None:
    """For a head in a file of its own. vllm-mlx writes a manifest beside it."""
    try:
        manifest = read_object(header.path.with_name("manifest.json"))
    except FileNotFoundError:
        manifest = {}
    if manifest.get("rmsnorm_weight_format") == "mlx_gamma":
        return "converted"
    return _of_conv1d(header) or _of_marks(header)


def _of_conv1d(header: Header) -> Provenance | None:
    """[C, 1, K] as released, [C, K, 1] converted."""
    for name, tensor in header.tensors.items():
        if name.endswith("conv1d.weight"):
            return "converted" if tensor.shape[-1:] == (1,) else "raw"
    return None


def _of_marks(header: Header) -> Provenance | None:
    """What the metadata and the names say, where they agree."""
    names = "\n".join(header.tensors)
    packed = ".scales\n" in names + "\n"
    says: set[Provenance] = set()
    if header.format == "mlx" or packed or ".switch_mlp." in names or "language_model.mtp." in names:
        says.add("converted")
    if header.format == "pt" or PER_EXPERT.search(names) or "_scale_inv" in names:
        says.add("raw")
    # vllm-mlx shifts the norms of Qwen3.6 heads and leaves the experts fused.
    if FUSED.search(names) and not packed and not header.written_by_mlx:
        says.add("raw")
    return says.pop() if len(says) == 1 else None
