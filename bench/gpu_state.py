"""The kernels of what a sequence remembers, on an NVIDIA card: right, of the same bits whatever stands beside them,
and how fast. `python bench/gpu_state.py [--repeats 20] [--quick]`

The shape is the 27B's. References are computed in float64 by numpy, from the same bfloat16 inputs. Times are medians
of runs over as many layers as the model has, so that no state is still in a cache, per layer, inside mx.compile; the
time that the host needs to describe and encode the work is in them. `floor` is what must be moved, each byte once, at
the bandwidth that a large copy reached in the same run. Everything is written to $OUT/gpu_state.json if that is set.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

from headstart.kernels.cuda.attention import attention_fits, launch_attention
from headstart.kernels.cuda.gated_delta import gated_delta_fits
from headstart.kernels.gated_delta import stock_fold_and_run
from headstart.kernels.types import Window
from headstart.models.gated_delta_net import run_window
from headstart.state import Recurrent

run_stock = partial(run_window, run=stock_fold_and_run)
ARGS = TextModelArgs(
    hidden_size=5120,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    max_position_embeddings=262144,
)
RECURRENT_LAYERS, ATTENTION_LAYERS = 48, 16
DTYPE = mx.bfloat16
CONTEXT = 4096  # where attention is checked
TIMED = [(1, 1024), (1, 4096), (4, 4096), (16, 1024), (1, 32768)]  # rows and context where it is timed


@dataclass
class Report:
    rows: list[dict[str, Any]]
    failed: int = 0

    def check(self, what: str, passed: bool, value: float | None = None) -> None:
        self.failed += not passed
        shown = "" if value is None else f" {value:.2e}"
        print(f"{'ok    ' if passed else 'FAILED'} {what}{shown}", flush=True)
        self.rows.append({"check": what, "passed": passed, "value": value})

    def timed(self, what: str, ours: float, theirs: float | None, floor: float) -> None:
        beside = "" if theirs is None else f"{theirs * 1e6:.1f}"
        ratio = "" if theirs is None else f"{theirs / ours:.1f}×"
        print(f"| {what} | {ours * 1e6:.1f} | {beside} | {ratio} | {floor * 1e6:.1f} |", flush=True)
        self.rows.append({"time": what, "ours": ours, "stock": theirs, "floor": floor})  # seconds


def normal(*shape: int, scale: float = 1.0, dtype: mx.Dtype | None = None) -> mx.array:
    return (scale * mx.random.normal(shape)).astype(dtype or DTYPE)


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def error(found: mx.array, expected: np.ndarray) -> float:
    return float(np.linalg.norm(exact(found) - expected) / np.linalg.norm(expected))


def same(pairs: Iterable[tuple[mx.array, mx.array]]) -> bool:
    return all(bool(mx.array_equal(a, b).item()) for a, b in pairs)


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median time of a run, after three that warm up and compile."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        mx.eval(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def bandwidth(repeats: int) -> float:
    """Bytes a second of a large copy, read and written."""
    big = normal(2**29 if ARGS.hidden_size > 1000 else 2**16)
    mx.eval(big)
    return 2 * big.nbytes / seconds(lambda: big * 2, repeats)


# --- the gated delta rule ---------------------------------------------------------------------------------------


def make_net() -> nn.Module:
    net = GatedDeltaNet(ARGS)
    net.conv1d.weight = normal(*net.conv1d.weight.shape, scale=0.5)
    net.norm.weight = mx.random.uniform(0.5, 1.5, net.norm.weight.shape)
    net.set_dtype(DTYPE)
    net.A_log = net.A_log.astype(mx.float32)
    net.norm.weight = net.norm.weight.astype(mx.float32)
    mx.eval(net.parameters())
    return net


def make_window(net: nn.Module, rows: int, width: int) -> Window:
    heads = net.num_v_heads
    window = Window(
        normal(rows, width, net.conv_dim),
        normal(rows, width, heads, net.head_v_dim),
        normal(rows, width, heads),
        normal(rows, width, heads),
    )
    mx.eval(window)
    return window


def make_memory(net: nn.Module, rows: int) -> Recurrent:
    memory = Recurrent(
        normal(rows, net.num_v_heads, net.head_v_dim, net.head_k_dim, dtype=mx.float32),
        normal(rows, net.conv_kernel_size - 1, net.conv_dim),
    )
    mx.eval(memory.arrays())
    return memory


def copy_of(memory: Recurrent) -> Recurrent:
    return Recurrent(memory.state, memory.conv, memory.pending)


def part(window: Window, row: int, start: int, stop: int) -> Window:
    return Window(*[a[row : row + 1, start:stop] for a in window])


def reference(
    net: nn.Module, window: Window, state: np.ndarray, conv: np.ndarray, certain: int
) -> tuple[np.ndarray, np.ndarray]:
    """One row, one token after the other, in float64 → outputs [W, Hv, Dv] and the state after what is certain."""
    qkv, z, b, a = (exact(t)[0] for t in window)
    weights, A_log, dt_bias, norm = (exact(t) for t in (net.conv1d.weight, net.A_log, net.dt_bias, net.norm.weight))
    heads, repeat, inputs = net.num_v_heads, net.num_v_heads // net.num_k_heads, np.concatenate([conv, qkv])
    outputs, kept = [], state
    for t in range(qkv.shape[0]):
        mixed = (inputs[t : t + weights.shape[1]] * weights[:, :, 0].T).sum(0)
        mixed = mixed / (1 + np.exp(-mixed))
        q, k, v = np.split(mixed, [net.key_dim, 2 * net.key_dim])
        q, k = (x.reshape(net.num_k_heads, -1) for x in (q, k))
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        q, k = np.repeat(q / np.sqrt(net.head_k_dim), repeat, 0), np.repeat(k, repeat, 0)
        state = state * np.exp(-np.exp(A_log) * np.logaddexp(a[t] + dt_bias, 0))[:, None, None]
        known = np.einsum("hvk,hk->hv", state, k)
        delta = (v.reshape(heads, -1) - known) / (1 + np.exp(-b[t]))[:, None]
        state = state + delta[:, :, None] * k[:, None]
        if t == certain - 1:
            kept = state
        y = np.einsum("hvk,hk->hv", state, q)
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + net.norm.eps) * norm
        outputs.append(y * z[t] / (1 + np.exp(-z[t])))
    return np.stack(outputs), kept


def check_recurrence(report: Report, net: nn.Module) -> None:
    print("\nGated delta rule")
    memory = make_memory(net, 3)
    report.check("the kernel is taken", gated_delta_fits(memory.state, DTYPE))
    none = mx.zeros((3,), mx.int32)

    for width, certain in [(1, 1), (4, 1), (9, 1), (40, 40)]:
        window, kept = make_window(net, 3, width), copy_of(memory)
        y = run_window(net, window, kept, none, certain)
        expected, state = reference(
            net, part(window, 1, 0, width), exact(memory.state)[1], exact(memory.conv)[1], certain
        )
        report.check(f"W={width} certain={certain}: output to float64", (e := error(y[1], expected)) < 4e-3, e)
        report.check(f"W={width} certain={certain}: state to float64", (e := error(kept.state[1], state)) < 1e-5, e)

    def one_by_one(window: Window, row: int, kept: Recurrent, count: int) -> mx.array:
        nothing = mx.zeros((1,), mx.int32)
        return mx.concatenate(
            [run_window(net, part(window, row, t, t + 1), kept, nothing, 1) for t in range(count)], axis=1
        )

    def row_of(memory: Recurrent, row: int) -> Recurrent:
        return Recurrent(memory.state[row : row + 1], memory.conv[row : row + 1])

    for width in (2, 4, 9, 17):
        window, kept = make_window(net, 3, width), copy_of(memory)
        y = run_window(net, window, kept, none, width)
        alone = row_of(memory, 2)
        parts = one_by_one(window, 2, alone, width)
        equal = same([(y[2:], parts), (kept.state[2:], alone.state), (kept.conv[2:], alone.conv)])
        report.check(f"W={width} of three rows: the bits of one row's tokens one by one", equal)

    first, then, accepted = make_window(net, 3, 9), make_window(net, 3, 4), (0, 3, 8)
    kept = copy_of(memory)
    run_window(net, first, kept, none, 1)
    y = run_window(net, then, kept, mx.array(accepted, mx.int32), 1)
    for row, count in enumerate(accepted):
        alone = row_of(memory, row)
        one_by_one(first, row, alone, 1 + count)
        pairs = [(y[row : row + 1, :1], one_by_one(then, row, alone, 1)), (kept.state[row : row + 1], alone.state)]
        pairs.append((kept.conv[row : row + 1], alone.conv))
        pairs.append((y[row : row + 1, 1:], one_by_one(part(then, row, 1, 4), 0, alone, 3)))
        report.check(f"{count} of 8 pending drafts folded: the bits of tokens never in doubt", same(pairs))


def time_recurrence(report: Report, net: nn.Module, speed: float, repeats: int, quick: bool) -> None:
    heading("Gated delta rule, a layer, from projections to gated norm")
    state_bytes = 4 * net.num_v_heads * net.head_v_dim * net.head_k_dim
    cases = [(rows, width) for rows in ((1, 4) if quick else (1, 4, 16)) for width in (1, 2, 4, 6, 9)]
    for rows, width in cases:
        layers = [make_memory(net, rows) for _ in range(RECURRENT_LAYERS)]
        window = make_window(net, rows, width)
        accepted = mx.full((rows,), (width - 1) * 3 // 4, mx.int32)
        if width > 1:  # pending drafts of a window as wide
            for memory in layers:
                run_window(net, window, memory, accepted, 1)
        ours = time_layers(net, run_window, layers, window, accepted, 1, repeats)
        few = [make_memory(net, rows) for _ in range(6)]
        if width > 1:
            for memory in few:
                run_stock(net, window, memory, accepted, 1)
        theirs = time_layers(net, run_stock, few, window, accepted, 1, max(3, repeats // 4))
        floor = rows * (2 * state_bytes + 6 * net.conv_dim * 2 * (width + 3)) / speed
        report.timed(f"{rows} rows, window of {width}", ours, theirs, floor)

    chunk = 512
    layers, window = [make_memory(net, 1) for _ in range(4)], make_window(net, 1, chunk)
    ours = time_layers(net, run_window, layers, window, mx.zeros((1,), mx.int32), chunk, max(3, repeats // 4))
    report.timed(f"prompt, {chunk} tokens", ours, None, (2 * state_bytes + 3 * net.conv_dim * 2 * chunk) / speed)


def time_layers(
    net: nn.Module,
    run: Callable[..., mx.array],
    layers: list[Recurrent],
    window: Window,
    accepted: mx.array,
    certain: int,
    repeats: int,
) -> float:
    """Seconds a layer."""
    mx.eval([memory.arrays() for memory in layers])

    @mx.compile
    def all_of_them(arrays: list[list[mx.array]], window: Window, accepted: mx.array) -> list[mx.array]:
        out = []
        for each in arrays:
            memory = Recurrent.of(each)
            out += [run(net, Window(*window), memory, accepted, certain), *memory.arrays()]
        return out

    arrays = [memory.arrays() for memory in layers]
    return seconds(lambda: all_of_them(arrays, list(window), accepted), repeats) / len(layers)


# --- attention --------------------------------------------------------------------------------------------------


def make_kv(rows: int, capacity: int) -> tuple[mx.array, mx.array]:
    keys = normal(rows, ARGS.num_key_value_heads, capacity, ARGS.head_dim)
    values = normal(rows, ARGS.num_key_value_heads, capacity, ARGS.head_dim)
    mx.eval(keys, values)
    return keys, values


def check_attention(report: Report) -> None:
    print("\nAttention")
    H, D, rows = ARGS.num_attention_heads, ARGS.head_dim, 3
    group = H // ARGS.num_key_value_heads
    scale, lengths = D**-0.5, [5, CONTEXT // 2 - 3, CONTEXT - 20]
    keys, values = make_kv(rows, CONTEXT)
    offset = mx.array(lengths, mx.int32)
    report.check("the kernel is taken", attention_fits(4, H, keys))
    for width in (1, 4, 9, 16):
        queries, gates = normal(rows, H, width, D, scale=2.0), normal(rows, width, 2 * H * D)
        # Beyond what a row has written there is no number.
        written = offset[:, None, None, None] + width > mx.arange(CONTEXT)[None, None, :, None]
        K, V = (mx.where(written, a, mx.nan).astype(DTYPE) for a in (keys, values))
        y = launch_attention(queries, gates, K, V, offset, scale, CONTEXT)
        for row, length in enumerate(lengths):
            k, v = (np.repeat(exact(a[row, :, : length + width]), group, 0) for a in (keys, values))
            q = exact(queries[row])
            scores = q @ k.swapaxes(1, 2) * scale
            scores[:, np.arange(length + width)[None] > length + np.arange(width)[:, None]] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out = (p @ v / p.sum(-1, keepdims=True)).swapaxes(0, 1)
            out = out / (1 + np.exp(-exact(gates[row]).reshape(width, H, 2 * D)[..., D:]))
            report.check(
                f"W={width} at {length}: output to float64", (e := error(y[row], out.reshape(width, -1))) < 5e-3, e
            )
        pairs = []
        for w in range(width):
            own = slice(w, w + 1)
            alone = launch_attention(queries[:, :, own], gates[:, own], keys, values, offset + w, scale, CONTEXT)
            pairs.append((alone, y[:, own]))
        report.check(f"W={width}: the bits of each query in a window of its own", same(pairs))
        pairs = [
            (launch_attention(*[a[r : r + 1] for a in (queries, gates, K, V, offset)], scale, CONTEXT), y[r : r + 1])
            for r in range(rows)
        ]
        report.check(f"W={width}: the bits of each row alone", same(pairs))
        larger = [mx.pad(a, [(0, 0), (0, 0), (0, 512), (0, 0)]) for a in (K, V)]
        wide = launch_attention(queries, gates, *larger, offset, scale, CONTEXT + 512)
        report.check(f"W={width}: the bits of a larger capacity", same([(wide, y)]))


def stock_attention(
    queries: mx.array, gates: mx.array, keys: mx.array, values: mx.array, offset: mx.array, scale: float, reach: int
) -> mx.array:
    B, H, W, D = queries.shape
    seen = mx.arange(reach) <= (offset[:, None] + mx.arange(W))[:, None, :, None]
    gates = gates.reshape(B, W, H, 2 * D)[..., D:].reshape(B, W, -1)
    keys, values = keys[:, :, :reach], values[:, :, :reach]
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=seen)
    return out.transpose(0, 2, 1, 3).reshape(B, W, -1) * mx.sigmoid(gates)


def time_attention(report: Report, speed: float, repeats: int, quick: bool) -> None:
    heading("Attention, a layer, from rotated queries to gated output")
    H, D, Hkv = ARGS.num_attention_heads, ARGS.head_dim, ARGS.num_key_value_heads
    for rows, context in TIMED[:2] if quick else TIMED:
        layers = [make_kv(rows, context + 256) for _ in range(ATTENTION_LAYERS)]
        for width in (1, 4, 9):
            queries, gates = normal(rows, H, width, D), normal(rows, width, 2 * H * D)
            offset, reach = mx.full((rows,), context, mx.int32), context + 64
            mx.eval(queries, gates, offset)
            times = []
            for run in (launch_attention, stock_attention):

                @mx.compile
                def all_of_them(
                    layers: list[list[mx.array]], inputs: list[mx.array], run: Any = run, reach: int = reach
                ) -> list[mx.array]:
                    queries, gates, offset = inputs
                    return [run(queries, gates, k, v, offset, D**-0.5, reach) for k, v in layers]

                inputs, arrays = [queries, gates, offset], [list(layer) for layer in layers]
                run_all = partial(all_of_them, arrays, inputs)
                times.append(seconds(run_all, repeats) / len(layers))
            floor = rows * 4 * Hkv * (context + width) * D / speed
            report.timed(f"{rows} rows of {context}, window of {width}", times[0], times[1], floor)


def heading(title: str) -> None:
    print(f"\n{title}\n| | ours µs | stock µs | | floor µs |\n| --- | --- | --- | --- | --- |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    mx.random.seed(int(time.time()))
    report, net = Report([]), make_net()
    check_recurrence(report, net)
    check_attention(report)
    speed = bandwidth(arguments.repeats)
    print(f"\nA copy reads and writes {speed / 1e12:.2f} TB/s")
    report.rows.append({"bandwidth": speed})
    time_recurrence(report, net, speed, arguments.repeats, arguments.quick)
    time_attention(report, speed, arguments.repeats, arguments.quick)
    if out := os.environ.get("OUT"):
        Path(out, "gpu_state.json").write_text(json.dumps(report.rows, indent=1))
    print(f"\n{report.failed} checks failed")
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
