"""Measure batch invariance: whether a token's logits depend on the window and the batch it is computed in.

Where they do not, speculation and batching change no bit of the output.
"""

from weakref import WeakKeyDictionary

import mlx.core as mx

from ..kernels.cuda import on_cuda
from ..kernels.cuda.products import MOST_ROWS
from ..limits import MAX_K
from ..models import Model

TOKENS = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41]
PREFILLED = 3  # of these, before the window
SHAPES = ((9, 1), (1, 5), (2, 16), (9, 16))  # window, sequences: kernels mostly switch below sixteen rows
CPU_SHAPES = ((9, 1), (1, 5), (9, 4))  # slower, and the same kernels for any number of rows
_measured: WeakKeyDictionary[Model, bool] = WeakKeyDictionary()


def is_batch_invariant(model: Model) -> bool:
    """Return whether logits are the same for a token alone, in a window of nine, and in a batch of such windows.

    Measured once per model.
    """
    if model not in _measured:
        alone = {n: _logits(model, window=n + 1, sequences=1)[0, -1] for n in (0, 1, 4)}
        same = []
        # All shapes run whatever the result: the ranks of a cluster take part in each other's passes.
        for window, sequences in CPU_SHAPES if mx.default_device() == mx.cpu else SHAPES:
            logits = _logits(model, window, sequences)[-1]
            same += [mx.array_equal(expected, logits[n]) for n, expected in alone.items() if n < window]
        _measured[model] = model.share.everywhere(all(bool(each) for each in same))
    return _measured[model]


def max_invariant_k(sequences: int) -> int:
    """Return the most drafts per round with which our own kernels compute all positions of the batch.

    Beyond, MLX's kernels would be used, which add up in another order.
    """
    return max(MOST_ROWS // sequences - 1, 0) if on_cuda() else MAX_K


def _logits(model: Model, window: int, sequences: int) -> mx.array:
    """Return the logits [sequences, window, V] of a window after the prefilled tokens."""
    tokens, state = mx.array([TOKENS]) % model.vocabulary, model.make_state(1)
    model.trunk(tokens[:, :PREFILLED], state, certain=PREFILLED)
    state.commit(mx.full((1,), PREFILLED, mx.int32), most=PREFILLED)
    state.keep([0] * sequences)
    copies = mx.repeat(tokens[:, PREFILLED : PREFILLED + window], sequences, axis=0)
    return model.logits(model.trunk(copies, state, certain=1))
