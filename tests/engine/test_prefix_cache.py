"""An answer is the same whether its prompt was prefilled or cached: tokens, logits and accepted drafts are the same,
bit for bit. And what is cached is, bit for bit, what prefilling the same tokens leaves."""

import random
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import pytest

from fixtures import FAMILIES, random_model, random_prompt
from headstart.engine import Engine, Handle, Request, Stats
from headstart.engine.batch import Batch
from headstart.engine.step import prefill, prefill_by_layers
from headstart.models import Model
from headstart.sampling import SamplingParams, SequenceParams
from headstart.state import PrefixCache
from headstart.state.prefix import Node

C = 16  # tokens a chunk
LOTS = 1 << 28
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", C)


@dataclass
class Heard:
    tokens: list[int] = field(default_factory=list)
    bursts: list[list[int]] = field(default_factory=list)  # tokens by round: shows which drafts were accepted
    logits: list[mx.array] = field(default_factory=list)
    finish_reason: str | None = None
    stats: Stats | None = None

    @property
    def hit(self) -> int:
        assert self.stats is not None
        return self.stats.prefix_cache_hit

    def same_as(self, other: "Heard", bursts: bool = True) -> bool:
        return (
            self.tokens == other.tokens
            and len(self.tokens) > 0
            and (self.bursts == other.bursts or not bursts)
            and bool(mx.array_equal(mx.concatenate(self.logits), mx.concatenate(other.logits)))
        )


def submit(engine: Engine, prompt: Sequence[int], **params: object) -> Handle:
    params = {"max_tokens": 10, "k": 3} | params
    return engine.submit(Request(prompt, SamplingParams(**params), keep_logits=True))  # type: ignore[arg-type]


def hear(handle: Handle) -> Heard:
    heard = Heard()
    for event in handle:
        heard.tokens += event.tokens
        heard.bursts += [event.tokens] if event.tokens else []
        heard.logits += [event.logits] if event.logits is not None else []
        heard.finish_reason, heard.stats = event.finish_reason, event.stats
    return heard


def ask(engine: Engine, prompt: Sequence[int], **params: object) -> Heard:
    return hear(submit(engine, prompt, **params))


def cached(model: Model, max_bytes: int = LOTS, **options: bool) -> tuple[Engine, PrefixCache]:
    prefix = PrefixCache(max_bytes, chunk=C, **options)
    return Engine(model, prefix=prefix), prefix


def assert_true(prefix: PrefixCache, model: Model) -> int:
    """Every entry holds what a sequence holds that has just read the same tokens, and nothing else → how many."""
    waiting: list[tuple[list[int], Node]] = [([], node) for node in prefix._root.children.values()]
    seen = 0
    while waiting:
        before, node = waiting.pop()
        tokens = before + list(array("q", node.chunk))
        batch, start, end = read(model, tokens), len(before), len(tokens)
        expected = [a[:, :, start:end] for m in batch.trunk_state.layers if hasattr(m, "keys") for a in m.arrays()]
        if batch.head_state is not None:
            expected += [a[:, :, max(0, start - 1) : end - 1] for m in batch.head_state.layers for a in m.arrays()]
        assert len(expected) == len(node.packs)
        assert all(mx.array_equal(kept, true) for (kept,), true in zip(node.packs, expected, strict=True))
        if node.states is not None:
            true = [a for m in batch.trunk_state.layers if hasattr(m, "state") for a in m.arrays()]
            kept = node.states.arrays()[1:]
            assert all(mx.array_equal(a, b) for a, b in zip(kept, true, strict=True))
            assert mx.array_equal(node.states.hidden, batch.unseen.hidden)
        seen += 1
        waiting += [(tokens, child) for child in node.children.values()]
    return seen


def read(model: Model, tokens: list[int]) -> Batch:
    """A sequence that has prefilled just these, chunk by chunk, by the loop's own `prefill`."""
    asked = SequenceParams(SamplingParams(), key=0, choice=0, limit=1)
    batch = Batch.of_one(model, tokens, asked, max_k=1 if model.has_head else 0)
    for start in range(0, len(tokens), C):
        following = [*tokens, 0][start + C]  # of the last chunk nobody knows, and nothing may depend on it
        prefill(model, batch, mx.array([tokens[start : start + C]]), mx.array([following]))
    return batch


