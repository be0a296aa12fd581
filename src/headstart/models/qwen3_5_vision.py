"""The vision tower of Qwen3.5, Qwen3.6 and Qwen3.8. An image is two equal frames."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..images import QwenRules
from ..kernels import Backend
from .vision import TokenId, TowerSpec, VisionTower, attend, attention_bytes, interpolate, rotate

NORM_EPS = 1e-6
ROPE_BASE = 10000.0
PATCHES = "patch_embed.proj.weight"


@dataclass(frozen=True)
class QwenTowerShape:
    """The sizes in config.json's `vision_config`."""

    depth: int
    hidden: int
    intermediate: int
    heads: int
    out: int  # numbers of an embedding
    table: int  # position embeddings, a square
    patch: int  # pixels
    frames: int  # of a patch
    merge: int  # patches by side that become one token
    channels: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "QwenTowerShape":
        vision = config["vision_config"]
        return cls(
            depth=int(vision["depth"]),
            hidden=int(vision["hidden_size"]),
            intermediate=int(vision["intermediate_size"]),
            heads=int(vision["num_heads"]),
            out=int(vision["out_hidden_size"]),
            table=int(vision["num_position_embeddings"]),
            patch=int(vision["patch_size"]),
            frames=int(vision["temporal_patch_size"]),
            merge=int(vision["spatial_merge_size"]),
            channels=int(vision.get("in_channels", 3)),
        )


def mrope_axes(sections: list[int], frequencies: int) -> tuple[int, ...]:
    """Return for every frequency whether it takes the time (0), the row (1) or the column (2): interleaved."""
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(frequencies))


class QwenTowerMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int, out: int):
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden, intermediate)
        self.linear_fc2 = nn.Linear(intermediate, out)


class QwenTowerAttention(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)


class QwenTowerBlock(nn.Module):
    def __init__(self, shape: QwenTowerShape):
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.hidden, NORM_EPS)
        self.norm2 = nn.LayerNorm(shape.hidden, NORM_EPS)
        self.attn = QwenTowerAttention(shape.hidden)
        self.mlp = QwenTowerMLP(shape.hidden, shape.intermediate, shape.hidden)


class Merger(QwenTowerMLP):
    def __init__(self, shape: QwenTowerShape):
        wide = shape.hidden * shape.merge**2
        super().__init__(wide, wide, shape.out)
        self.norm = nn.LayerNorm(shape.hidden, NORM_EPS)


class PatchEmbed(nn.Module):
    def __init__(self, shape: QwenTowerShape):
        super().__init__()
        # Released as a convolution whose kernel is as large as its stride: a product.
        self.proj = nn.Linear(shape.channels * shape.frames * shape.patch**2, shape.hidden)


