"""Images in prompts: where their tokens are, which positions RoPE gives them, and their embeddings.

An image is as many placeholder tokens as the vision tower makes embeddings of it, and what a family writes around
them. With M-RoPE they are at rows and columns that start where the text before them ends, and the text after them
goes on after the larger of the two: a prompt with images has fewer positions than tokens.

Where a family lets an image's tokens see those that follow them (`TowerSpec.sees_whole`), an image is read in a pass
of its own, and no chunk ends within it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256, shake_128
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import RequestError
from ..models import Model
from ..models.vision import VisionTower
from ..state import TokenPositions
from .batch import Batch

WORK_PER_TURN = 2**14  # patches times blocks of the tower that run between two steps, but at least one block


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image as `images.read_image` returns it, and the index of its first token in the prompt."""

    start: int
    pixels: np.ndarray  # [H, W, 3]


def insert_images(
    tokens: Sequence[int], images: Sequence[np.ndarray], tower: VisionTower[Any]
) -> tuple[list[int], list[PromptImage]]:
    """Return a prompt with all tokens that images take, of one that has a single placeholder for each."""
    placeholder, found = tower.spec.image_token, list[PromptImage]()
    if (count := sum(token == placeholder for token in tokens)) != len(images):
        raise RequestError(f"prompt has {count} image placeholders, and there are {len(images)} images: send as many")
    expanded: list[int] = []
    for token in tokens:
        if token == placeholder:
            image = images[len(found)]
            found.append(PromptImage(len(expanded), image))
            expanded += tower.spell(image)
        else:
            expanded.append(token)
    return expanded, found


def check_images(images: Sequence[PromptImage], prompt: Sequence[int], model: Model) -> None:
    """Raise RequestError if the model cannot see these images."""
    if not images:
        return
    tower = model.tower
    if tower is None:
        raise RequestError(f"images cannot be seen by this model: {model.tower_unavailable}")
    for image in images:
        tokens = tower.spell(image.pixels)
        begin, end = image.start, image.start + len(tokens)
        if list(prompt[begin:end]) != tokens or end >= len(prompt):
            raise RequestError(
                "images do not match the prompt's placeholders: use `insert_images`, and end with text"
            )