@pytest.mark.parametrize(
    ("family", "params"),
    [
        *(
            pytest.param(family, {}, id=f"{family}-greedy", marks=[] if family == "next" else pytest.mark.slow)
            for family in FAMILIES
        ),
        *(
            pytest.param(family, SEEDED, id=f"{family}-seeded", marks=[] if family == "dense" else pytest.mark.slow)
            for family in FAMILIES
        ),
    ],
)
def test_a_hit_a_partial_hit_and_a_miss_generate_the_same_as_an_engine_without_a_cache(
    family: str, params: dict[str, object]
) -> None:
    model = random_model(family)
    base = random_prompt(model, 4 * C + 6)
    partly = base[: 2 * C + 5] + random_prompt(model, 2 * C, 1)
    other = random_prompt(model, 3 * C + 1, 2)  # known to its last token but one once it was asked
    for k in (0, 3, "auto"):
        engine, prefix = cached(model)
        plain = Engine(model)
        handles = [(p, submit(plain, p, k=k, **params)) for p in (base, partly, other)]
        expected = {id(prompt): hear(handle) for prompt, handle in handles}
        for prompt, hit in ((base, 0), (base, 4 * C), (partly, 2 * C), (other, 0), (other, 3 * C), (base, 4 * C)):
            heard = ask(engine, prompt, k=k, **params)
            assert heard.same_as(expected[id(prompt)], bursts=k != "auto")
            assert heard.hit == hit
            assert heard.stats is not None
            assert heard.stats.exact
            assert heard.stats.as_dict()["prefix_cache_hit"] == hit
        assert prefix.stats().hits == 4
        assert prefix.stats().tokens == 13 * C


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_that_was_resumed_holds_what_one_holds_that_read_its_prompt(family: str) -> None:
    """All of it, the head's part and the pair that waits for the head included: tokens would not show it."""
    model = random_model(family)
    base = random_prompt(model, 4 * C + 6)
    engine, prefix = cached(model)
    ask(engine, base, k=0)
    for prompt in (base, base[: 4 * C + 1], base[: 2 * C + 5] + random_prompt(model, C + 3, 1)):
        resumed, read = entered(engine, prompt), entered(Engine(model), prompt)
        assert resumed.trunk_state.bounds == read.trunk_state.bounds
        pairs = zip(resumed.arrays(), read.arrays(), strict=True)
        assert all(mx.array_equal(mine, true) for mine, true in pairs)
    assert prefix.stats().hits == 3


def entered(engine: Engine, prompt: Sequence[int]) -> Batch:
    """The sequence as it is when its prompt is prefilled and nothing was generated."""
    handle = submit(engine, prompt)
    engine.scheduler.admit()
    while engine.scheduler.prefilling:
        engine.reader.read_pass()
    batch = engine.scheduler.running.batch
    assert batch is not None
    mx.eval(batch.arrays())
    handle.cancel()
    engine.run_once()
    return batch


@pytest.mark.parametrize("family", FAMILIES)
def test_what_one_depth_left_behind_serves_every_other(family: str) -> None:
    """A request without drafts keeps the head's memory too, and one with drafts accepts as many as on a miss."""
    model = random_model(family)
    prompt = random_prompt(model, 3 * C + 9)
    expected = {k: ask(Engine(model), prompt, k=k) for k in (0, 3)}
    assert expected[0].bursts != expected[3].bursts
    for first, second in ((0, 3), (3, 0)):
        engine, prefix = cached(model)
        assert ask(engine, prompt, k=first).same_as(expected[first])
        heard = ask(engine, prompt, k=second)
        assert heard.same_as(expected[second])
        assert heard.hit == 3 * C
        assert assert_true(prefix, model) == 3


def test_the_cache_of_a_model_without_a_head_works_as_well() -> None:
    model = random_model("dense", head=False)
    prompt = random_prompt(model, 3 * C + 9)
    engine, prefix = cached(model)
    expected = ask(Engine(model), prompt, k="auto")
    heard = [ask(engine, prompt, k="auto") for _ in range(2)]
    assert [h.hit for h in heard] == [0, 3 * C]
    assert all(h.same_as(expected) for h in heard)
    assert assert_true(prefix, model) == 3


