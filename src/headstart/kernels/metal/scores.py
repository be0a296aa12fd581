"""Log-probabilities on Metal: see `scores.metal`."""

import mlx.core as mx

from ...sampling import Logprobs
from . import sampling
from .sampling import constant, sampling_kernel, slices_of, template_of


def metal_logprobs(logits: mx.array, tokens: mx.array, top: int) -> Logprobs:
    (B, W, V), count = logits.shape, slices_of(logits.shape[-1])
    rows, best = B * W, min(max(top, 1), V)
    source = """
        threadgroup ulong parts[THREADS / 16];
        const int size = logits_shape[2], slice = int(threadgroup_position_in_grid.x), begin = slice * THREADS * EACH;
        const int row = int(threadgroup_position_in_grid.y), index = int(thread_index_in_threadgroup);
        const int slices = (size + THREADS * EACH - 1) / (THREADS * EACH), at = row * slices + slice;
        float values[EACH];
        for (int i = 0; i < EACH; ++i) {
            const int id = begin + i * THREADS + index;
            values[i] = id < size ? static_cast<float>(logits[static_cast<long>(row) * size + id]) : -INFINITY;
        }
        headstart::score_slice<THREADS, EACH>(
            values, begin, size, top[0], codes + at * 2 * top[0], masses + row * metal::max(slices, 8) + slice, parts,
            index);
    """
    codes, masses = sampling_kernel("scores", ("logits", "top"), ("codes", "masses"), source, "sampling", "scores")(
        inputs=[logits, constant(best)],
        template=template_of(logits),
        grid=(count * sampling.THREADS, rows, 1),
        threadgroup=(sampling.THREADS, 1, 1),
        output_shapes=[(rows, max(count, 4), 2 * best), (rows, max(count, 8))],
        output_dtypes=[mx.uint32, mx.float32],
    )
    source = """
        const int size = logits_shape[2], slices = (size + THREADS * EACH - 1) / (THREADS * EACH);
        const int row = int(threadgroup_position_in_grid.x), count = top[0];
        headstart::merge_scores(
            codes + row * slices * 2 * count, masses + row * metal::max(slices, 8), slices, count,
            static_cast<float>(logits[static_cast<long>(row) * size + tokens[row]]), chosen + row, ids + row * count,
            best + row * count, int(thread_index_in_simdgroup));
    """
    inputs, outputs = ("logits", "top", "codes", "masses", "tokens"), ("chosen", "ids", "best")
    chosen, ids, scores = sampling_kernel("merge_scores", inputs, outputs, source, "sampling", "scores")(
        inputs=[logits, constant(best), codes, masses, tokens],
        template=template_of(logits),
        grid=(32 * rows, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(B, W), (B, W, best), (B, W, best)],
        output_dtypes=[mx.float32, mx.int32, mx.float32],
    )
    return Logprobs(chosen, ids[..., :top], scores[..., :top])
