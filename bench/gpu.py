"""What our CUDA kernels earn whole models on this card.

    python bench/gpu.py 27b [PART ...]         models of these shapes with random 4-bit weights
    python bench/gpu.py 35b [PART ...]
        paths      a layer in one launch beside separate kernels and mlx-lm
        decode     decoding at k = 0..5 with an imposed acceptance, beside mlx-lm
        steps      a step by rows and k
        sampled    a sampled step beside a greedy one
    python bench/gpu.py rows [MODEL]           the built-in model: tokens/s of 1, 4 and 16 rows, k = 0 beside auto

Weights are drawn on the card, so nothing is downloaded. What is compared takes turns; the first turn warms up, of the
others the median counts. With $OUT set, everything is also written to $OUT/gpu.json.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from gpu_products import line, note, random_codes, table
from imposed_acceptance import Recording, decode_imposed, record
from invariance import TASKS
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from headstart import models
from headstart.bench.local import K, decode_batch
from headstart.checkpoint import load_model, load_tokenizer, resolve
from headstart.engine import Engine
from headstart.engine.batch import Batch
from headstart.engine.step import StepResult, prefill_prompts, step, verify
from headstart.kernels.cuda.persistent import PERSISTENT
from headstart.kernels.greedy import Report
from headstart.models import Model
from headstart.models.graph import OFTEN
from headstart.sampling import Proposal, SamplingParams

TURNS = 4
COMMON: dict[str, Any] = {
    "vocab_size": 248320,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "27b": COMMON
    | {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "35b": COMMON
    | {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
}
KS: tuple[K, K] = (0, "auto")
ACCEPTANCE = {"27b": [0.88, 0.75, 0.62, 0.51, 0.42], "35b": [0.81, 0.58, 0.41, 0.29, 0.2]}


def step_seconds(
    model: Model,
    prompts: Sequence[Sequence[int]],
    k: int,
    advance: Callable[[Model, Batch, int], StepResult] = step,
    sampling: SamplingParams | None = None,
) -> float:
    """Return the median seconds of 8 steps, with the next step queued while one is computed, as in the engine.

    They follow as many as it takes to remember the pass, at one capacity: bounds are corrected as in the engine.
    """
    batch = prefill_prompts(model, prompts, max_k=k, sampling=sampling)
    finished: list[float] = []
    running: Report | None = None
    for _ in range(OFTEN + 2 + 9):
        result = advance(model, batch, k)
        report = Report.of([result.accepted[:, None], result.finite[:, None]])
        mx.async_eval(*report.arrays, result.tokens, *batch.arrays())
        if running is not None:
            accepted = [count for count, _ in running.read()]
            finished.append(time.perf_counter())
            bounds = zip(batch.trunk_state.bounds, accepted, strict=True)
            batch.trunk_state.bounds = [bound - (k - count) for bound, count in bounds]
        running = report
    mx.eval(batch.arrays())
    return median(after - before for before, after in pairwise(finished[-9:]))


def random_model(shape: dict[str, Any]) -> tuple[Model, nn.Module]:
    """The model, and mlx-lm's own over the same weights with its own norms."""
    built = models.build(shape)
    for part in (built.lm, built.weights.mtp):
        nn.quantize(part, group_size=64, bits=4, class_predicate=quantises)
    model = Model(
        built.family,
        built.config,
        built.lm,
        models.Weights(built.family.text(built.lm), built.family.lm_head(built.lm), built.weights.mtp),
        mx.bfloat16,
    )
    flat: Any = tree_flatten(model.weights.parameters())
    for name, array in flat:
        if array.dtype == mx.uint32:
            array = random_codes(array.shape)
        elif name.endswith((".scales", ".biases")):
            array = mx.zeros(array.shape, mx.bfloat16)
        elif not name.endswith(("norm.weight", "norm_embedding.weight", "norm_hidden.weight", "A_log")):
            array = (mx.random.normal(array.shape) * array.shape[-1] ** -0.5).astype(mx.bfloat16)
        mx.eval(array)
        model.weights.update(tree_unflatten([(name, array)]))
    for _, module in model.weights.named_modules():
        if "scales" in module:
            inputs = module.weight.shape[-1] * 32 // module.bits
            spread = 2 * inputs**-0.5 / 2 ** (module.bits - 1)
            scales = mx.random.uniform(0.5, 1.5, module.scales.shape) * spread
            module.scales = scales.astype(mx.bfloat16)
            module.biases = (-scales * (2**module.bits - 1) / 2).astype(mx.bfloat16)
            mx.eval(module.scales, module.biases)
    theirs = built.family.build(shape)
    nn.quantize(theirs, group_size=64, bits=4, class_predicate=quantises)
    kept: Any = tree_flatten(model.lm.parameters())
    theirs.update(tree_unflatten([(n, a.astype(mx.bfloat16) if n.endswith("norm.weight") else a) for n, a in kept]))
    mx.eval(theirs.parameters())
    return model, theirs