def test_the_cache_of_a_model_without_recurrent_layers_works_as_well() -> None:
    model = random_model("dense", full_attention_interval=1, num_hidden_layers=2)
    prompt = random_prompt(model, 6 * C)
    engine, _ = cached(model)
    ask(engine, prompt)
    for length in (3 * C + 1, 5 * C + 4):
        assert ask(engine, prompt[:length]).same_as(ask(Engine(model), prompt[:length]))
    assert ask(engine, prompt[: 3 * C + 1]).hit == 3 * C


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "moe")), "next"]
)
def test_hit_poison_probe_again(family: str) -> None:
    """Sequences write into their state, also rejected drafts, and may break down. The entry they came from stays."""
    model = random_model(family)
    prompt = random_prompt(model, 3 * C + 5)
    params = {"max_tokens": 20, "temperature": 1.3, "seed": 5}
    expected = ask(Engine(model), prompt, **params)
    assert any(len(burst) < 4 for burst in expected.bursts)  # some drafts fell
    engine, prefix = cached(model)
    ask(engine, prompt, **params)
    for turns in range(3):
        poisoned = submit(engine, prompt, **params)
        while not engine.scheduler.running.sequences:
            engine.run_once()
        for _ in range(turns):
            engine.run_once()
        assert engine.scheduler.running.batch is not None
        assert engine.scheduler.running.batch.head_state is not None
        for memory in (
            *engine.scheduler.running.batch.trunk_state.layers,
            *engine.scheduler.running.batch.head_state.layers,
        ):
            for held in memory.arrays():
                held[:] = mx.array(mx.nan)
        assert hear(poisoned).finish_reason == "error"
        probe = ask(engine, prompt, **params)
        assert probe.hit == 3 * C
        assert probe.same_as(expected)
    assert assert_true(prefix, model) == 3


