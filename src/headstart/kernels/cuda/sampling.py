"""Draw tokens from rows of logits in two launches, three with truncation, verify drafts in one more, and return
log-probabilities in two (see sampling.cu). What the launchers do, `kernels/drawn.py` says."""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx

from ...sampling import Logprobs, Sampler
from ..drawn import Draws
from .compiler import cuda_kernel
from .device import include, launch_bounds
from .greedy import launch_columns

THREADS = 1024  # of a block
PARTS = 16  # blocks that share a row, at most
ROWS = 64  # that have so many; more rows have fewer
DRAFTS = 8  # rows of drafts that are arrays of their own, at most
WORK = 2 * (8 + 2 * 16 + 2 * 1024)  # words of memory that a row's blocks share


def draw_fits(vocabulary: int) -> bool:
    """Return whether the kernels take rows of so many logits."""
    return vocabulary % 8 == 0


def launch_draw(
    logits: mx.array,
    sampler: Sampler,
    draft: int | None = None,
    drafts: mx.array | None = None,
    permitted: mx.array | None = None,
) -> Draws:
    B, W, _ = logits.shape
    grid = {"grid": (_parts(B * W) * THREADS, B * W, 1), "threadgroup": (THREADS, 1, 1)}
    first = _constant(-1 if draft is None else draft)
    if sampler.adjusts or permitted is not None:
        work, logits = _change_kernel()(
            inputs=[logits, *_changes(sampler, drafts, permitted), first],
            template=[("T", logits.dtype), ("THREADS", THREADS)],
            output_shapes=[(B * W, WORK), logits.shape],
            output_dtypes=[mx.uint32, mx.float32],
            **grid,
        )
    else:
        (work,) = _survey_kernel()(
            inputs=[logits],
            template=[("T", logits.dtype), ("THREADS", THREADS)],
            output_shapes=[(B * W, WORK)],
            output_dtypes=[mx.uint32],
            **grid,
        )
    how, ends = [*sampler[:4], first, *_xtc(sampler)], work  # not read
    template = [("T", logits.dtype), ("THREADS", THREADS)]
    if sampler.truncates:
        (ends,) = _cut_kernel()(
            inputs=[logits, work, *how],
            template=template,
            output_shapes=[(B * W, 4)],
            output_dtypes=[mx.uint32],
            **grid,
        )
    tokens, finite, cuts = _draw_kernel()(
        inputs=[logits, work, ends, *how],
        template=template,
        output_shapes=[(B, W), (B, W), (B, W, 6)],
        output_dtypes=[mx.int32] * 3,
        **grid,
    )
    return Draws(tokens, finite, cuts, logits, (work,))


def _parts(rows: int) -> int:
    return max(1, min(PARTS, PARTS * ROWS // rows))


def _xtc(sampler: Sampler) -> list[mx.array]:
    none = sampler.xtc_probability is None
    given = sampler.xtc_probability, sampler.xtc_threshold, sampler.xtc_special
    return [_numbers(0.0), _numbers(0.0), _numbers(-1)] if none else [each for each in given if each is not None]


def _changes(sampler: Sampler, drafts: mx.array | None, permitted: mx.array | None) -> list[mx.array]:
    """Return what changes logits, and in place of what no sequence uses numbers that change nothing."""

    def ids(given: mx.array | None) -> mx.array:
        return _numbers(-1) if given is None or not given.size else given

    def numbers(given: mx.array | None, *neutral: float) -> mx.array:
        return _numbers(*neutral) if given is None else given

    penalties = numbers(sampler.penalties, 1.0, *[0.0] * 7)
    bias = [ids(sampler.bias_ids), numbers(sampler.bias, 0.0)]
    stops = [ids(sampler.stop_ids), numbers(sampler.free_at, 0)]
    text = [ids(sampler.recent), numbers(drafts if drafts is not None and drafts.size else None, -1)]
    counted = [numbers(sampler.remaining, 0), numbers(sampler.counts, 0.0)]
    return [penalties, *bias, *stops, *text, *counted, _numbers(True) if permitted is None else permitted]


def join_cuts(cuts: list[mx.array]) -> mx.array:
    """Return cuts [B, n, 6] of some drafts each as those of all, [B, k, 6]."""
    return launch_columns([each.reshape(each.shape[0], -1) for each in cuts])[0].reshape(cuts[0].shape[0], -1, 6)


def launch_ratio(
    drawn: Draws,
    window: mx.array,
    sources: Sequence[tuple[mx.array, ...]],
    sampler: Sampler,
    optimistic: mx.array,
    max_k: mx.array,
    remaining: mx.array,
) -> tuple[mx.array, mx.array]:
    B, W = window.shape
    sources = sources or [(drawn.logits, drawn.cuts)]  # not read
    rows = [logits for *several, _ in sources for logits in several]
    rows = rows if len(rows) <= DRAFTS else [mx.concatenate(rows, axis=1)]
    cuts = sources[0][-1] if len(sources) == 1 else join_cuts([each for *_, each in sources])
    how = [*sampler[:4], *_xtc(sampler), optimistic]
    tokens, most = _ratio_kernel()(
        inputs=[drawn.logits, *drawn.work, *how, drawn.tokens, drawn.cuts, window, max_k, remaining, cuts,
                *rows, *rows[:1] * (DRAFTS - len(rows))],
        template=[("T", drawn.logits.dtype), ("Q", rows[0].dtype), ("THREADS", THREADS)],
        grid=(_parts(B * W) * THREADS, W - 1, B),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(B, W), (B,)],
        output_dtypes=[mx.int32] * 2,
    )  # fmt: skip
    return tokens, most


def launch_logprobs(logits: mx.array, tokens: mx.array, top: int) -> Logprobs:
    B, W, V = logits.shape
    rows, count, template = B * W, min(max(top, 1), V), [("T", logits.dtype), ("THREADS", THREADS)]
    codes, masses = _score_kernel()(
        inputs=[logits, _constant(count)],
        template=template,
        grid=(PARTS * THREADS, rows, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, PARTS, 2 * count), (rows, PARTS)],
        output_dtypes=[mx.uint32, mx.float32],
    )
    chosen, ids, best = _merge_kernel()(
        inputs=[logits, _constant(count), codes, masses, tokens],
        template=template,
        grid=(32 * rows, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(B, W), (B, W, count), (B, W, count)],
        output_dtypes=[mx.float32, mx.int32, mx.float32],
    )
    return Logprobs(chosen, ids[..., :top], best[..., :top])


