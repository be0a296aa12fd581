"""How far the head's chains are from the model's own distribution, and the gradients of that."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..models import Model
from .chains import chains

WEIGHTS = (1.0, 0.7, 0.49)  # of the steps of a chain
LOGITS = 2**26  # numbers of logits that are in memory at a time


class Measured(NamedTuple):
    """Of the steps of all chains. A chain counts where the text that it predicts counts."""

    losses: mx.array  # [steps], cross-entropy with the model's distribution
    accepted: mx.array  # [steps], share of chains whose first drafts, so many, are all the model's own
    chains: mx.array  # how many there are


class Compared(NamedTuple):
    losses: list[mx.array]  # by step, [B, T]
    right: list[mx.array]  # by step, [B, T]: the likeliest token is the model's
    gradients: list[mx.array]  # by step, of the losses by what the chains made [B, T, H]


def compare(model: Model, hidden: mx.array, made: Sequence[mx.array], *, gradients: bool = False) -> Compared:
    """Compare drafts with the distribution of the trunk, a slice of positions at a time: logits need much memory.

    Args:
        model: Computes the logits of what its head `made`, [B, T, H] for each step, and of its trunk.
        hidden: The trunk's, [B, T + steps, H].
    """
    (rows, length, _), steps = made[0].shape, len(made)
    size = max(1, LOGITS // (rows * model.vocabulary))
    losses: list[list[mx.array]] = [[] for _ in made]
    right: list[list[mx.array]] = [[] for _ in made]
    backward: list[list[mx.array]] = [[] for _ in made]
    for first in range(0, length + steps, size):
        last = min(first + size, length + steps)
        logits = model.logits(hidden[:, first:last].astype(model.dtype)).astype(mx.float32)  # [B, n, V]
        wanted, best = mx.softmax(logits, axis=-1), mx.argmax(logits, axis=-1)
        for j, each in enumerate(made):
            begin, end = max(first - j - 1, 0), min(last - j - 1, length)  # of the chains that predict these
            if begin >= end:
                continue
            part = slice(begin + j + 1 - first, end + j + 1 - first)
            x, target = each[:, begin:end], wanted[:, part]
            drafts = model.draft_logits(x).astype(mx.float32)
            likely, said = mx.softmax(drafts, axis=-1), mx.argmax(drafts, axis=-1, keepdims=True)
            most, share = (mx.take_along_axis(a, said, axis=-1)[..., 0] for a in (drafts, likely))
            losses[j].append(most - mx.log(share) - (target * drafts).sum(axis=-1))
            right[j].append(said[..., 0] == best[:, part])
            if gradients:
                upper = (likely - target).astype(x.dtype)
                backward[j].append(mx.vjp(model.draft_logits, [x], [upper])[1][0])
    join = [[mx.concatenate(each, axis=1) for each in parts] for parts in (losses, right, *[backward] * gradients)]
    return Compared(join[0], join[1], join[2] if gradients else [])


def measure(compared: Compared, counts: mx.array) -> Measured:
    """Sum up the chains that count [B, T]."""
    total = mx.maximum(counts.sum(), 1)
    losses = mx.stack([(each * counts).sum() / total for each in compared.losses])
    so_far, accepted = counts.astype(mx.bool_), []
    for each in compared.right:
        so_far = so_far & each
        accepted.append(so_far.sum() / total)
    return Measured(losses, mx.stack(accepted), counts.sum())


def evaluate(model: Model, frozen: Model, tokens: mx.array, counts: mx.array) -> Measured:
    """Measure the head on rows of tokens [B, T + steps]; `counts` [B, T] where its drafts count."""
    hidden = trunk_hidden(frozen, tokens)
    made = chains(model, hidden[:, : counts.shape[1]], tokens, len(WEIGHTS))
    return measure(compare(model, hidden, made), counts)


def loss_and_gradients(
    model: Model, frozen: Model, parameters: Any, tokens: mx.array, counts: mx.array
) -> tuple[Measured, Any]:
    """Return what `evaluate` does, and the gradients of the weighted losses by the head's `parameters`."""
    hidden = trunk_hidden(frozen, tokens)
    total = mx.maximum(counts.sum(), 1)
    found: list[Measured] = []

    def objective(parameters: Any) -> mx.array:
        model.weights.mtp.update(parameters)
        made = chains(model, hidden[:, : counts.shape[1]], tokens, len(WEIGHTS))
        compared = compare(model, hidden, [mx.stop_gradient(each) for each in made], gradients=True)
        found.append(measure(compared, counts))
        # Its gradient by what the chains made is that of the losses.
        share = (counts / total)[..., None]
        parts = zip(made, compared.gradients, WEIGHTS, strict=True)
        return sum(((x * mx.stop_gradient(g * share * weight)).sum() for x, g, weight in parts), mx.array(0.0))

    _, gradients = mx.value_and_grad(objective)(parameters)
    model.weights.mtp.update(parameters)
    return Measured(*map(mx.stop_gradient, found[0])), gradients


def trunk_hidden(frozen: Model, tokens: mx.array) -> mx.array:
    """Return the trunk's hidden states of rows of tokens [B, T], by what reads prompts for it."""
    rows, length = tokens.shape
    return frozen.reading.trunk(tokens, frozen.make_state(rows), certain=length)
