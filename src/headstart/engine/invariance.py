"""Measure batch invariance: whether a token's logits depend on the window and the batch it is computed in.

Where they do not, speculation and batching change no bit of the output.
"""

import sys
from weakref import WeakKeyDictionary

import mlx.core as mx

from ..models import Model

TOKENS = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71]
PREFILLED = 3  # of these, before the window
_measured: WeakKeyDictionary[Model, bool] = WeakKeyDictionary()


def is_batch_invariant(model: Model) -> bool:
    """Return whether logits are the same for a token alone, in a window of sixteen, and in a batch of such windows.

    Measured once per model, on one layer of each kind: the others run the same kernels on the same shapes. Nothing is
    where all of them are kernels whose tests show it.
    """
    if model not in _measured:
        _measured[model] = model.share.everywhere(_is_shown(model) or _measure(model))
    return _measured[model]


def max_invariant_rows(model: Model) -> int:
    """Return how many positions of a step, of all sequences, are computed independently."""
    return model.backend.most_rows if is_batch_invariant(model) else sys.maxsize


def _is_shown(model: Model) -> bool:
    if model.share.ranks > 1 or not model.layers:
        return False
    layers = (*model.layers, *(model.head_layers if model.has_head else ()))
    return model.backend.is_shown(layers, model.weights, model.dtype)


def _measure(model: Model) -> bool:
    backend, short = model.backend, model.with_one_layer_of_each_kind()
    with backend.compiling(model.dtype):
        alone = {n: _logits(short, window=n + 1, sequences=1)[0, -1] for n in (0, 1, 4)}
        same = []
        # All shapes run whatever the result: the ranks of a cluster take part in each other's passes.
        for window, sequences in model.windows:
            logits = _logits(short, window, sequences)[-1]
            same += [mx.array_equal(expected, logits[n]) for n, expected in alone.items() if n < window]
        backend.compile_sampling(logits[None])
        if short.reading is not short:  # its kernels are compiled with the others
            tokens = mx.array([TOKENS]) % model.vocabulary
            mx.eval(short.reading.trunk(tokens, short.make_state(1), certain=len(TOKENS)))
    return all(bool(each) for each in same) and backend.is_exact(model.layers, model.weights, model.dtype)


def _logits(model: Model, window: int, sequences: int) -> mx.array:
    """Return the logits [sequences, window, V] of a window after the prefilled tokens."""
    tokens, state = mx.array([TOKENS]) % model.vocabulary, model.make_state(1)
    if model.adapters:
        state.adapt([0])  # the same kernels as another adapter, and as none
    model.trunk(tokens[:, :PREFILLED], state, certain=PREFILLED)
    state.commit(mx.full((1,), PREFILLED, mx.int32), most=PREFILLED)
    state.keep([0] * sequences)
    copies = mx.repeat(tokens[:, PREFILLED : PREFILLED + window], sequences, axis=0)
    return model.score(copies, state).logits
