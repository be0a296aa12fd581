"""The vision tower of Step-3.7: every view of an image by itself, then two convolutions that halve its sides."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..images import StepRules
from ..kernels import Backend
from .vision import TokenId, TowerSpec, VisionTower, attend, attention_bytes, interpolate, rotate

IMAGE = 151679  # token, where config.json does not name it
AROUND = "<im_start>", "<im_end>", "<patch_start>", "<patch_end>"  # the whole image, and its parts
NEXT_ROW = "<patch_newline>"  # after the last part of a row, but not of the last row
STRIDE = 4  # patches by side that become one token


@dataclass(frozen=True)
class StepTowerShape:
    """The sizes in config.json's `vision_config`, by the names of releases or transformers'."""

    depth: int
    hidden: int
    intermediate: int
    heads: int
    patch: int  # pixels
    table: int  # position embeddings by side
    channels: int
    eps: float
    base: float  # of RoPE

    @classmethod
    def of(cls, vision: dict[str, Any]) -> "StepTowerShape":
        hidden = int(vision.get("width", vision.get("hidden_size", 1536)))
        patch, rope = int(vision.get("patch_size", 14)), vision.get("rope_parameters") or {}
        return cls(
            depth=int(vision.get("layers", vision.get("num_hidden_layers", 47))),
            hidden=hidden,
            intermediate=int(hidden * vision.get("mlp_ratio", 8960 / 1536)),
            heads=int(vision.get("heads", vision.get("num_attention_heads", 16))),
            patch=patch,
            table=int(vision.get("image_size", 728)) // patch,
            channels=int(vision.get("num_channels", 3)),
            eps=float(vision.get("layer_norm_eps", 1e-5)),
            base=float(rope.get("rope_theta", 10000.0)),
        )


class LayerScale(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.gamma = mx.ones((hidden,))


class StepTowerAttention(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.in_proj = nn.Linear(hidden, 3 * hidden)
        self.out_proj = nn.Linear(hidden, hidden)


class StepTowerMLP(nn.Module):
    def __init__(self, shape: StepTowerShape):
        super().__init__()
        self.c_fc = nn.Linear(shape.hidden, shape.intermediate)
        self.c_proj = nn.Linear(shape.intermediate, shape.hidden)


class StepTowerBlock(nn.Module):
    def __init__(self, shape: StepTowerShape):
        super().__init__()
        self.attn = StepTowerAttention(shape.hidden)
        self.mlp = StepTowerMLP(shape)
        self.ln_1 = nn.LayerNorm(shape.hidden, shape.eps)
        self.ln_2 = nn.LayerNorm(shape.hidden, shape.eps)
        self.ls_1 = LayerScale(shape.hidden)
        self.ls_2 = LayerScale(shape.hidden)


class StepTowerBlocks(nn.Module):
    def __init__(self, shape: StepTowerShape):
        super().__init__()
        self.resblocks = [StepTowerBlock(shape) for _ in range(shape.depth)]


class Views(nn.Module):
    def __init__(self, shape: StepTowerShape):
        super().__init__()
        # Released as a convolution whose kernel is as large as its stride: a product.
        self.conv1 = nn.Linear(shape.channels * shape.patch**2, shape.hidden, bias=False)
        self.positional_embedding = mx.zeros((shape.table**2, shape.hidden))
        self.ln_pre = nn.LayerNorm(shape.hidden, shape.eps)
        self.transformer = StepTowerBlocks(shape)
        self.vit_downsampler1 = nn.Conv2d(shape.hidden, 2 * shape.hidden, 3, stride=2, padding=1)
        self.vit_downsampler2 = nn.Conv2d(2 * shape.hidden, 4 * shape.hidden, 3, stride=2, padding=1)


class StepTower(VisionTower[StepRules]):
    renamed = (
        (r"\.in_proj_(weight|bias)$", r".in_proj.\1"),
        (r"^(vision_model\.transformer)\.(\d+)\.", r"\1.resblocks.\2."),  # as in mlx-vlm
    )

    def __init__(self, config: dict[str, Any], rules: StepRules, token_id: TokenId):
        spec = TowerSpec(int(config.get("image_token_id", IMAGE)), int(config["text_config"]["hidden_size"]))
        super().__init__(spec, rules)
        self._token_id, self._shape = token_id, StepTowerShape.of(config["vision_config"])
        shape, bias = self._shape, bool(config.get("projector_bias", False))
        self.vision_model = Views(shape)
        self.vit_large_projector = nn.Linear(4 * shape.hidden, spec.out, bias=bias)

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        hidden, patch, model = self._shape.hidden, self._shape.patch, "vision_model."
        return {
            f"{model}conv1.weight": (hidden, self._shape.channels, patch, patch),
            f"{model}vit_downsampler1.weight": (2 * hidden, hidden, 3, 3),
            f"{model}vit_downsampler2.weight": (4 * hidden, 2 * hidden, 3, 3),
        }

    @cached_property
    def _special(self) -> dict[str, int]:
        return {text: self._token_id(text) for text in (*AROUND, NEXT_ROW)}

    @property
    def fits(self) -> bool:
        side = STRIDE * self._shape.patch
        return bool(self._special) and not self.rules.whole % side and not self.rules.part % side

    def spell(self, pixels: np.ndarray) -> list[int]:
        view, end, part, part_end = (self._special[text] for text in AROUND)
        image, rules = self.spec.image_token, self.rules
        whole, cut = ((side // (STRIDE * self._shape.patch)) ** 2 for side in (rules.whole, rules.part))
        made: list[int] = []
        rows, columns = rules.parts(pixels)
        for row, column in np.ndindex(rows, columns):
            made += [part, *[image] * cut, part_end]
            made += [self._special[NEXT_ROW]] if column == columns - 1 and row < rows - 1 else []
        return [*made, view, *[image] * whole, end]

    def count_patches(self, pixels: np.ndarray) -> int:
        return (self.rules.whole // self._shape.patch) ** 2

    def working_bytes(self, size: int) -> int:
        shape, patches = self._shape, (self.rules.whole // self._shape.patch) ** 2
        return attention_bytes(patches, shape.heads, shape.hidden, max(shape.intermediate, 3 * shape.hidden), size)

    def run(self, backend: Backend, pixels: np.ndarray) -> Iterator[mx.array]:
        made = []
        for view in self.rules.views(pixels):
            x = mx.zeros((0,))
            for x in self._run_view(backend, view):
                yield x
            made.append(x)
        yield mx.concatenate(made)

    def _run_view(self, backend: Backend, view: np.ndarray) -> Iterator[mx.array]:
        model, shape, side = self.vision_model, self._shape, view.shape[0] // self._shape.patch
        patches = view.reshape(side, shape.patch, side, shape.patch, -1).transpose(0, 2, 4, 1, 3).reshape(side**2, -1)
        places = np.indices((side, side)).reshape(2, -1).T.astype(np.float32)  # row and column of every patch, [N, 2]
        x = backend.product(mx.array(patches).astype(model.conv1.weight.dtype), model.conv1)
        at = np.maximum((places + np.float32(0.5)) * np.float32(shape.table / side) - np.float32(0.5), 0)
        x = model.ln_pre(x + interpolate(model.positional_embedding, at).astype(x.dtype))
        quarter = shape.hidden // shape.heads // 4
        frequencies = (shape.base ** (-np.arange(quarter) / quarter)).astype(np.float32)
        angles = (places[:, ::-1, None] * frequencies).reshape(-1, 1, 2 * quarter)  # by column, then by row
        turns = mx.cos(mx.array(angles)), mx.sin(mx.array(angles))  # [N, 1, D / 2]
        for block in model.transformer.resblocks:
            x = x + block.ls_1.gamma * self._attend(backend, block.attn, block.ln_1(x), turns)
            inner = backend.product(block.ln_2(x), block.mlp.c_fc)
            x = x + block.ls_2.gamma * backend.product(nn.gelu_fast_approx(inner), block.mlp.c_proj)
            yield x
        x = model.vit_downsampler2(model.vit_downsampler1(x.reshape(1, side, side, -1)))
        yield backend.product(x.reshape(-1, x.shape[-1]), self.vit_large_projector)

    def _attend(
        self, backend: Backend, layer: StepTowerAttention, x: mx.array, turns: tuple[mx.array, mx.array]
    ) -> mx.array:
        N, heads = x.shape[0], self._shape.heads
        queries, keys, values = backend.product(x, layer.in_proj).reshape(N, 3, heads, -1).swapaxes(0, 1)
        queries, keys = (rotate(_halves(each), *turns) for each in (queries, keys))  # [N, H, D]
        queries, keys, values = (a.swapaxes(0, 1)[None] for a in (queries, keys, values))  # [1, H, N, D]
        return backend.product(attend(queries, keys, values, float(queries.shape[-1] ** -0.5)), layer.out_proj)


def _halves(x: mx.array) -> mx.array:
    """Return [..., D], in which neighbours are pairs, with the first of all pairs before the second."""
    return mx.unflatten(x, -1, (-1, 2)).swapaxes(-1, -2).flatten(-2)
