"""How `convert` and `graft` quantise: the trunk as mlx-lm does or by a table, the head with bits of its own."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.convert import mixed_quant_predicate_builder

from ..errors import CheckpointError
from ..models import HeadSpec
from .config import read_object
from .parameters import BITS, GROUP_SIZES

ROUTERS = ("mlp.gate", "mlp.gate.gate", "mlp.router.classifier", "mlp.shared_expert_gate", "router.proj")
ROUTER = {"group_size": 64, "bits": 8}  # as mlx-lm writes it: affine
# Bits and numbers that share a scale; the first of a mode are its own where none are asked for.
MODES = {"affine": (BITS, (64, 32, 128)), "mxfp4": ((4,), (32,)), "mxfp8": ((8,), (32,)), "nvfp4": ((4,), (16,))}
KEEP = "keep"
# Not quantised: what decides between tokens and what mixes residual streams, little of a model.
DECIDES = (
    *("index_qk_proj", "indexer.wq_b", "indexer.wk", "indexer.weights_proj", "index_kpool_compress_gate"),
    *("input_mix_weight_down", "input_mix_weight_up", "block_inject_weight", "hc.fn"),
    *("indexer.q_b_proj", "indexer.scorer.weights_proj"),
    *("compressor.kv_proj", "compressor.gate_proj", "compressor.indexer.kv_proj", "compressor.indexer.gate_proj"),
)

Quantization = dict[str, Any]  # group_size, bits, mode: what MLX's functions take
Choose = Callable[[str, nn.Module], Quantization | None]  # by the path of a module and the module


def quantization(mode: str | None, bits: int | None, group_size: int | None) -> Quantization | None:
    """Return what the options say, None if nothing is quantised."""
    if mode is None and bits is None:
        return None
    mode = mode or "affine"
    if mode not in MODES:
        raise CheckpointError(f"mode {mode}: mlx has {', '.join(MODES)}.")
    all_bits, sizes = MODES[mode]
    if mode == "affine" and bits is None:
        raise CheckpointError(f"mode affine: say with how many bits (--bits {', '.join(map(str, BITS))}).")
    bits, group_size = bits or all_bits[0], group_size or sizes[0]
    if bits not in all_bits:
        raise CheckpointError(
            f"{bits} bits: mlx quantises to {', '.join(map(str, all_bits))} bits in the mode {mode}."
        )
    if group_size not in sizes:
        known = ", ".join(map(str, sorted(sizes)))
        raise CheckpointError(f"groups of {group_size}: mlx quantises in groups of {known} in the mode {mode}.")
    return {"group_size": group_size, "bits": bits, "mode": mode}


def named_quantization(name: object, group_size: int | None = None) -> Quantization | None:
    """Return what a number of bits, a mode, `keep` or an object of a table stands for."""
    if isinstance(name, dict) and name.keys() <= {"bits", "mode", "group_size"}:
        return quantization(name.get("mode"), name.get("bits"), name.get("group_size", group_size))
    text = str(name)
    if text == KEEP or text in MODES:
        return None if text == KEEP else quantization(text, None, None)
    if not text.isdigit():
        raise CheckpointError(f"{text}: say {KEEP}, a number of bits, or a mode of {', '.join([*MODES][1:])}.")
    return quantization("affine", int(text), group_size if group_size in GROUP_SIZES else None)


@dataclass(frozen=True)
class Recipe:
    """The options of a conversion.

    Args:
        bits, group_size, mode: Of the trunk's matrices. Without bits and mode they are not quantised.
        mix: What more important matrices get instead, by mlx-lm's rule for mixtures: a number of bits or a mode. Or a
            JSON file, of patterns of mlx-lm's names and what the matrices get of which each is the first that fits.
        mtp_bits: Of the head: "keep", or a number. None: 8 where the trunk is quantised, else not quantised. `mtp.fc`
            and norms are never quantised.
        dequantize: What is quantised is widened first, instead of staying as it is.
    """

    dtype: mx.Dtype
    bits: int | None = None
    group_size: int | None = None
    mtp_bits: str | int | None = None
    mode: str | None = None
    mix: str | int | Path | None = None
    dequantize: bool = False

    def __post_init__(self) -> None:
        quantization(self.mode, self.bits, self.group_size)
        if self.group_size is not None and self.bits is None and self.mode is None:
            quantization("affine", 4, self.group_size)  # of the head
        if str(self.mtp_bits) not in ("None", KEEP, *map(str, BITS)):
            raise CheckpointError(f"--mtp-bits {self.mtp_bits}: say keep, or one of {', '.join(map(str, BITS))}.")
        if self.mix is not None and self.table is None:
            if self.common is None:
                raise CheckpointError(
                    "--mix says what some matrices get: say with --bits or --mode what the others do."
                )
            named_quantization(self.mix, self.group_size)

    @property
    def common(self) -> Quantization | None:
        """Return how matrices are quantised of which nothing else is said."""
        return quantization(self.mode, self.bits, self.group_size)

    @property
    def table(self) -> list[tuple[re.Pattern[str], Quantization | None]] | None:
        if self.mix is None or not str(self.mix).endswith(".json"):
            return None
        file = Path(str(self.mix))
        found = read_object(file, "Write patterns of names, and for each bits, a mode or keep.")
        try:
            return [(re.compile(name), named_quantization(how, self.group_size)) for name, how in found.items()]
        except (re.error, CheckpointError) as error:
            raise CheckpointError(f"{file}: {error}") from error

    @property
    def quantises(self) -> bool:
        return self.common is not None or self.table is not None

    @property
    def head_bits(self) -> int | None:
        """Return the bits of the head; None: not quantised."""
        if self.mtp_bits is None:
            return 8 if self.quantises else None
        return None if self.mtp_bits == KEEP else int(self.mtp_bits)

    def for_trunk(self, lm: nn.Module) -> Choose:
        common, table = self.common, self.table
        if table is not None:
            return lambda path, module: next((how for name, how in table if name.search(path)), common)
        if self.mix is None:
            return lambda path, module: common
        rule: Any = mixed_quant_predicate_builder("mixed_4_6", lm)
        more = named_quantization(self.mix, self.group_size)
        return lambda path, module: more if rule(path, module)["bits"] == 6 else common

    def for_head(self, spec: HeadSpec) -> Choose:
        group_size = self.group_size if self.group_size in GROUP_SIZES else None
        how = quantization("affine", self.head_bits, group_size) if self.head_bits else None
        kept = tuple(f".{name}" for name in (spec.names.fc, spec.names.added) if name)
        return lambda path, module: None if path.endswith(kept) else how


def choose_quantization(path: str, module: nn.Module, choose: Choose) -> Quantization | None:
    """Return what `choose` says of a module, 8 bits for a router, None where mlx-lm could not quantise it either."""
    found = choose(path, module) if hasattr(module, "to_quantized") and not path.endswith(DECIDES) else None
    if found and path.endswith(ROUTERS):
        found = ROUTER
    return found if found and module.weight.shape[-1] % found["group_size"] == 0 else None


def stored_quantization(how: dict[str, Quantization], recipe: Recipe) -> dict[str, Any]:
    """Return what config.json says of modules that are quantised `how`: what most are, and the others by name."""
    ways = [json.dumps(each, sort_keys=True) for each in how.values()]
    common = recipe.common or json.loads(max(sorted({*ways}), key=ways.count))
    return {**common, **{module: each for module, each in how.items() if each != common}}
