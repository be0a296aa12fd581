"""Open the prefix cache of a model, on a disk under a name of everything that decides the bits of its states."""

import hashlib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from ..error_log import LOG
from ..models import Model
from ..state import CHUNK, DiskPrefix, PrefixCache
from ..state.disk_prefix import PrefixFolderError

SOURCES = {".py", ".cpp", ".h", ".cu", ".metal"}


@dataclass(frozen=True)
class PrefixOptions:
    """How prefixes are kept: in eight bits, which is not exact, and besides memory in a folder, across restarts."""

    eight_bits: bool = False
    folder: Path | None = None
    folder_bytes: int = 0

    def open(self, max_bytes: int, model: Model) -> PrefixCache:
        """Return a prefix cache for a model. A folder that cannot be used is left out with a warning."""
        disk = None
        if self.folder is not None and max_bytes:
            try:
                identity = f"{state_identity(model)}, 8 bits: {self.eight_bits}"
                disk = DiskPrefix(self.folder, identity, self.folder_bytes)
            except PrefixFolderError as error:
                LOG.warning("prefixes are kept in memory only: %s", error)
        chunk = model.reading.backend.chunk
        return PrefixCache(max_bytes, eight_bits=self.eight_bits, disk=disk, chunk=chunk)


def state_identity(model: Model) -> str:
    """Return what must be the same for two processes to compute the same states: versions, sources, the device and
    its kernels, every weight, the tower's and its rules for pixels too, and, as a proof, what they make of a chunk of
    tokens."""
    package = Path(__file__).parents[1]
    sources = hashlib.sha256()
    for file in sorted(path for path in package.rglob("*") if path.suffix in SOURCES):
        sources.update(file.read_bytes())
    adapters = [(name, adapter.digest) for name, adapter in model.adapters.items()]
    beside = [model.tower, None if model.drafter is None else model.drafter.weights]
    parts = [model.weights, *(each for each in beside if each is not None)]
    parameters: list[tuple[str, mx.array]] = [
        each for part in parts for each in dict(tree_flatten(part.parameters())).items()
    ]
    parameters += [(f"table {n}", table.sample()) for n, table in enumerate(model.tables)]
    weights = [(name, a.shape, str(a.dtype), _sum_bits(a).item()) for name, a in parameters]
    tokens = mx.arange(min(CHUNK, model.context_length - 1))[None] % model.vocabulary
    proof = hashlib.sha256(bytes(model.proof(tokens).view(mx.uint8))).hexdigest()
    versions = [version(name) for name in ("headstart", "mlx", "mlx-lm")]
    reader = model.reading.backend
    device = [str(reader), reader.chunk, *(mx.device_info().get(name) for name in ("architecture", "device_name"))]
    settings = [model.config, model.dtype_name, model.eight_bit_kv, model.tower and model.tower.rules]
    return repr((versions, sources.hexdigest(), device, settings, weights, adapters, proof))


def _sum_bits(array: mx.array) -> mx.array:
    """Return the sum of an array's bits as whole numbers, modulo 2^32."""
    flat = array.reshape(-1)
    return flat.view(mx.uint8 if flat.nbytes % 4 else mx.uint32).astype(mx.uint32).sum()
