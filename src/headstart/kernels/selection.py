"""Select what a token attends to by the scores of an index, by MLX's own operations.

A row selects by itself, whatever is beside it in a window or a batch: the bits of plain decoding. Equals are told
apart by their position, the earlier first, so that no order of sorting decides. What is not visible to a row, such as
a block of which a token lies past it, is never selected, and what a rejected draft wrote is never visible.
"""

import mlx.core as mx


def select_best(scores: mx.array, visible: mx.array, count: int) -> mx.array:
    """Return which of the scores [..., N] are the `count` best of a row among what is `visible` [..., N] to it: all
    of that where it is no more."""
    if scores.shape[-1] <= count:
        return visible
    scores = mx.where(visible, scores.astype(mx.float32), -mx.inf)
    worst = -mx.partition(-scores, count - 1, axis=-1)[..., count - 1 : count]  # [..., 1], of the best
    better, equal = scores > worst, scores == worst
    left = count - better.sum(axis=-1, keepdims=True)  # places for equals
    return visible & (better | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= left)))


def relu_scores(queries: mx.array, keys: mx.array, weights: mx.array | None = None) -> mx.array:
    """Return the scores [B, W, N] of index keys [B, N, D] for queries [B, W, H, D]: of each head what its product has
    above 0, summed over heads, by `weights` [B, W, H] where there are some."""
    B, W, H, D = queries.shape
    products = queries.astype(mx.float32).reshape(B, W * H, D) @ keys.astype(mx.float32).swapaxes(-1, -2)
    scores = mx.maximum(products, 0).reshape(B, W, H, -1)  # [B, W, H, N]
    if weights is not None:
        scores = scores * weights.astype(mx.float32)[..., None]
    total = scores[:, :, 0]  # one after the other: a sum in an order of MLX's own may change with W
    for head in range(1, H):
        total = total + scores[:, :, head]
    return total


def block_means(keys: mx.array, size: int) -> mx.array:
    """Return the means [B, N, D] in float32 of whole blocks of `size` keys [B, S, D]; those of a rest have none."""
    B, S, D = keys.shape
    blocks = keys[:, : S // size * size].astype(mx.float32).reshape(B, S // size, size, D)
    total = blocks[:, :, 0]
    for token in range(1, size):
        total = total + blocks[:, :, token]
    return total / size


def pooled_keys(keys: mx.array, gates: mx.array, bias: mx.array, size: int) -> mx.array:
    """Return the weighted means [B, N, D] in float32 of whole blocks of `size` keys [B, S, D]; those of a rest have
    none. Each number of a key has a weight of its own: the softmax over the block of its gates [B, S, D] and a `bias`
    [size, D]."""
    B, S, D = keys.shape
    keys, gates = (a[:, : S // size * size].astype(mx.float32).reshape(B, S // size, size, D) for a in (keys, gates))
    gates = gates + bias.astype(mx.float32)
    weights = mx.exp(gates - gates.max(axis=2, keepdims=True))
    total, whole = weights[:, :, 0] * keys[:, :, 0], weights[:, :, 0]
    for token in range(1, size):
        total, whole = total + weights[:, :, token] * keys[:, :, token], whole + weights[:, :, token]
    return total / whole


def select_tokens(scores: mx.array, positions: mx.array, size: int, budget: int, reach: int) -> mx.array:
    """Return which tokens [B, W, reach] rows at `positions` [B, W] attend to, given scores [B, W, N] of the blocks of
    `size` tokens.

    A block counts for a row once none of its tokens lies past the row. The best blocks are selected up to a `budget`
    of tokens, and all tokens after the last block that counts.
    """
    whole = (positions + 1)[..., None] // size  # [B, W, 1], blocks that count
    selected = select_best(scores, mx.arange(scores.shape[-1]) < whole, budget // size)
    tokens = mx.repeat(selected, size, axis=-1)
    if (rest := reach - tokens.shape[-1]) > 0:
        tokens = mx.pad(tokens, [(0, 0), (0, 0), (0, rest)])
    at = mx.arange(reach)
    return (tokens | (at >= whole * size)) & (at <= positions[..., None])
