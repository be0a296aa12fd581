"""What a vision tower provides: it makes embeddings of an image, and says which tokens stand for it in a prompt.

A family names its own (`Family.vision`). Modules have the names of the release. Only images are known, no videos.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..images import ImageRules
from ..kernels import Backend

MAX_SCORES = 2**25  # attention scores that exist at a time: a large image has thousands of patches
TokenId = Callable[[str], int]  # of a special token, by its text
Rules = TypeVar("Rules", bound=ImageRules)


@dataclass(frozen=True)
class TowerSpec:
    """What the trunk must know of images."""

    image_token: int  # stands for images in prompts
    out: int  # numbers of an embedding
    axes: tuple[int, ...] = ()  # which of time, row and column each frequency of the trunk's RoPE takes, if it does
    sees_whole: bool = False  # in layers with a window, tokens of an image also see those of it that follow
    looked_up: int | None = None  # the token whose embedding of each layer those of an image have; None: their own


class VisionTower(nn.Module, ABC, Generic[Rules]):
    """The weights, and the passes over them."""

    renamed: tuple[tuple[str, str], ...] = ()  # patterns of tensors' names as released, and ours

    def __init__(self, spec: TowerSpec, rules: Rules):
        super().__init__()
        self._spec, self._rules = spec, rules  # names with an underscore are no parameters

    @property
    def spec(self) -> TowerSpec:
        return self._spec

    @property
    def rules(self) -> Rules:
        return self._rules

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Return the parameters that are released as convolutions, and their shapes there, [O, I, …]."""
        return {}

    @property
    def fits(self) -> bool:
        """Return whether the rules make what the tower takes."""
        return True

    @abstractmethod
    def spell(self, pixels: np.ndarray) -> list[int]:
        """Return the tokens that an image [H, W, 3] is in a prompt, which `images.read_image` has made. Those that
        are `image_token` stand for its embeddings."""

    @abstractmethod
    def run(self, backend: Backend, pixels: np.ndarray) -> Iterator[mx.array]:
        """Compute the embeddings [N, out] of an image [H, W, 3].

        Yields what one block after another makes, so that the caller can do other work between them. The last value
        is the result.
        """

    @abstractmethod
    def count_patches(self, pixels: np.ndarray) -> int:
        """Return how many patches of an image [H, W, 3] a block takes at a time."""

    @abstractmethod
    def working_bytes(self, size: int) -> int:
        """Return the memory that the largest image takes on its way, in activations of `size` bytes."""

    def places(self, pixels: np.ndarray) -> np.ndarray:
        """Return time, row and column [3, N] of an image's tokens, where the trunk's RoPE takes them."""
        raise NotImplementedError


class Vision(NamedTuple):
    """The tower of a family, made of config.json and the rules by which it is shown images."""

    tower: Callable[[dict[str, Any], Any, TokenId], VisionTower[Any]]
    rules: type[ImageRules]


def attention_bytes(patches: int, heads: int, hidden: int, widest: int, size: int) -> int:
    """Return the memory of a block over so many patches, whose products have up to `widest` numbers each."""
    return patches * (4 * hidden + 2 * widest) * size + 8 * min(MAX_SCORES, heads * patches**2)


def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Return the attention [N, H·D] of all to all, of heads [1, H, N, D], in pieces of few scores."""
    _, heads, N, _ = queries.shape
    step = max(1, MAX_SCORES // (heads * N))
    parts = [
        mx.fast.scaled_dot_product_attention(queries[:, :, at : at + step], keys, values, scale=scale)
        for at in range(0, N, step)
    ]
    out = mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
    return out[0].swapaxes(0, 1).reshape(N, -1)


def rotate(x: mx.array, cosine: mx.array, sine: mx.array) -> mx.array:
    """Rotate [..., D], whose halves are pairs, in float32."""
    a, b = mx.split(x.astype(mx.float32), 2, axis=-1)
    return mx.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1).astype(x.dtype)


def interpolate(table: mx.array, at: np.ndarray) -> mx.array:
    """Return the square `table` [S², H] at rows and columns `at` [N, 2] between its own: [N, H] in float32."""
    side = int(table.shape[0] ** 0.5)
    indices, weights = np.zeros((1, len(at)), np.int32), np.ones((1, len(at)), np.float32)
    for axis in range(2):
        floor = np.floor(at[:, axis])
        taps = np.clip(floor + np.array([[0], [1]]), 0, side - 1).astype(np.int32)  # [2, N]
        shares = np.stack([1 - (at[:, axis] - floor), at[:, axis] - floor])
        indices = (indices[:, None] * side + taps).reshape(-1, len(at))
        weights = (weights[:, None] * shares).reshape(-1, len(at))
    found = table[mx.array(indices)].astype(mx.float32)  # [4, N, H]
    return (found * mx.array(weights)[..., None]).sum(axis=0)
