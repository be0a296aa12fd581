"""Invariance: greedy token ids do not depend on the depth, the chunks, the batch or the head."""

import random
import statistics
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import pytest

import headstart.engine.prefill
from fixtures import (
    FAMILIES,
    batch_of,
    builtin_model,
    collect,
    generate,
    mlx_lm_greedy,
    random_model,
    random_prompt,
    submit,
)  # fmt: skip
from headstart.checkpoint import load_tokenizer
from headstart.engine import Engine
from headstart.engine.batch import RESUME_PAIRS
from headstart.engine.step import step
from headstart.kernels.cpu.backend import StockCpu

DEPTHS = range(9)
BUILTIN = Path(headstart.__file__).parent / "builtin" / "tiny-qwen3.5"

VERBS = ("get", "set", "load", "save", "parse", "merge", "count", "find")
NOUNS = ("user", "config", "file", "token", "matrix", "date", "path", "queue")


@lru_cache
def tasks(count: int) -> list[list[int]]:
    """Prompts for the built-in model, which has learnt to write small Python functions."""
    tokenizer = load_tokenizer(BUILTIN)
    asked = [f"Write a Python function `{v}_{n}`: {v.title()} the {n} that is given." for n in NOUNS for v in VERBS]
    chats = [[{"role": "user", "content": text}] for text in asked]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats[:count]]


@pytest.mark.slow  # test_depth.py has it for two depths, and the test after the next one for all on random models
def test_greedy_output_is_the_same_for_every_depth_on_the_builtin_model() -> None:
    model = builtin_model()
    said = []
    for k in DEPTHS:
        engine = Engine(model)
        handles = [submit(engine, prompt, max_tokens=12, k=k) for prompt in tasks(2)]
        said.append([collect(handle).tokens for handle in handles])
    assert said == [said[0]] * len(DEPTHS)
    assert [len(tokens) for tokens in said[0]] == [12] * 2


@pytest.mark.slow
def test_greedy_output_of_64_prompts_is_the_same_for_every_depth() -> None:
    """128 tokens each; the table belongs in the docs."""
    model, plain = builtin_model(), []
    print("\n| k | prompts | tokens | identical to k = 0 | tokens per round | acceptance by position |")
    print("| --- | --- | --- | --- | --- | --- |")
    for k in DEPTHS:
        engine = Engine(model)
        handles = [submit(engine, prompt, max_tokens=128, k=k) for prompt in tasks(64)]
        answers = [collect(handle) for handle in handles]
        said = [answer.tokens for answer in answers]
        plain = plain or said
        same = sum(a == b for a, b in zip(said, plain, strict=True))
        rounds = sum(answer.stats.rounds for answer in answers)
        shares = [
            f"{sum(a.stats.accepted_by_position[j] for a in answers if len(a.stats.accepted_by_position) > j)}"
            f"/{sum(a.stats.proposed_by_position[j] for a in answers if len(a.stats.proposed_by_position) > j)}"
            for j in range(k)
        ]
        tokens = sum(map(len, said))
        print(f"| {k} | {len(said)} | {tokens} | {same} | {tokens / rounds:.2f} | {' '.join(shares)} |", flush=True)
        assert said == plain
    assert statistics.mean(map(len, plain)) == 128  # no stop ids were asked for


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_mlx_lms_own_for_every_depth(family: str) -> None:
    model = random_model(family)
    for length in (2, 17) if family == "dense" else (17,):
        prompt = random_prompt(model, length, length)
        expected = mlx_lm_greedy(model, prompt, 24)
        for k in DEPTHS:
            answer = generate(model, prompt, max_tokens=24, k=k)
            assert answer.tokens == expected
            assert answer.stats.exact


def test_greedy_output_of_the_builtin_model_is_mlx_lms_own() -> None:
    model = builtin_model("tiny-qwen3.5", mx.float32)
    prompt = tasks(1)[0]
    assert generate(model, prompt, max_tokens=16, k=3).tokens == mlx_lm_greedy(model, prompt, 16)


