"""What the model thought of a prompt."""

from collections.abc import Sequence

import mlx.core as mx

from ..models import Model
from ..sampling import Logprobs, logprobs
from .request import TokenLogprobs
from .sequence import read_logprobs

AT_A_TIME = 64  # tokens, since logits are large


def score(model: Model, hidden: mx.array, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Of `tokens`, given the trunk's output before each of them [1, T, H], with the `top` best beside them."""
    told: list[TokenLogprobs] = []
    for at in range(0, len(tokens), AT_A_TIME):
        here = mx.array([tokens[at : at + AT_A_TIME]], mx.int32)  # [1, W]
        scores = logprobs(model.logits(hidden[:, at : at + here.shape[1]]), here, top)
        told += read_logprobs(Logprobs(*[a[0] for a in scores]), top)
    return told