class QwenTower(VisionTower[QwenRules]):
    renamed = ((r"^(?:visual|vision_tower)\.", ""),)

    def __init__(self, config: dict[str, Any], rules: QwenRules, token_id: TokenId):
        rope, head = config["text_config"]["rope_parameters"], config["text_config"]["head_dim"]
        rotated = int(head * rope.get("partial_rotary_factor", 1.0))
        shape = QwenTowerShape.of(config)
        axes = mrope_axes(rope["mrope_section"], rotated // 2)
        super().__init__(TowerSpec(int(config["image_token_id"]), shape.out, axes), rules)
        self._shape = shape
        self.patch_embed = PatchEmbed(shape)
        self.pos_embed = nn.Embedding(shape.table, shape.hidden)
        self.blocks = [QwenTowerBlock(shape) for _ in range(shape.depth)]
        self.merger = Merger(shape)

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        shape = self._shape
        return {PATCHES: (shape.hidden, shape.channels, shape.frames, shape.patch, shape.patch)}

    @property
    def fits(self) -> bool:
        ours = self._shape.patch, self._shape.merge, self._shape.frames
        return (self.rules.patch, self.rules.merge, self.rules.frames) == ours

    def spell(self, pixels: np.ndarray) -> list[int]:
        return [self.spec.image_token] * (self.count_patches(pixels) // self._shape.merge**2)

    def places(self, pixels: np.ndarray) -> np.ndarray:
        rows, columns = (side // self._shape.merge for side in self.rules.grid(pixels))
        return np.indices((1, rows, columns)).reshape(3, -1)

    def count_patches(self, pixels: np.ndarray) -> int:
        rows, columns = self.rules.grid(pixels)
        return rows * columns

    def working_bytes(self, size: int) -> int:
        shape = self._shape
        widest = max(shape.intermediate, 3 * shape.hidden)
        return attention_bytes(self.rules.max_pixels // shape.patch**2, shape.heads, shape.hidden, widest, size)

    def run(self, backend: Backend, pixels: np.ndarray) -> Iterator[mx.array]:
        grid = self.rules.grid(pixels)
        patches, places = mx.array(self.rules.patches(pixels)), _places(grid, self._shape.merge)
        x = backend.product(patches.astype(self.patch_embed.proj.weight.dtype), self.patch_embed.proj)
        x = x + self._position_embedding(places, grid).astype(x.dtype)
        cosine, sine = self._turns(places)
        for block in self.blocks:
            x = x + self._attend(backend, block.attn, block.norm1(x), cosine, sine)
            inner = nn.gelu_approx(backend.product(block.norm2(x), block.mlp.linear_fc1))
            x = x + backend.product(inner, block.mlp.linear_fc2)
            yield x
        x = self.merger.norm(x).reshape(-1, self.merger.linear_fc1.weight.shape[1])
        yield backend.product(nn.gelu(backend.product(x, self.merger.linear_fc1)), self.merger.linear_fc2)

    def _attend(
        self, backend: Backend, layer: QwenTowerAttention, x: mx.array, cosine: mx.array, sine: mx.array
    ) -> mx.array:
        N, heads = x.shape[0], self._shape.heads
        qkv = backend.product(x, layer.qkv).reshape(N, 3, heads, -1).transpose(1, 2, 0, 3)[:, None]  # [3, 1, H, N, D]
        queries, keys = (rotate(each, cosine, sine) for each in (qkv[0], qkv[1]))
        return backend.product(attend(queries, keys, qkv[2], float(queries.shape[-1] ** -0.5)), layer.proj)

    def _position_embedding(self, places: np.ndarray, grid: tuple[int, int]) -> mx.array:
        """Return the table of position embeddings, stretched over the grid: [N, hidden] in float32."""
        side = int(self._shape.table**0.5)
        sizes = np.array([max(size - 1, 1) for size in grid], np.float32)
        return interpolate(self.pos_embed.weight, places.astype(np.float32) * np.float32(side - 1) / sizes)

    def _turns(self, places: np.ndarray) -> tuple[mx.array, mx.array]:
        """Return cosines and sines [N, D / 2] by which queries and keys are rotated: by row, then by column."""
        frequencies = mx.array(self._frequencies)
        angles = mx.array(places.astype(np.float32))[..., None] * frequencies  # [N, 2, D / 4]
        return mx.cos(angles).reshape(len(places), -1), mx.sin(angles).reshape(len(places), -1)

    @cached_property
    def _frequencies(self) -> np.ndarray:
        quarter = self._shape.hidden // self._shape.heads // 4
        return (ROPE_BASE ** (-np.arange(quarter) / quarter)).astype(np.float32)


def _places(grid: tuple[int, int], merge: int) -> np.ndarray:
    """Return row and column [N, 2] of every patch. The patches that become one token follow one another."""
    rows, columns = np.indices(grid)
    blocks = (grid[0] // merge, merge, grid[1] // merge, merge)
    return np.stack([each.reshape(blocks).swapaxes(1, 2).reshape(-1) for each in (rows, columns)], axis=1)