def describe_sampling(logits: mx.array) -> None:
    """Have the kernels of sampling compiled, where they are used, for logits [B, W, V] of this type and as they are
    after something has changed them."""
    B = logits.shape[0]
    if not draw_fits(logits.shape[-1]):
        return
    some, words = mx.zeros((B,), mx.int32), mx.zeros((B, 6), mx.uint32)
    plain = Sampler(mx.zeros((B, 5)), words, some, some, truncates=True)
    for sampler in (plain, plain._replace(remaining=some)):
        drawn = launch_draw(logits, sampler)
        launch_ratio(drawn, drawn.tokens, [(drawn.logits, drawn.cuts)], sampler, some > 0, some, some)
    launch_logprobs(logits, drawn.tokens, 1)


@cache
def _constant(number: int) -> mx.array:
    return mx.array([number] * 1024, mx.int32)  # not so small that it would be in memory that the host shares


@lru_cache(typed=True)
def _numbers(*each: float) -> mx.array:
    """Return the same numbers [1024, 1, 1, n] for every sequence."""
    return mx.array([[[each]]] * 1024)


FILES = ("tensor_core", "team", "operand", "norm", "noise", "changes", "sampling", "truncation", "ratio", "scores")
HOW = ["params", "words", "lengths", "rounds", "draft"]
XTC = ["xtc_probability", "xtc_threshold", "xtc_special"]
CHANGES = ["penalties", "bias_ids", "bias", "stop_ids", "free_at", "recent", "drafts", "remaining", "counts"]


def _kernel(name: str, inputs: list[str], outputs: list[str], source: str) -> Any:
    header = include(*FILES) + launch_bounds(THREADS)
    return cuda_kernel(name=name, input_names=inputs, output_names=outputs, header=header, source=source)


def _described_xtc() -> str:
    return f"const headstart::Xtc xtc{{{', '.join(XTC)}, xtc_special_shape[3]}};\n"


@cache
def _survey_kernel() -> Any:
    source = "headstart::survey_row<THREADS>(logits, logits_shape[2], work);"
    return _kernel("survey_rows", ["logits"], ["work"], source)


@cache
def _change_kernel() -> Any:
    def rows(name: str) -> str:
        return f"{{{name}, {name}_shape[{name}_ndim - 1]}}"

    permitted = "permitted_shape[2] == logits_shape[2] ? permitted : nullptr"
    changes = ["penalties", rows("bias_ids"), "bias", rows("stop_ids"), "free_at", rows("recent"), rows("drafts"),
               "remaining", rows("counts"), permitted]  # fmt: skip
    source = f"""const headstart::Changes changes{{{", ".join(changes)}}};
headstart::change_row<THREADS>(
    logits, logits_shape[2], logits_shape[1], changes, draft, work, changed);"""
    return _kernel("change_rows", ["logits", *CHANGES, "permitted", "draft"], ["work", "changed"], source)


@cache
def _cut_kernel() -> Any:
    source = f"""{_described_xtc()}headstart::cut_row<THREADS>(
    logits, logits_shape[2], logits_shape[1], const_cast<unsigned*>(work), {", ".join(HOW)}, xtc, ends);"""
    return _kernel("cut_rows", ["logits", "work", *HOW, *XTC], ["ends"], source)


@cache
def _draw_kernel() -> Any:
    outputs = ["token", "finite", "cuts"]
    source = f"""{_described_xtc()}headstart::draw_row<THREADS>(logits, logits_shape[2], logits_shape[1],
    const_cast<unsigned*>(work), ends, {", ".join(HOW)}, xtc, {", ".join(outputs)});"""
    return _kernel("draw_tokens", ["logits", "work", "ends", *HOW, *XTC], outputs, source)


@cache
def _ratio_kernel() -> Any:
    inputs = ["optimistic", "drawn", "cuts", "window", "max_k", "remaining", "draft_cuts"]
    rows = [f"rows{n}" for n in range(DRAFTS)]
    source = f"""{_described_xtc()}const Q* const rows[] = {{{", ".join(rows)}}};
headstart::verify_by_ratio<THREADS>(logits, logits_shape[2], logits_shape[1], const_cast<unsigned*>(work),
    {", ".join([*HOW[:4], "xtc", *inputs])}, rows, rows0_shape[1], tokens, most);"""
    return _kernel("verify_by_ratio", ["logits", "work", *HOW[:4], *XTC, *inputs, *rows], ["tokens", "most"], source)


@cache
def _score_kernel() -> Any:
    source = "headstart::score_part<THREADS>(logits, logits_shape[2], top[0], codes, masses);"
    return _kernel("score_parts", ["logits", "top"], ["codes", "masses"], source)


@cache
def _merge_kernel() -> Any:
    inputs, outputs = ["codes", "masses", "tokens"], ["chosen", "ids", "best"]
    source = f"""headstart::merge_scores(logits, logits_shape[2], masses_shape[1], top[0],
    {", ".join(inputs + outputs)});"""
    return _kernel("merge_scores", ["logits", "top", *inputs], outputs, source)
