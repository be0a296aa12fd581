"""Do this device's kernels compute a row the same whatever stands beside it? Then speculation changes no bit."""

from weakref import WeakKeyDictionary

import mlx.core as mx

from ..cards import MAX_K
from ..kernels.cuda import on_cuda
from ..kernels.cuda.products import MOST_ROWS
from ..models import Model

TEXT = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41]
READ = 3  # tokens of it that are in before the window
SHAPES = ((9, 1), (1, 5), (2, 16), (9, 16))  # window, rows
ON_A_CPU = ((9, 1), (1, 5), (9, 4))  # every position takes its time there, and kernels are the same for any number
_known: WeakKeyDictionary[Model, bool] = WeakKeyDictionary()


def rows_are_independent(model: Model) -> bool:
    """Measured once a model: after a short text, are the logits of tokens the same alone, in a window of nine, and in
    a batch of such windows? Kernels that change with the number of rows mostly change within sixteen of them."""
    if model not in _known:
        alone = [_logits(model, window=n, rows=1)[0, -1] for n in (1, 2, 5)]
        same = []
        # To the end whatever comes out: machines that share a model take part in each other's passes.
        for window, rows in ON_A_CPU if mx.default_device() == mx.cpu else SHAPES:
            logits = _logits(model, window, rows)[rows - 1]
            same += [mx.array_equal(one, logits[n]) for one, n in zip(alone, (0, 1, 4), strict=True) if n < window]
        _known[model] = model.share.everywhere(all(bool(each) for each in same))
    return _known[model]


def widest(rows: int) -> int:
    """Most drafts a round with which our kernels take all positions of so many rows: mlx's, which take more, add up
    in another order."""
    return max(MOST_ROWS // rows - 1, 0) if on_cuda() else MAX_K


def _logits(model: Model, window: int, rows: int) -> mx.array:
    """[rows, window, V] of the first tokens after a text that is already in."""
    text, state = mx.array([TEXT]) % model.vocabulary, model.make_state(1)
    model.trunk(text[:, :READ], state, certain=READ)
    state.commit(mx.full((1,), READ, mx.int32), most=READ)
    state.keep([0] * rows)
    tokens = mx.repeat(text[:, READ : READ + window], rows, axis=0)
    return model.logits(model.trunk(tokens, state, certain=1))