def warm_model(shape: dict[str, Any]) -> tuple[Model, nn.Module]:
    """The same, with our kernels compiled: side by side, where the first steps would compile them one by one."""
    model, theirs = random_model(shape)
    Engine(model).warm_up()
    return model, theirs


def quantises(path: str, module: nn.Module) -> bool:
    kinds = (nn.Linear, nn.Embedding, SwitchLinear)
    return isinstance(module, kinds) and not isinstance(module, QuantizedSwitchLinear) and path != "fc"


def prompts(count: int, length: int = 9) -> list[list[int]]:
    return [[(7919 * row + 104729 * i) % 200000 + 1 for i in range(length)] for row in range(count)]


def stock_rate(lm: nn.Module, tokens: int = 48) -> float:
    """mlx-lm's tokens a second, one sequence."""
    said = generate_step(mx.array(prompts(1)[0]), lm, max_tokens=2 * tokens)
    list(islice(said, 8))
    begun = time.perf_counter()
    list(islice(said, tokens))
    return tokens / (time.perf_counter() - begun)


def stock_host(lm: nn.Module, tokens: int = 16) -> tuple[float, float]:
    """Seconds of a step of mlx-lm's that nothing overlaps: until it is described and handed over, and in all."""
    cache, token, times = make_prompt_cache(lm), mx.array(prompts(1)[0]), []
    for _ in range(tokens):
        begun = time.perf_counter()
        token = mx.argmax(lm(token[None], cache)[0, -1:], axis=-1)
        mx.async_eval(token)
        described = time.perf_counter()
        mx.eval(token)
        times.append((described - begun, time.perf_counter() - begun))
    return median(host for host, _ in times[3:]), median(whole for _, whole in times[3:])


def clocks() -> str:
    """Of multiprocessors and memory, MHz."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def beside(model: Model, theirs: nn.Module) -> float:
    """mlx-lm's tokens a second, in turns with ours without drafts."""
    table("mlx-lm, tokens/s", "ours, k = 0", "ratio", "ms a step of mlx-lm's: host", "in all", "clocks, MHz")
    turns = []
    for turn in range(TURNS):
        pair = (stock_rate(theirs), decode_batch(model, prompts(1), 0, 96).rate)
        state, (host, whole) = clocks(), stock_host(theirs)
        line(*pair, f"{pair[1] / pair[0]:.2f}", 1e3 * host, 1e3 * whole, state)
        turns += [pair] * bool(turn)
    stock, plain = (median(rates) for rates in zip(*turns, strict=True))
    print(f"median: {stock:.1f} and {plain:.1f} tokens/s, {plain / stock:.2f} ×", flush=True)
    note("mlx-lm beside k = 0", turns)
    return stock


def decode(name: str, model: Model, stock: float) -> None:
    recording = record(model, prompts(1), 200)
    rates: dict[int, list[float]] = {}
    for turn in range(TURNS):
        for k in range(6):
            done = decode_imposed(model, recording, k, ACCEPTANCE[name])  # which checks the text against k = 0
            if turn:
                rates.setdefault(k, []).append(done.rate)
                note(f"{name} imposed k = {k}", rates[k])
            tokens_a_round = done.tokens_per_round
            if turn == TURNS - 1:
                if k == 0:
                    table(
                        "k", "tokens/s", "lowest", "highest", "to k = 0", "to mlx-lm", "tokens a round", "ms a round"
                    )
                rate = median(rates[k])
                ratio = median(mine / zero for mine, zero in zip(rates[k], rates[0], strict=True))
                cells = (ratio, rate / stock, tokens_a_round, 1e3 * tokens_a_round / rate)
                line(k, rate, min(rates[k]), max(rates[k]), *[f"{cell:.2f}" for cell in cells])