class SequenceImages:
    """The images of one sequence."""

    def __init__(self, images: Sequence[PromptImage], length: int, tower: VisionTower[Any]):
        """`length`: of the prompt."""
        self._tower = tower
        self._images = images
        self._length = length
        spelt = [tower.spell(each.pixels) for each in images]
        self._spans = [(each.start, each.start + len(made)) for each, made in zip(images, spelt, strict=True)]
        self._shown = [  # by image, the indices of the tokens in the prompt that have its embeddings
            begin + np.flatnonzero(np.array(made) == tower.spec.image_token)
            for (begin, _), made in zip(self._spans, spelt, strict=True)
        ]
        self._embeddings: dict[int, mx.array] = {}  # by image, [N, H]
        self._running: tuple[int, Iterator[mx.array]] | None = None  # the image in the tower
        self._last = mx.zeros((0,))  # what the tower has made of it so far

    @cached_property
    def _positions(self) -> np.ndarray:
        """Time, row and column of the prompt's tokens, [3, length]."""
        parts, index, at = [], 0, 0
        for image, (begin, end) in zip(self._images, self._spans, strict=True):
            parts.append(np.tile(np.arange(at, at + begin - index), (3, 1)))
            at += begin - index
            places = self._tower.places(image.pixels)
            parts.append(places + at)
            at, index = at + int(places.max()) + 1, end
        parts.append(np.tile(np.arange(at, at + self._length - index), (3, 1)))
        return np.concatenate(parts, axis=1)

    @property
    def shift(self) -> int:
        """Return how far positions are from indices once all images are behind."""
        return 0 if not self._tower.spec.axes else int(self._positions[0, -1]) + 1 - self._length

    def positions(self, count: int) -> np.ndarray:
        """Return the positions [3, count] of the first tokens, the prompt's and those generated after it."""
        after = np.tile(np.arange(self._length, max(count, self._length)) + self.shift, (3, 1))
        return np.concatenate([self._positions, after], axis=1)[:, :count]

    @cached_property
    def _numbers(self) -> list[list[int]]:
        """Return numbers that stand for each image's tokens in the prefix cache: negative, and made of its pixels."""
        found = []
        for image, (begin, end) in zip(self._images, self._spans, strict=True):
            content = sha256(repr(image.pixels.shape).encode() + np.ascontiguousarray(image.pixels).tobytes())
            stream = shake_128(content.digest()).digest(8 * (end - begin))
            found.append((-1 - (np.frombuffer(stream, np.uint64) >> np.uint64(1)).astype(np.int64)).tolist())
        return found

    def cache_keys(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens as the prefix cache knows them: the same placeholders are different images."""
        keys = list(tokens)
        for (begin, end), numbers in zip(self._spans, self._numbers, strict=True):
            keys[begin:end] = numbers
        return keys

    def whole(self, begin: int, end: int) -> int:
        """Return where a pass ends that goes from `begin` to about `end`: an image that is seen whole has one of its
        own, so that what it is computed beside changes no bit."""
        for first, last in self._blocks:
            if begin <= first < end:
                return first if first > begin else last
        return end

    def whole_chunks(self, ends: Sequence[int]) -> list[int]:
        """Return the ends of chunks, of which none is within an image that is seen whole."""
        found = [0]
        for end in ends:
            end = next((first for first, last in self._blocks if first < end < last), end)
            found += [end] if end > found[-1] else []
        return found[1:]

    @cached_property
    def _blocks(self) -> list[tuple[int, int]]:
        """Return where the images' tokens begin and end that see one another, if they do."""
        if not self._tower.spec.sees_whole:
            return []
        return [(int(shown[0]), int(shown[-1]) + 1) for shown in self._shown]

    def looked_up(self, tokens: Sequence[int], begin: int, end: int) -> list[int]:
        """Return the tokens from `begin` to `end` as their own embeddings are looked up."""
        found, stand_in = list(tokens[begin:end]), self._tower.spec.looked_up
        if stand_in is not None:
            for n in self._within(begin, end):
                for index in self._shown[n][(self._shown[n] >= begin) & (self._shown[n] < end)]:
                    found[index - begin] = stand_in
        return found

    def advance(self, model: Model, begin: int, end: int) -> bool:
        """Run a part of the tower, if tokens from `begin` to `end` need it. Return True once they need no more."""
        needed = next((n for n in self._within(begin, end) if n not in self._embeddings), None)
        if needed is None:
            return True
        pixels = self._images[needed].pixels
        if self._running is None or self._running[0] != needed:
            self._running = (needed, self._tower.run(model.backend, pixels))
        for _ in range(max(1, WORK_PER_TURN // self._tower.count_patches(pixels))):
            if (made := next(self._running[1], None)) is None:
                self._embeddings[needed], self._running = self._last, None
                break
            self._last = made
        mx.eval(self._last)
        return False

    def embed(self, model: Model, tokens: Sequence[int], begin: int, end: int, *, back: int = 0) -> mx.array | None:
        """Return the embeddings [1, W, H] of the tokens from `begin` to `end` and up to `back` before them; None if
        there is no image in them. Of one before them that the prefix cache holds they are the placeholders' own."""
        begin = max(begin - back, 0)
        within = [n for n in self._within(begin, end) if n in self._embeddings]
        if not within:
            return None
        x = model.embed(mx.array([tokens[begin:end]], mx.int32))
        for n in within:
            shown = self._shown[n]
            first, last = np.searchsorted(shown, [begin, end])
            if first < last:
                x[:, mx.array(shown[first:last] - begin)] = self._embeddings[n][first:last].astype(x.dtype)
        return x

    def place(self, batch: Batch, begin: int, end: int) -> None:
        """Tell the states of a sequence where RoPE puts the tokens from `begin` to `end`, and what they see.

        As long as positions follow one another, as before the first image, the kernels of other prompts are used.
        """
        exact, shift = None, 0
        if axes := self._tower.spec.axes:
            first = max(begin - 1, 0)  # the head is a token behind
            positions = self.positions(end)
            shifts = positions[:, first:end] - np.arange(first, end)
            if (shifts == shifts[0, 0]).all():
                shift = int(shifts[0, 0])
            else:
                exact = TokenPositions(mx.array(positions[None].astype(np.int32)), axes)
        seen, blocks = None, [each for each in self._blocks if each[0] < end and begin < each[1]]
        if blocks:
            ends = np.arange(1, end + 1, dtype=np.int32)
            for opens, closes in blocks:
                ends[opens:closes] = closes
            seen = mx.array(ends)[None]
        for state in (batch.trunk_state, batch.head_state):
            if state is not None:
                state.place([shift], exact, seen)

    def finish(self, batch: Batch) -> None:
        """Tell the states that only text follows, and free the embeddings: a recomputed sequence makes them anew."""
        for state in (batch.trunk_state, batch.head_state):
            if state is not None:
                state.place([self.shift])
        self.reset()

    def reset(self) -> None:
        """Forget what was computed, also where that failed."""
        self._embeddings, self._running = {}, None

    def _within(self, begin: int, end: int) -> list[int]:
        return [n for n, (first, last) in enumerate(self._spans) if first < end and begin < last]