def test_a_prompt_of_one_token_is_drafted_for_too() -> None:
    """It makes no pair for the head before the first step."""
    model = random_model("dense")
    expected = mlx_lm_greedy(model, [7], 12)
    for k in (1, 3, 8):
        assert generate(model, [7], max_tokens=12, k=k).tokens == expected


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "moe")), "next"]
)
def test_greedy_output_is_the_same_when_the_depth_changes_every_step(family: str) -> None:
    """With a stretch at k = 0 long enough for the head, which does not run, to miss something."""
    model, rng = random_model(family), random.Random(family)
    prompts = [random_prompt(model, length, length) for length in (3, 11, 26)]
    batch = batch_of(model, *prompts)
    depths = [rng.randint(0, 8) for _ in range(10)] + [0] * (RESUME_PAIRS + 3) + [rng.randint(0, 8) for _ in range(6)]
    said: list[list[int]] = [[] for _ in prompts]
    for k in depths:
        round = step(model, batch, k)
        mx.eval(round, batch.arrays())
        for row, accepted in enumerate(round.verdict.accepted.tolist()):
            said[row] += round.verdict.tokens[row, : accepted + 1].tolist()
    for prompt, tokens in zip(prompts, said, strict=True):
        assert tokens == mlx_lm_greedy(model, prompt, len(tokens))


@pytest.mark.parametrize(
    ("chunk", "family"),
    [
        *((16, family) for family in FAMILIES),
        *(pytest.param(chunk, family, marks=pytest.mark.slow) for chunk in (32, 512) for family in FAMILIES),
    ],
)
def test_greedy_output_is_the_same_however_the_prompt_is_cut(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix hit resumes at a multiple of the chunk, so every cut at multiples must give the same."""
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", chunk)
    model = random_model(family)
    lengths = (15, 16, 17, 33, 65, 100) if family == "dense" else (17, 33)
    prompts = [random_prompt(model, length, length) for length in (lengths if chunk < 512 else (513, 530))]
    engine = Engine(model)
    handles = [submit(engine, prompt, max_tokens=12, k=k) for prompt in prompts for k in (0, 3)]
    answers = [collect(handle).tokens for handle in handles]
    expected = [tokens for prompt in prompts for tokens in [mlx_lm_greedy(model, prompt, 12)] * 2]
    assert answers == expected


def test_a_long_prompt_is_prefilled_at_fixed_multiples_whatever_runs_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a cut may change bits it is at a multiple, and a prefix entry ends there."""
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 16)
    monkeypatch.setattr(StockCpu, "cut", None)
    cuts: list[int] = []
    prefill = headstart.engine.prefill.prefill_by_layers

    def noted(model, batch, tokens, following, *rest):  # type: ignore[no-untyped-def]
        cuts.append(tokens.shape[1])
        return prefill(model, batch, tokens, following, *rest)

    monkeypatch.setattr(headstart.engine.prefill, "prefill_by_layers", noted)
    model = random_model("dense")
    engine = Engine(model)
    short = submit(engine, random_prompt(model, 5), max_tokens=20, k=2)
    long = submit(engine, random_prompt(model, 50), max_tokens=4, k=2)
    while engine.run_once():
        pass
    assert cuts == [4, 16, 16, 16, 1]
    assert len(collect(short).tokens) == 20
    assert len(collect(long).tokens) == 4


def test_a_broken_head_changes_no_token() -> None:
    """A head that holds NaN drafts nonsense. That is slow, and nothing else."""
    model = random_model("dense")
    prompt = random_prompt(model, 20)
    engine = Engine(model)
    handle = submit(engine, prompt, max_tokens=24, k=3)
    while not engine.scheduler.running.sequences:
        engine.run_once()
    assert engine.scheduler.running.batch is not None
    assert engine.scheduler.running.batch.head_state is not None
    memory = engine.scheduler.running.batch.head_state.layers[0]
    memory.values = mx.full(memory.values.shape, mx.nan)
    answer = collect(handle)
    assert answer.tokens == mlx_lm_greedy(model, prompt, 24)
    assert answer.finish_reason == "length"
