"""A device that reads prompts by other kernels than it decodes with, in passes over several turns of a conversation.

Its prompts have other bits than decoding, and the same however they are cut at multiples of CUT.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import headstart.engine.prefill
import headstart.engine.step
import headstart.engine.turns
from fixtures import FAMILIES, random_model, random_prompt
from headstart.engine import Engine, Handle, Request
from headstart.engine.prefill import launch_steps, pass_end
from headstart.engine.turns import TurnMarker, chunk_ends
from headstart.kernels import Backend
from headstart.kernels.cpu.backend import StockCpu
from headstart.kernels.cuda.prompts import CudaPrompts
from headstart.kernels.layers import Layer
from headstart.models import Model
from headstart.models.abilities import WINDOW
from headstart.models.memory import Footprint
from headstart.sampling import SamplingParams
from headstart.state import Chunks, PrefixCache

CUT, CHUNK, TURN = 8, 32, 1  # TURN: the token that begins a turn
Passes = list[tuple[int, int, bool]]
Ends = list[tuple[int, int | None]]


class Coarse(StockCpu):
    """Reads prompts in bfloat16's precision."""

    cut, widest, keeps, layers_ahead = CUT, 96, True, 2

    def multiply(self, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
        return [made.astype(mx.bfloat16).astype(made.dtype) for made in super().multiply(x, layers)]


class Apart(StockCpu):
    cut = None

    def reader(self, layers: Sequence[Layer], dtype: mx.Dtype) -> Backend:
        return Coarse()


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", CHUNK)
    monkeypatch.setattr(headstart.engine.turns, "MIN_TURN", 16)


def model_of(family: str) -> Model:
    return replace(random_model(family), backend=Apart())


def engine_of(model: Model, **options: Any) -> Engine:
    engine = Engine(model, prefix=PrefixCache(10**8, chunk=CHUNK), memory_limit=10**9, **options)
    engine.reader.marker = TurnMarker([TURN])
    return engine


def prompt_of(model: Model, length: int, turns: Sequence[int] = (), seed: int = 0) -> list[int]:
    tokens = [token + (token == TURN) for token in random_prompt(model, length, seed)]
    for turn in turns:
        tokens[turn % length] = TURN
    return tokens


class Heard:
    def __init__(self, handle: Handle):
        events = list(handle)
        assert events[-1].stats is not None
        self.stats = events[-1].stats
        self.tokens = [token for event in events for token in event.tokens]
        self.logits = mx.concatenate([event.logits for event in events if event.logits is not None])

    def same_as(self, other: "Heard") -> bool:
        return self.tokens == other.tokens and bool(mx.array_equal(self.logits, other.logits))


def ask(engine: Engine, prompt: Sequence[int], **params: Any) -> Handle:
    asked = SamplingParams(**{"max_tokens": 24, "k": 2, **params})
    return engine.submit(Request(list(prompt), asked, keep_logits=True))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Where passes begin and end, and whether the reader's kernels run them."""
    noted: Passes = []
    honest = headstart.engine.prefill.prefill_by_layers

    def prefill(model: Model, batch: Any, tokens: mx.array, *rest: Any) -> Any:
        begin = batch.trunk_state.bounds[0]
        noted.append((begin, begin + tokens.shape[1], isinstance(model.backend, Coarse)))
        return honest(model, batch, tokens, *rest)

    for module in (headstart.engine.prefill, headstart.engine.step):
        monkeypatch.setattr(module, "prefill_by_layers", prefill)
    return noted


@pytest.mark.parametrize(
    ("family", "params"), [("dense", {}), ("moe", {"temperature": 0.9, "seed": 3})], ids=["greedy", "seeded"]
)
def test_a_sequence_that_is_recomputed_goes_on_with_the_same_bits(
    family: str, params: dict[str, Any], passes: Passes
) -> None:
    """Its own tokens go through the kernels that made them, in windows."""
    model = model_of(family)
    prompt = prompt_of(model, 75, (20,))
    expected = Heard(ask(engine_of(model), prompt, max_tokens=60, **params))
    engine = engine_of(model)
    handle = ask(engine, prompt, max_tokens=60, **params)
    while sum(each.num_generated for each in engine.scheduler.running.sequences) < 40:
        engine.run_once()
    passes.clear()
    engine.recovery.recompute_all()
    answer = Heard(handle)
    assert answer.same_as(expected)
    assert answer.stats.exact is True
    own = [(begin, end) for begin, end, reads in passes if not reads]
    assert own[0][0] == len(prompt) - 1
    assert max(end - begin for begin, end in own) == WINDOW
    assert all(end <= 74 for _, end, reads in passes if reads)


def test_a_recomputed_sequence_would_not_be_exact_if_its_tokens_were_read_as_a_prompt() -> None:
    """Or the test above could not fail."""
    model = model_of("dense")
    prompt = prompt_of(model, 40)
    read, decoded = (Heard(ask(engine_of(each), prompt, k=0)) for each in (replace(model, backend=Coarse()), model))
    assert not read.same_as(decoded)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass_reads_several_turns_and_keeps_the_state_of_the_last(family: str, passes: Passes) -> None:
    model = model_of(family)
    first = prompt_of(model, 90, (10, 60), seed=1)
    longer = [*first[:88], *prompt_of(model, 12, seed=2)]
    assert chunk_ends(first, TurnMarker([TURN]), CHUNK, CUT) == [32, 56, 88]
    engine = engine_of(model)
    Heard(ask(engine, first))
    assert passes == [(0, 89, True)]
    passes.clear()
    hit = Heard(ask(engine, longer))
    assert passes == [(88, 99, True)]
    assert hit.stats.prefix_cache_hit == 88
    assert hit.same_as(Heard(ask(engine_of(model), longer)))


@pytest.mark.parametrize("family", ["dense", "moe", pytest.param("next", marks=pytest.mark.slow)])
def test_answers_do_not_depend_on_how_prompts_are_cut(
    family: str, monkeypatch: pytest.MonkeyPatch, passes: Passes
) -> None:
    model = model_of(family)
    prompts = [prompt_of(model, length, (7, length // 2), seed=length) for length in (5, 33, 130)]
    expected = [Heard(ask(engine_of(model), prompt)) for prompt in prompts]
    for widest in (CUT, CHUNK):
        with monkeypatch.context() as patch:
            patch.setattr(Coarse, "widest", widest)
            narrow = replace(model, backend=Apart())
            passes.clear()
            engine = engine_of(narrow)
            for _ in range(2):  # misses, then hits
                handles = [ask(engine, prompt) for prompt in prompts]
                assert all(Heard(each).same_as(answer) for each, answer in zip(handles, expected, strict=True))
            assert max(end - begin for begin, end, _ in passes) == widest


class Uneven(Coarse):
    def multiply(self, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
        return [made * (1 + 1e-4 * x.shape[1]) for made in super().multiply(x, layers)]


class Wrong(Coarse):
    def norm(self, x: mx.array, norm: nn.Module) -> mx.array:
        return x


class Broken(Coarse):
    def multiply(self, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
        raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        (Uneven, "round otherwise where a prompt is cut"),
        (Wrong, "compute something else"),
        (Broken, "no such kernel|failed; those of decoding"),
    ],
)
def test_what_fails_the_check_reads_no_prompt(
    reader: type[Coarse], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Apart, "reader", lambda self, layers, dtype: reader())
    model = model_of("dense")
    assert model.reading is model
    assert re.search(said, caplog.text)
    prompt = prompt_of(model, 40)
    assert Heard(ask(engine_of(model), prompt)).same_as(Heard(ask(engine_of(replace(model)), prompt)))


def ends_of_passes(backend: Backend, ends: list[int], last: int, widest: int, fork: int = 0) -> Ends:
    sequence: Any = SimpleNamespace(chunks=Chunks.of(range(last + 1), ends), prompt_end=last, apart=fork)
    found: Ends = [(0, None)]
    while found[-1][0] < last:
        found.append(pass_end(sequence, found[-1][0], widest, backend))
    return found[1:]


class Stops(Coarse):
    keeps = False


class Fixed(Coarse):
    cut, keeps = None, False


@pytest.mark.parametrize(
    ("backend", "widest", "expected"),
    [
        (Coarse(), 96, [(96, None), (107, 104)]),
        (Coarse(), 200, [(107, 104)]),
        (Coarse(), 30, [(24, None), (48, None), (72, None), (96, None), (107, 104)]),
        (Stops(), 30, [(24, None), (48, None), (72, None), (96, None), (104, None), (107, None)]),
        (Stops(), 200, [(48, None), (96, None), (104, None), (107, None)]),
        (Fixed(), 200, [(48, None), (96, None), (104, None), (107, None)]),
        (Fixed(), 32, [(32, None), (48, None), (80, None), (96, None), (104, None), (107, None)]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Backend) else None,
)
def test_where_passes_end(backend: Backend, widest: int, expected: Ends) -> None:
    assert ends_of_passes(backend, [48, 96, 104], 107, widest) == expected


def test_a_pass_stops_where_prompts_have_gone_apart() -> None:
    assert ends_of_passes(Coarse(), [48, 96, 104], 107, 96, fork=48) == [(48, None), (107, 104)]


def test_the_third_prompt_resumes_where_the_first_two_have_gone_apart(passes: Passes) -> None:
    model = model_of("dense")
    shared = prompt_of(model, 70, seed=5)
    engine = engine_of(model)
    hits = [
        Heard(ask(engine, [*shared, *prompt_of(model, 60, seed=seed)])).stats.prefix_cache_hit for seed in range(3)
    ]
    assert hits == [0, 0, 64]


def test_chunks_end_at_multiples_that_the_device_names() -> None:
    tokens = [TURN if n in (150, 300, 700, 1000) else 5 for n in range(1100)]
    ends = chunk_ends(tokens, TurnMarker([TURN]), 256, 64)
    assert ends == [128, 256, 512, 640, 896, 960]
    assert all(a < b for a, b in pairwise(ends))


def test_what_is_read_beside_streams_ends_at_multiples(passes: Passes) -> None:
    model = model_of("dense")
    engine = engine_of(model)
    stream = ask(engine, prompt_of(model, 6), max_tokens=80, k=0)
    while not engine.scheduler.running.sequences or not engine.scheduler.running.sequences[0].num_generated:
        engine.run_once()
    prompt = prompt_of(model, 150, (50,), seed=4)
    passes.clear()
    answer = Heard(ask(engine, prompt))
    assert all(begin % CUT == 0 and (end % CUT == 0 or end == 149) for begin, end, _ in passes)
    assert answer.same_as(Heard(ask(engine_of(model), prompt)))
    Heard(stream)


def test_a_pass_waits_for_the_layers_that_it_launched_before(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, list[int]]] = []

    def record(what: str) -> Any:
        return lambda arrays: done.append((what, [int(array) for array in arrays]))

    def layers() -> Iterator[mx.array]:
        for layer in range(5):
            done.append(("describe", [layer]))
            yield mx.array(layer)

    patched = SimpleNamespace(array=mx.array, async_eval=record("launch"), eval=record("wait for"))
    monkeypatch.setattr(headstart.engine.prefill, "mx", patched)
    (last,) = launch_steps(layers(), 2)
    assert int(last) == 4
    assert done == [
        ("describe", [0]), ("describe", [1]), ("launch", [1]), ("wait for", []),
        ("describe", [2]), ("describe", [3]), ("launch", [3]), ("wait for", [1]),
        ("describe", [4]), ("launch", [4]), ("wait for", [3]),
    ]  # fmt: skip


def test_memory_for_reading_prompts_is_counted_at_admission() -> None:
    class Hungry(Coarse):
        def pass_bytes(self, layers: Sequence[Layer], dtype: mx.Dtype) -> int:
            return 10**6

    model = replace(random_model("dense"), backend=StockCpu())
    plain = Footprint.of(model)
    model.__dict__["reading"] = replace(model, backend=Hungry())
    hungry = Footprint.of(model)
    assert hungry.bytes([300, 20]) == plain.bytes([300, 20]) + 10**6
    assert hungry.longest(10**7, 2) == plain.longest(10**7 - 10**6, 2)


def test_an_nvidia_card_counts_what_it_widens() -> None:
    model = random_model("dense")
    layer = model.layers[0].module
    shapes = [each.weight.shape for each in layer.modules() if isinstance(each, nn.Linear)]
    for_layer = sum(rows * (columns + CudaPrompts.widest) for rows, columns in shapes)
    found = CudaPrompts().pass_bytes(model.layers[:1], mx.bfloat16)
    assert found == 2 * CudaPrompts.layers_ahead * 2 * for_layer
