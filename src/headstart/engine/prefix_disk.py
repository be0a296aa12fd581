"""Open the prefix cache on a disk for a model, under a name of everything that decides the bits of its states."""

import hashlib
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from ..kernels import selected
from ..models import Model
from ..state import CHUNK, DiskPrefix
from ..state.disk_prefix import PrefixFolderError
from .log import LOG

SOURCES = {".py", ".cpp", ".h", ".cu", ".metal"}


def open_disk_prefix(folder: Path, max_bytes: int, model: Model, *, eight_bits: bool = False) -> DiskPrefix | None:
    """Return the entries of this model in `folder`; None, with a warning, if the folder cannot be used."""
    try:
        return DiskPrefix(folder, f"{state_identity(model)}, 8 bits: {eight_bits}", max_bytes)
    except PrefixFolderError as error:
        LOG.warning("prefixes are kept in memory only: %s", error)
        return None


def state_identity(model: Model) -> str:
    """Return what must be the same for two processes to compute the same states: versions, sources, the device and
    its kernels, every weight, and, as a proof, what they make of a chunk of tokens."""
    package = Path(__file__).parents[1]
    sources = hashlib.sha256()
    for file in sorted(path for path in package.rglob("*") if path.suffix in SOURCES):
        sources.update(file.read_bytes())
    parameters: dict[str, mx.array] = dict(tree_flatten(model.weights.parameters()))
    weights = [(name, a.shape, str(a.dtype), _sum_bits(a).item()) for name, a in parameters.items()]
    tokens = mx.arange(min(CHUNK, model.context_length - 1))[None] % model.vocabulary
    hidden = model.trunk(tokens, model.make_state(1), certain=tokens.shape[1])
    proof = hashlib.sha256(bytes(hidden.view(mx.uint8))).hexdigest()
    versions = [version(name) for name in ("headstart", "mlx", "mlx-lm")]
    device = [selected(), *(mx.device_info().get(name) for name in ("architecture", "device_name"))]
    return repr(
        (versions, sources.hexdigest(), device, model.config, model.dtype_name, model.eight_bit_kv, weights, proof)
    )


def _sum_bits(array: mx.array) -> mx.array:
    """Return the sum of an array's bits as whole numbers, modulo 2^32."""
    flat = array.reshape(-1)
    return flat.view(mx.uint8 if flat.nbytes % 4 else mx.uint32).astype(mx.uint32).sum()
