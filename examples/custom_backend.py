"""A backend of one's own: a subclass of the reference, which overrides what its device does better.

    python examples/custom_backend.py

This one computes nothing better. It counts the products with whole matrices, and says of what shapes they are.
"""

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from headstart import generate
from headstart.checkpoint import load_model, load_tokenizer, resolve
from headstart.kernels import Backend


class Counting(Backend):
    """MLX's own operations, counted. A kernel would take the products that it can and leave others to `super()`."""

    def __init__(self) -> None:
        super().__init__("counting")  # how `headstart probe` and the statistics call it
        self.counted: Counter[tuple[int, ...]] = Counter()

    def multiply(self, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
        self.counted.update(tuple(layer.weight.shape) for layer in layers)
        return super().multiply(x, layers)


def main() -> Counting:
    source, backend = resolve("tiny-qwen3.5"), Counting()
    # On a CPU MLX multiplies quantised weights and experts in float32: for those add `dtype=mx.float32`.
    model, tokenizer = load_model(source, backend=backend), load_tokenizer(source)
    print(generate(model, tokenizer, "def add(", max_tokens=8))
    for shape, count in backend.counted.most_common():
        print(count, "products with", " × ".join(map(str, shape)))
    return backend


if __name__ == "__main__":
    main()
