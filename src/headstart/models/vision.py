"""The vision tower of Qwen3.5, Qwen3.6 and Qwen3.8: from pixels to embeddings that take the place of tokens'.

Modules have upstream's names. Only images are known, no videos: an image is two equal frames.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..images import ImageRules
from ..kernels import Backend

NORM_EPS = 1e-6
ROPE_BASE = 10000.0
MAX_SCORES = 2**25  # attention scores that exist at a time: a large image has thousands of patches


@dataclass(frozen=True)
class VisionShape:
    """The sizes in config.json's `vision_config`, and what the trunk must know of images."""

    depth: int
    hidden: int
    intermediate: int
    heads: int
    out: int  # the trunk's hidden size
    table: int  # position embeddings, a square
    patch: int  # pixels
    frames: int  # of a patch
    merge: int  # patches by side that become one token
    channels: int
    image_token: int  # stands for images in prompts
    axes: tuple[int, ...]  # which of time, row and column each frequency of the trunk's RoPE takes

    @classmethod
    def of(cls, config: dict[str, Any]) -> "VisionShape":
        vision, rope = config["vision_config"], config["text_config"]["rope_parameters"]
        rotated = int(config["text_config"]["head_dim"] * rope.get("partial_rotary_factor", 1.0))
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
            image_token=int(config["image_token_id"]),
            axes=mrope_axes(rope["mrope_section"], rotated // 2),
        )


def mrope_axes(sections: list[int], frequencies: int) -> tuple[int, ...]:
    """Return for every frequency whether it takes the time (0), the row (1) or the column (2): interleaved."""
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(frequencies))


class VisionMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int, out: int):
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden, intermediate)
        self.linear_fc2 = nn.Linear(intermediate, out)


class VisionAttention(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)


class VisionBlock(nn.Module):
    def __init__(self, shape: VisionShape):
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.hidden, NORM_EPS)
        self.norm2 = nn.LayerNorm(shape.hidden, NORM_EPS)
        self.attn = VisionAttention(shape.hidden)
        self.mlp = VisionMLP(shape.hidden, shape.intermediate, shape.hidden)


class Merger(VisionMLP):
    def __init__(self, shape: VisionShape):
        wide = shape.hidden * shape.merge**2
        super().__init__(wide, wide, shape.out)
        self.norm = nn.LayerNorm(shape.hidden, NORM_EPS)


class PatchEmbed(nn.Module):
    def __init__(self, shape: VisionShape):
        super().__init__()
        # Released as a convolution whose kernel is as large as its stride: a product.
        self.proj = nn.Linear(shape.channels * shape.frames * shape.patch**2, shape.hidden)


class VisionTower(nn.Module):
    """The weights, and the passes over them."""

    def __init__(self, shape: VisionShape, rules: ImageRules):
        super().__init__()
        self._shape, self._rules = shape, rules  # names with an underscore are no parameters
        self.patch_embed = PatchEmbed(shape)
        self.pos_embed = nn.Embedding(shape.table, shape.hidden)
        self.blocks = [VisionBlock(shape) for _ in range(shape.depth)]
        self.merger = Merger(shape)

    @property
    def shape(self) -> VisionShape:
        return self._shape

    @property
    def rules(self) -> ImageRules:
        return self._rules

    def count_tokens(self, pixels: np.ndarray) -> int:
        """Return how many tokens an image [H, W, 3] takes that `images.read_image` has resized."""
        rows, columns = self.rules.grid(pixels)
        return rows * columns // self.shape.merge**2

    def working_bytes(self, size: int) -> int:
        """Return the memory that the largest image takes on its way, in activations of `size` bytes."""
        shape, patches = self.shape, self.rules.max_pixels // self.shape.patch**2
        scores = min(MAX_SCORES, shape.heads * patches**2)
        return patches * (4 * shape.hidden + 2 * max(shape.intermediate, 3 * shape.hidden)) * size + 8 * scores

    def run(self, backend: Backend, patches: mx.array, grid: tuple[int, int]) -> Iterator[mx.array]:
        """Compute the embeddings [N / merge², out] of an image's patches [N, …], laid out in `grid` rows and columns.

        Yields what one block after another makes, so that the caller can do other work between them. The last value
        is the result.
        """
        places = _places(grid, self.shape.merge)
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
        self, backend: Backend, layer: VisionAttention, x: mx.array, cosine: mx.array, sine: mx.array
    ) -> mx.array:
        N, heads = x.shape[0], self.shape.heads
        qkv = backend.product(x, layer.qkv).reshape(N, 3, heads, -1).transpose(1, 2, 0, 3)[:, None]  # [3, 1, H, N, D]
        queries, keys = (_rotate(each, cosine, sine) for each in (qkv[0], qkv[1]))
        step, scale = max(1, MAX_SCORES // (heads * N)), float(queries.shape[-1] ** -0.5)
        parts = [
            mx.fast.scaled_dot_product_attention(queries[:, :, at : at + step], keys, qkv[2], scale=scale)
            for at in range(0, N, step)
        ]
        out = mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
        return backend.product(out[0].swapaxes(0, 1).reshape(N, -1), layer.proj)

    def _position_embedding(self, places: np.ndarray, grid: tuple[int, int]) -> mx.array:
        """Return the table of position embeddings, interpolated to the grid: [N, hidden] in float32."""
        side = int(self.shape.table**0.5)
        indices, weights = np.zeros((1, len(places)), np.int32), np.ones((1, len(places)), np.float32)
        for axis, size in enumerate(grid):
            at = places[:, axis].astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
            floor = np.floor(at)
            taps = np.clip(floor + np.array([[0], [1]]), 0, side - 1).astype(np.int32)  # [2, N]
            shares = np.stack([1 - (at - floor), at - floor])
            indices = (indices[:, None] * side + taps).reshape(-1, len(places))
            weights = (weights[:, None] * shares).reshape(-1, len(places))
        found = self.pos_embed(mx.array(indices)).astype(mx.float32)  # [4, N, hidden]
        return (found * mx.array(weights)[..., None]).sum(axis=0)

    def _turns(self, places: np.ndarray) -> tuple[mx.array, mx.array]:
        """Return cosines and sines [N, D / 2] by which queries and keys are rotated: by row, then by column."""
        frequencies = mx.array(self._frequencies)
        angles = mx.array(places.astype(np.float32))[..., None] * frequencies  # [N, 2, D / 4]
        return mx.cos(angles).reshape(len(places), -1), mx.sin(angles).reshape(len(places), -1)

    @cached_property
    def _frequencies(self) -> np.ndarray:
        quarter = self.shape.hidden // self.shape.heads // 4
        return (ROPE_BASE ** (-np.arange(quarter) / quarter)).astype(np.float32)


def _places(grid: tuple[int, int], merge: int) -> np.ndarray:
    """Return row and column [N, 2] of every patch. The patches that become one token follow one another."""
    rows, columns = np.indices(grid)
    blocks = (grid[0] // merge, merge, grid[1] // merge, merge)
    return np.stack([each.reshape(blocks).swapaxes(1, 2).reshape(-1) for each in (rows, columns)], axis=1)


def _rotate(x: mx.array, cosine: mx.array, sine: mx.array) -> mx.array:
    """Rotate [1, H, N, D], in float32."""
    a, b = mx.split(x.astype(mx.float32), 2, axis=-1)
    return mx.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1).astype(x.dtype)