def host_seconds(model: Model, k: int, count: int = 16) -> tuple[float, float, float]:
    """Seconds of a step that nothing overlaps: until it is described, then handed over, and in all."""
    batch, times = prefill_prompts(model, prompts(1), max_k=k), []
    for _ in range(count):
        begun = time.perf_counter()
        result = step(model, batch, k)
        described = time.perf_counter()
        mx.async_eval(result.tokens, result.accepted, result.finite, *batch.arrays())
        handed_over = time.perf_counter()
        mx.eval(result.tokens)
        times.append((described - begun, handed_over - described, time.perf_counter() - begun))
    described, handed_over, whole = (median(column) for column in zip(*times[count // 2 + 1 :], strict=True))
    return described, handed_over, whole


def greedy(model: Model, tokens: int) -> list[int]:
    """What the model says, step by step: an engine would first compile kernels for many rows."""
    batch, said = prefill_prompts(model, prompts(1), max_k=0), []
    for _ in range(tokens):
        said.append(step(model, batch, 0).tokens)
        mx.async_eval(said[-1], *batch.arrays())
    return [int(token) for token in mx.concatenate(said, axis=1)[0]]  # type: ignore[arg-type]


def paths(name: str, model: Model, theirs: nn.Module) -> None:
    """A layer in one launch beside separate kernels and mlx-lm, in turns, without drafts, with 2 and with 3. Both
    paths must say the same text."""
    recording = Recording(prompts(1), [greedy(model, 280)])
    table("turn", "path", "k", "ms a step", "described", "handed over", "alone", "tokens/s", "to k = 0")
    for turn in range(TURNS):
        line(turn, "mlx-lm", *[""] * 5, stock_rate(theirs))
        for path, refusal in (("separate kernels", "this benchmark"), ("one launch a layer", None)):
            PERSISTENT.refusal, plain = refusal, 0.0
            for k in (0, 2, 3):
                seconds, host = step_seconds(model, prompts(1), k), host_seconds(model, k)
                rate = decode_imposed(model, recording, k, ACCEPTANCE[name]).rate
                plain = plain or rate
                line(turn, path, k, *[f"{1e3 * each:.2f}" for each in (seconds, *host)], rate, f"{rate / plain:.2f}")
                note(f"{name} {path} k = {k}", [seconds, *host, rate])
    assert not PERSISTENT.status.tolist()[0], "a barrier was given up"


def steps(name: str, model: Model) -> None:
    table("rows", "k", "ms a step", "to k = 0", "window to a window of 1", "a draft")
    for rows, k in ((1, 3), (4, 3), (16, 3)):
        turns = []
        for turn in range(TURNS + 1):
            plain = step_seconds(model, prompts(rows), 0)
            window = step_seconds(model, prompts(rows), k, advance=verify_only)
            whole = step_seconds(model, prompts(rows), k)
            turns += [(plain, window, whole)] * bool(turn)
        plain, window, whole = (median(times) for times in zip(*turns, strict=True))
        line(rows, 0, f"{1e3 * plain:.2f}", "1.00", "1.00", "")
        ratios = (whole / plain, window / plain)
        draft = f"{(whole - window) / plain / k:.3f}"
        line(rows, k, f"{1e3 * whole:.2f}", *[f"{ratio:.2f}" for ratio in ratios], draft)
        note(f"{name} step {rows} {k}", turns)


def sampled(name: str, model: Model) -> None:
    """A step of one sequence by how it samples, in turns."""
    ways = {
        "greedy": SamplingParams(),
        "temperature 0.7": SamplingParams(temperature=0.7),
        "temperature 0.7, top_k 20, top_p 0.95": SamplingParams(temperature=0.7, top_k=20, top_p=0.95),
        "temperature 0.7, top_p 0.95": SamplingParams(temperature=0.7, top_p=0.95),
    }
    table("sampling", "k", "ms a step", "to greedy")
    for k in (0, 3):
        turns = [
            {way: step_seconds(model, prompts(1), k, sampling=params) for way, params in ways.items()}
            for _ in range(TURNS)
        ][1:]
        for way in ways:
            ratio = median(turn[way] / turn["greedy"] for turn in turns)
            line(way, k, f"{1e3 * median(turn[way] for turn in turns):.2f}", f"{ratio:.2f}")
        note(f"{name} sampled {k}", turns)


def verify_only(model: Model, batch: Batch, k: int) -> StepResult:
    """Verify drafts that cost nothing. They differ, as those of a text do: a mixture of experts cares."""
    tokens = mx.array([[7919 * row + 31 * j + 1 for j in range(k)] for row in range(batch.size)], mx.int32)
    return verify(model, batch, Proposal(tokens, []))


def shape(name: str, parts: list[str]) -> None:
    model, theirs = warm_model(SHAPES[name])
    print(f"{name}: {mx.get_active_memory() / 1e9:.1f} GB", flush=True)
    if "paths" in parts:
        paths(name, model, theirs)
    if "decode" in parts:
        decode(name, model, beside(model, theirs))
    if "steps" in parts:
        steps(name, model)
    if "sampled" in parts:
        sampled(name, model)


def rows(name: str | None) -> None:
    folder = resolve(name)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    asked = []
    for task in TASKS[:16]:
        chat = [{"role": "user", "content": task}]
        asked.append(list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, enable_thinking=False)))
    table("rows", "k = 0, tokens/s", "auto, tokens/s", "auto to k = 0", "lowest", "highest", "tokens a round")
    for count in (1, 4, 16):
        turns = []
        for turn in range(2 * TURNS):
            zero, auto = (decode_batch(model, asked[:count], k, 256) for k in KS)
            turns += [(zero.rate, auto.rate)] * (turn > 1)  # by then auto knows what depths cost
        ratios = [auto / zero for zero, auto in turns]
        rates = [median(rates) for rates in zip(*turns, strict=True)]
        each = auto.tokens_per_round
        line(count, *rates, *[f"{value:.2f}" for value in (median(ratios), min(ratios), max(ratios), each)])
        note(f"aggregate {count}", turns)


def main() -> None:
    mx.set_default_device(mx.gpu)
    what, *rest = sys.argv[1:] or ["27b"]
    if what == "rows":
        rows(rest[0] if rest else None)
    else:
        shape(what, rest or ["paths", "decode", "steps"])


if __name__ == "__main__":
    main()
