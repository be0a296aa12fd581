"""Draw tokens from rows of logits on Metal, and verify drafts: see `sampling.metal`, `changes.metal`, `select.metal`
and `ratio.metal`. What the launchers do, `kernels/drawn.py` says."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx

from ...sampling import Sampler
from ...sampling.window import Source
from ..drawn import Draws
from .device import metal_kernel

THREADS = 256
EACH = 16  # tokens of a thread: a slice has up to 4,096, as in sampling.metal
LISTED = 4096  # as there, like the next three
BINS = 128
FOUND, PLAN = 8, 8  # numbers of a slice, of a row
DRAFTS = 8  # rows of drafts that are arrays of their own, at most
HOW = ("params", "words", "lengths", "rounds", "draft", "xtc_probability", "xtc_threshold", "xtc_special")
CHANGES = ("penalties", "bias_ids", "bias", "stop_ids", "free_at", "recent", "drafts", "remaining", "counts",
           "permitted")  # fmt: skip
ROW = """
        const int size = logits_shape[2], W = logits_shape[1], row = int(threadgroup_position_in_grid.y), b = row / W;
        const int slice = int(threadgroup_position_in_grid.x), begin = slice * THREADS * EACH;
        const int slices = (size + THREADS * EACH - 1) / (THREADS * EACH);
        const auto how = headstart::sequence(params, words, lengths, rounds, xtc_probability, xtc_threshold, b);
        const uint purpose = draft[0] < 0 ? headstart::NEXT : headstart::DRAFT;
        const int position = how.length + 1 + metal::max(draft[0], 0) + row % W;
        const long first = static_cast<long>(row) * size;
        const int index = int(thread_index_in_threadgroup);
"""
OF_ROW, OF_SEQUENCE = (
    "row = int(threadgroup_position_in_grid.y), b = row / W",
    "b = int(threadgroup_position_in_grid.z), row = b * W",
)
SPECIAL = """
        const auto special = headstart::special_tokens(xtc_special, xtc_special_shape[1], b);