@pytest.mark.parametrize("family", [*(pytest.param(f, marks=pytest.mark.slow) for f in ("dense", "moe")), "next"])
def test_a_mixed_load_generates_the_same_and_leaves_only_what_prefill_leaves(family: str) -> None:
    """Hits, partial hits, misses and evictions, at many depths, side by side, some cancelled: nothing that was
    drafted is ever stored, and every answer is that of its request alone."""
    model, rng = random_model(family), random.Random(family)
    systems = [random_prompt(model, length, length) for length in (2 * C + 3, 4 * C, 5 * C + 9)]
    prompts = [rng.choice(systems) + random_prompt(model, rng.randint(1, 3 * C), n % 6) for n in range(12)]
    sizes = PrefixCache(LOTS, chunk=C)
    big = Engine(model, prefix=sizes)
    for prompt in prompts:
        ask(big, prompt, max_tokens=1)
    engine, prefix = cached(model, sizes.stats().bytes // 3)
    asked = [{"k": rng.choice([0, 1, 3, "auto"])} | rng.choice([{}, SEEDED]) for _ in prompts]
    handles = [submit(engine, prompt, **params) for prompt, params in zip(prompts, asked, strict=True)]
    cancelled = handles[3::5]
    while engine.run_once():
        assert prefix.stats().bytes <= prefix.max_bytes
        for handle in cancelled:
            if rng.random() < 0.05:
                handle.cancel()
    heard = [hear(handle) for handle in handles]
    for answer, prompt, params in zip(heard, prompts, asked, strict=True):
        alone = ask(Engine(model), prompt, **params)
        assert answer.finish_reason == "cancelled" or answer.tokens == alone.tokens
        assert answer.tokens == alone.tokens[: len(answer.tokens)]
    assert prefix.stats().evictions
    assert prefix.stats().hits
    assert assert_true(prefix, model) == prefix.stats().entries > 0


def test_eviction_changes_no_answer() -> None:
    model = random_model("dense")
    prompts = [random_prompt(model, 3 * C + 2, seed) for seed in range(3)]
    expected = [ask(Engine(model), prompt) for prompt in prompts]
    one, sizes = cached(model)
    ask(one, prompts[0])
    engine, prefix = cached(model, int(1.5 * sizes.stats().bytes))
    for _ in range(3):
        for prompt, answer in zip(prompts, expected, strict=True):
            assert ask(engine, prompt).same_as(answer)
            assert ask(engine, prompt).same_as(answer)
            assert prefix.stats().bytes <= prefix.max_bytes
    assert prefix.stats().evictions >= 6
    assert assert_true(prefix, model) == prefix.stats().entries


def test_a_prompt_cancelled_midway_leaves_whole_entries_from_which_the_next_goes_on() -> None:
    model = random_model("dense")
    prompt = random_prompt(model, 7 * C + 3)
    expected = ask(Engine(model), prompt)
    for turns in (1, 2, 4, 7):
        engine, prefix = cached(model)
        handle = submit(engine, prompt)
        for _ in range(turns):
            engine.run_once()
        handle.cancel()
        assert hear(handle).finish_reason == "cancelled"
        assert assert_true(prefix, model) == turns - 1
        again = ask(engine, prompt)
        assert again.hit == (turns - 1) * C
        assert again.same_as(expected)
        assert assert_true(prefix, model) == 7


def test_a_prompt_that_fails_midway_leaves_only_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("dense")
    prompt = random_prompt(model, 5 * C + 3)
    engine, prefix = cached(model)
    chunks = 0

    def failing(model, batch, tokens, following, *rest):  # type: ignore[no-untyped-def]
        nonlocal chunks
        chunks += 1
        if chunks == 3:
            raise ValueError("no room")
        return prefill_by_layers(model, batch, tokens, following, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("headstart.engine.prefill.prefill_by_layers", failing)
        assert hear(submit(engine, prompt)).finish_reason == "error"
    assert assert_true(prefix, model) == 2
    assert ask(engine, prompt).same_as(ask(Engine(model), prompt))


def test_a_sequence_that_breaks_down_over_its_prompt_leaves_nothing_that_is_not_finite() -> None:
    model = random_model("dense")
    prompt = random_prompt(model, 5 * C + 3)
    engine, prefix = cached(model)
    handle = submit(engine, prompt)
    for _ in range(3):
        engine.run_once()
    batch = engine.scheduler.prefilling[0].batch
    assert batch is not None
    batch.trunk_state.layers[0].state[:] = mx.array(mx.nan)
    assert hear(handle).finish_reason == "error"
    assert assert_true(prefix, model) == 2
    assert ask(engine, prompt).same_as(ask(Engine(model), prompt))


def test_eight_bits_mark_the_answers_they_touch_and_no_others() -> None:
    model = random_model("dense")
    prompt = random_prompt(model, 4 * C + 3)
    engine, prefix = cached(model, eight_bits=True)
    whole, exact = cached(model)
    first, second = ask(engine, prompt), ask(engine, prompt)
    ask(whole, prompt)
    assert (first.hit, second.hit) == (0, 4 * C)
    assert first.stats is not None
    assert second.stats is not None
    assert (first.stats.exact, second.stats.exact) == (True, False)
    assert first.same_as(ask(Engine(model), prompt))
    assert not second.same_as(first)
    assert mx.allclose(second.logits[0][0], first.logits[0][0], atol=0.1)
    assert prefix.stats().bytes < exact.stats().bytes


def test_the_next_turn_of_a_chat_reads_only_the_last_chunk_of_the_one_before_again() -> None:
    model = random_model("dense")
    engine, _ = cached(model)
    prompt = random_prompt(model, 5 * C + 7)
    for turn in range(4):
        answer = ask(engine, prompt)
        following = prompt + answer.tokens + random_prompt(model, 2 * C + 3, turn)
        heard = ask(engine, following)
        assert heard.hit >= len(prompt) - 1 - C
        assert heard.same_as(ask(Engine(model), following))
        prompt = following


def test_clearing_and_reading_statistics_from_another_thread_change_no_answer() -> None:
    model = random_model("dense")
    prompt = random_prompt(model, 5 * C + 7)
    expected = ask(Engine(model), prompt)
    engine, prefix = cached(model)
    over = threading.Event()

    def disturb() -> None:
        while not over.wait(0.02):
            prefix.stats()
            prefix.clear()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        assert all(ask(engine, prompt).same_as(expected) for _ in range(12))
    finally:
        over.set()
        thread.join()
    ask(engine, prompt)
    assert assert_true(prefix, model) == 5
    prefix.clear()
    assert prefix.stats().bytes == 0
    assert ask(engine, prompt).hit == 0