"""


def slices_of(vocabulary: int) -> int:
    return -(-vocabulary // (THREADS * EACH))


def sampling_kernel(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str, *headers: str
) -> Callable[..., Any]:
    """Return a kernel to which every input is an array in device memory."""
    kernel = metal_kernel(name, inputs, outputs, source, *headers)
    return lambda inputs, **how: kernel(inputs=[_in_device_memory(each) for each in inputs], **how)


def _in_device_memory(array: mx.array) -> mx.array:
    """Return the array with at least eight numbers: fewer MLX passes in another address space, and each batch of one,
    two and so on would have pipelines of its own."""
    if array.size >= 8:
        return array
    rows = -(-8 // (array.size // array.shape[0]))
    return mx.pad(array, [(0, rows - array.shape[0]), *[(0, 0)] * (array.ndim - 1)])


@lru_cache(typed=True)
def constant(number: int) -> mx.array:
    return mx.array([number] * 8)  # not so few that MLX would pass them in another address space


@lru_cache(typed=True)
def _numbers(*each: float) -> mx.array:
    """Return the same numbers [1024, n] for every sequence."""
    return mx.array([each] * 1024)


@cache
def _everything() -> mx.array:
    return mx.array([[[0]]] * 8, mx.uint8)  # not a mask


def _how(sampler: Sampler, draft: int | None) -> list[mx.array]:
    special = sampler.xtc_special
    special = special if special is None else special.reshape(special.shape[0], -1)
    xtc = [sampler.xtc_probability, sampler.xtc_threshold, special]
    none = [_numbers(0.0), _numbers(0.0), _numbers(-1)]
    given = [other if each is None else each for each, other in zip(xtc, none, strict=True)]
    return [*sampler[:4], constant(-1 if draft is None else draft), *given]


def metal_draw(
    logits: mx.array,
    sampler: Sampler,
    draft: int | None = None,
    drafts: mx.array | None = None,
    permitted: mx.array | None = None,
) -> Draws:
    how, (B, W, _) = _how(sampler, draft), logits.shape
    found, bins, logits = _survey(logits, sampler, how, drafts, permitted)
    plan = rest = entries = found  # not read
    if sampler.truncates:
        plan, counts = _plan(logits, how, found, bins)
        entries, rest = _gather(logits, how, plan, counts)
    source = f"""
        threadgroup ulong parts[THREADS / 16], chosen[4];
        threadgroup metal::atomic_uint counters[3 * headstart::DIGITS];
        {ROW}{SPECIAL}
        const headstart::Shared shared = {{parts, chosen, counters}};
        headstart::draw_row<THREADS, TRUNCATES>(
            logits + first, size, found + row * slices * headstart::FOUND, rest + row * slices * headstart::FOUND,
            slices, plan + row * headstart::PLAN, entries + row * 2 * headstart::LISTED, how, purpose, position,
            special, token + row, finite + row, cuts + 6 * row, shared, index);
    """
    inputs = ("logits", *HOW, "found", "rest", "plan", "entries")
    tokens, finite, cuts = sampling_kernel("draw", inputs, ("token", "finite", "cuts"), source, "sampling", "select")(
        inputs=[logits, *how, found, rest, plan, entries],
        template=template_of(logits, TRUNCATES=sampler.truncates),
        grid=(THREADS, B * W, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(B, W), (B, W), (B, W, 6)],
        output_dtypes=[mx.int32] * 3,
    )
    return Draws(tokens, finite, cuts, logits, (plan, entries))


def template_of(logits: mx.array, **more: int | mx.Dtype) -> list[tuple[str, int | mx.Dtype]]:
    return [("T", logits.dtype), ("THREADS", THREADS), ("EACH", EACH), *more.items()]


def _survey(
    logits: mx.array, sampler: Sampler, how: list[mx.array], drafts: mx.array | None, permitted: mx.array | None
) -> tuple[mx.array, mx.array, mx.array]:
    """Return what is found of slices, their bins, and logits as they were changed."""
    (B, W, V), changes = logits.shape, sampler.adjusts or permitted is not None
    count = slices_of(V)
    marks = "threadgroup uchar marks[THREADS * EACH];" if changes else ""
    changed = """
        const int before = metal::max(draft[0], 0) + row % W;
        const auto own = headstart::row_changes(
            penalties + 8 * b, bias_ids + b * bias_ids_shape[1],
            bias + b * bias_ids_shape[1], bias_ids_shape[1],
            stop_ids + b * stop_ids_shape[1], stop_ids_shape[1],
            recent + b * recent_shape[1], recent_shape[1],
            drafts + b * drafts_shape[1], before, remaining[b] - before > free_at[b],
            counts_shape[1] == size ? counts + static_cast<long>(b) * size : nullptr,
            permitted_shape[2] == size ? permitted + first : nullptr);
        own.mark(begin, THREADS * EACH, marks, index, THREADS);
    """
    change = """x = own.change(x, id, marks[id - begin]);
                changed[first + id] = x;"""
    source = f"""
        threadgroup ulong parts[THREADS / 16];
        threadgroup metal::atomic_uint counted[2 * headstart::BINS];
        {marks}{ROW}{changed if changes else ""}
        float values[EACH];
        ulong best = headstart::NOTHING;
        for (int i = 0; i < EACH; ++i) {{
            const int id = begin + i * THREADS + index;
            float x = -INFINITY;
            if (id < size) {{
                x = static_cast<float>(logits[first + id]);
                const ulong here = x != x ? 0 : headstart::code(x, id);
                best = here < best ? here : best;
                {change if changes else ""}
            }}
            values[i] = x;
        }}
        const int at = row * slices + slice;
        headstart::survey<THREADS, EACH, TRUNCATES>(
            values, best, how, purpose, position, begin, size, found + at * headstart::FOUND,
            bins + (TRUNCATES ? at * 2 * headstart::BINS : 0), parts, counted, index);
    """
    inputs, given = ["logits", *HOW[:-1]], [logits, *how[:-1]]
    outputs, dtypes = ["found", "bins"], [mx.uint32] * 2
    shapes: list[tuple[int, ...]] = [(B * W, count, FOUND)]
    shapes.append((B * W, count, 2 * BINS) if sampler.truncates else (8, 1, 1))
    if changes:
        inputs, given = [*inputs, *CHANGES], [*given, *_changes(sampler, drafts, permitted)]
        outputs, shapes, dtypes = [*outputs, "changed"], [*shapes, logits.shape], [*dtypes, mx.float32]
    found, bins, *rest = sampling_kernel("survey", tuple(inputs), tuple(outputs), source, "sampling", "changes")(
        inputs=given,
        template=template_of(logits, TRUNCATES=sampler.truncates),
        grid=(count * THREADS, B * W, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=shapes,
        output_dtypes=dtypes,
    )
    return found, bins, rest[0] if rest else logits


def _changes(sampler: Sampler, drafts: mx.array | None, permitted: mx.array | None) -> list[mx.array]:
    """Return what changes logits, and in place of what no sequence uses numbers that change nothing."""

    def numbers(given: mx.array | None, *neutral: float) -> mx.array:
        return _numbers(*neutral) if given is None or not given.size else given

    text = [numbers(sampler.recent, -1), numbers(drafts, -1)]
    counted = [numbers(sampler.remaining, 0), numbers(sampler.counts, 0.0)]
    mask = _everything() if permitted is None else permitted.view(mx.uint8)
    return [
        numbers(sampler.penalties, 1.0, *[0.0] * 7), numbers(sampler.bias_ids, -1), numbers(sampler.bias, 0.0),
        numbers(sampler.stop_ids, -1), numbers(sampler.free_at, 0), *text, *counted, mask,
    ]  # fmt: skip


def _plan(logits: mx.array, how: list[mx.array], found: mx.array, bins: mx.array) -> tuple[mx.array, mx.array]:
    rows, count = found.shape[:2]
    source = f"""
        threadgroup float masses[headstart::BINS];
        threadgroup uint counted[headstart::BINS];
        {ROW}
        headstart::plan_row(
            found + row * slices * headstart::FOUND, bins + row * slices * 2 * headstart::BINS, slices, how,
            how.excludes(position), size, plan + row * headstart::PLAN, counts + row * metal::max(slices, 8), masses,
            counted, index);
    """
    made: list[mx.array] = sampling_kernel(
        "plan", ("logits", *HOW, "found", "bins"), ("plan", "counts"), source, "sampling"
    )(
        inputs=[logits, *how, found, bins],
        template=template_of(logits),
        grid=(BINS, rows, 1),
        threadgroup=(BINS, 1, 1),
        output_shapes=[(rows, PLAN), (rows, max(count, 8))],
        output_dtypes=[mx.uint32] * 2,
    )
    plan, counts = made
    return plan, counts


def _gather(logits: mx.array, how: list[mx.array], plan: mx.array, counts: mx.array) -> list[mx.array]:
    """Return the lists of rows, and what slices draw of those that only XTC shortens."""
    rows, count = plan.shape[0], slices_of(logits.shape[-1])
    source = f"""
        threadgroup ulong parts[THREADS / 16];
        threadgroup metal::atomic_uint next[1];
        {ROW}{SPECIAL}
        const auto keys = how.keys(purpose, position);
        headstart::gather<THREADS>(
            logits + first, plan + row * headstart::PLAN, counts + row * metal::max(slices, 8), slice, begin,
            metal::min(begin + THREADS * EACH, size), how, keys, special,
            entries + row * 2 * headstart::LISTED, rest + (row * slices + slice) * headstart::FOUND, parts, next,
            index);
    """
    made: list[mx.array] = sampling_kernel(
        "gather", ("logits", *HOW, "plan", "counts"), ("entries", "rest"), source, "sampling"
    )(
        inputs=[logits, *how, plan, counts],
        template=template_of(logits),
        grid=(count * THREADS, rows, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, 2 * LISTED), (rows, count, FOUND)],
        output_dtypes=[mx.uint32] * 2,
    )
    return made


LINES = tuple(f"rows{n}" for n in range(DRAFTS))
OF_WINDOW = ("logits", *HOW, "window", "max_k", "remaining", "target_cuts", "drafter_cuts", *LINES)
WINDOW = f"""
        {ROW.replace(OF_ROW, OF_SEQUENCE)}{SPECIAL}
        const device Q* const all_rows[] = {{{", ".join(LINES)}}};
        const int k = W - 1, width = rows0_shape[1];
        const int allowed = headstart::allowed_drafts(k, max_k[b], remaining[b]);
        if (index < k && how.ratio) {{
            const int id = window[b * W + index + 1];
            const auto from = headstart::cut_at(drafter_cuts + 6 * (b * k + index));
            const device Q* const line = width > 1 ? all_rows[0] + static_cast<long>(b * width + index) * size
                                                   : all_rows[index] + static_cast<long>(b) * size;
            const float x = static_cast<float>(logits[first + static_cast<long>(index) * size + id]);
            const float y = from.only >= 0 ? 0.0f : static_cast<float>(line[id]);
            const auto target = headstart::cut_at(target_cuts + 6 * (row + index));
            p[index] = headstart::probability(target, x, id, how, special);
            q[index] = headstart::probability(from, y, id, how, special);
        }}
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
"""


def metal_ratio(
    drawn: Draws,
    window: mx.array,
    sources: Sequence[Source],
    sampler: Sampler,
    optimistic: mx.array,
    max_k: mx.array,
    remaining: mx.array,
) -> tuple[mx.array, mx.array]:
    (B, W), logits = window.shape, drawn.logits
    sources = sources or [(logits, drawn.cuts)]  # not read
    rows = [each for *several, _ in sources for each in several]
    rows = rows if len(rows) <= DRAFTS else [mx.concatenate(rows, axis=1)]
    cuts = sources[0][-1] if len(sources) == 1 else mx.concatenate([each for *_, each in sources], axis=1)
    rows += rows[:1] * (DRAFTS - len(rows))
    given = [logits, *_how(sampler, None), window, max_k, remaining, drawn.cuts, cuts, *rows]
    template = template_of(logits, Q=rows[0].dtype)
    excess = _excess(given, template, drawn, window.shape)
    source = f"""
        threadgroup float p[headstart::DRAFTS], q[headstart::DRAFTS];
        {WINDOW}
        headstart::accept(
            window + b * W, drawn + b * W, W, allowed, optimistic[b] != 0, p, q, excess + b * k * slices * 4, slices,
            how, tokens + b * W, most + b, index);
    """
    inputs = (*OF_WINDOW, "excess", "drawn", "optimistic")
    tokens, most = sampling_kernel("accept", inputs, ("tokens", "most"), source, "sampling", "select", "ratio")(
        inputs=[*given, excess, drawn.tokens, optimistic.astype(mx.int32)],
        template=template,
        grid=(32, 1, B),
        threadgroup=(32, 1, 1),
        output_shapes=[(B, W), (B,)],
        output_dtypes=[mx.int32] * 2,
    )
    return tokens, most


def _excess(
    given: list[mx.array], template: list[tuple[str, int | mx.Dtype]], drawn: Draws, shape: tuple[int, ...]
) -> mx.array:
    """Return of each draft and slice what the target would draw more often than the drafter, and the mass of it."""
    (B, W), (plan, entries), count = shape, drawn.work, slices_of(drawn.logits.shape[-1])
    source = f"""
        threadgroup ulong parts[THREADS / 16];
        threadgroup float p[headstart::DRAFTS], q[headstart::DRAFTS];
        {WINDOW}
        const int i = int(threadgroup_position_in_grid.y);
        if (i >= allowed || !how.ratio) return;
        float weight = 1.0f;
        for (int j = 0; j < i; ++j) weight = headstart::next_weight(weight, p[j], q[j]);
        const auto from = headstart::candidates(
            logits + first + static_cast<long>(i) * size, size, plan + (LISTED ? (row + i) * headstart::PLAN : 0),
            entries + (LISTED ? (row + i) * 2 * headstart::LISTED : 0), LISTED);
        const device Q* const line = width > 1 ? all_rows[0] + static_cast<long>(b * width + i) * size
                                               : all_rows[i] + static_cast<long>(b) * size;
        const auto target = headstart::cut_at(target_cuts + 6 * (row + i));
        const auto drafter = headstart::cut_at(drafter_cuts + 6 * (b * k + i));
        const auto keys = how.keys(headstart::NEXT, how.length + 1 + i);
        headstart::find_excess<THREADS>(
            from, line, target, drafter, weight, metal::min(begin, from.count),
            metal::min(begin + THREADS * EACH, from.count), how, keys, special,
            excess + ((b * k + i) * slices + slice) * 4, parts, index);
    """
    inputs = (*OF_WINDOW, "plan", "entries")
    made: list[mx.array] = sampling_kernel("excess", inputs, ("excess",), source, "sampling", "select", "ratio")(
        inputs=[*given, plan, entries],
        template=[*template, ("LISTED", plan is not entries)],
        grid=(count * THREADS, W - 1, B),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(B, max(W - 1, 2), count, 4)],
        output_dtypes=[mx.uint32],
    )
    return made[0]
