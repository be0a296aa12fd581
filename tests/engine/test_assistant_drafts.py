"""Gemma 4's assistants change no token: whatever the shape, the rule, the batch, or what the prefix cache held.

Random ones are right too seldom to test much. So their logits are raised for what usually follows in the model's own
greedy text.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from fixtures import collect, generate, random_prompt, submit
from gemma4 import CONFIGS, write_assistant, write_shape
from headstart import batch_generate
from headstart.checkpoint import load_model, load_tokenizer
from headstart.engine import Engine
from headstart.engine.depth import DepthController, Plan
from headstart.engine.draft import Source, assistant_drafts, draft_limits
from headstart.engine.limit import DraftLimit, fixed_plan
from headstart.engine.step import prefill_prompts, step
from headstart.kernels import Backend
from headstart.models import Model
from headstart.models.assistant import Drafts
from headstart.sampling import GrammarSpec
from headstart.state import PrefixCache

SEEDED = {"seed": 4, "temperature": 0.7, "top_p": 0.9}
OWN = Drafts.__call__
OTHERS = ("gemma4_a4b", "gemma4_e2b")


@lru_cache
def assisted(shape: str = "gemma4_unified") -> Model:
    with TemporaryDirectory() as place:
        target = write_shape(Path(place, "model"), shape)
        return load_model(target, drafter=write_assistant(Path(place, "assistant"), target), dtype=mx.float32)


@lru_cache
def successors() -> mx.array:
    """What usually follows each token, [V]."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for shape in CONFIGS:
        for seed in range(2):
            text = generate(assisted(shape), random_prompt(assisted(shape), 30, 7 + seed), k=0, max_tokens=80).tokens
            for before, after in pairwise(text):
                counts[before][after] += 1
    return mx.array([counts[token].most_common(1)[0][0] if token in counts else 0 for token in range(256)])


@pytest.fixture(autouse=True)
def _good_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    follows = successors()

    def raised(
        self: Drafts, backend: Backend, embed: Callable[..., mx.array], hidden: mx.array, token: mx.array
    ) -> tuple[mx.array, mx.array]:
        logits, hidden = OWN(self, backend, embed, hidden, token)
        known = mx.arange(logits.shape[-1]) == follows[token][:, None, None]
        return mx.where(known, mx.maximum(logits, -50) + 99, logits), hidden

    monkeypatch.setattr(Drafts, "__call__", raised)


@pytest.mark.parametrize(
    ("shape", "params", "depths"),
    [
        pytest.param("gemma4_unified", {}, (1, 4, 8), id="greedy"),
        pytest.param("gemma4_unified", SEEDED, (3,), id="seeded"),
        *(pytest.param(shape, {}, (3, 8), id=shape) for shape in OTHERS),
        *(pytest.param(shape, SEEDED, (2, 5), id=f"{shape}, seeded", marks=pytest.mark.slow) for shape in OTHERS),
    ],
)
def test_text_is_that_of_plain_decoding_at_every_depth(shape: str, params: Any, depths: tuple[int, ...]) -> None:
    model, most = assisted(shape), 0
    prompt = random_prompt(model, 30, 7)
    plain = generate(model, prompt, k=0, max_tokens=60, **params)
    for k in depths:
        answer = generate(model, prompt, k=k, max_tokens=60, **params)
        assert answer.tokens == plain.tokens
        assert answer.stats is not None
        assert answer.stats.exact
        assert answer.stats.drafter_kind == "gemma4_assistant"
        assert answer.stats.accepted_by_source["drafter"] == answer.stats.accepted_draft_tokens > 4
        most = max(most, *map(len, answer.bursts))
    assert most > 2, "drafts are hardly accepted: the test shows little"


class EveryDepth(DepthController):
    """Lets the assistant and nothing draft in turn, at many depths, and copies with both."""

    rounds = 0

    def plan(self, *known: Any) -> Plan:
        found = super().plan(*known)
        self.rounds += 1
        distances = found.distances if self.rounds % 3 else ()
        return Plan((8, 1, 0, 0, 3, 5)[self.rounds % 6] or (4 if distances else 0), Source.ASSISTANT, distances)


@pytest.mark.parametrize(
    "shape",
    ["gemma4_e2b", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma4_unified", "gemma4_a4b"))],
)
@pytest.mark.parametrize("bytes_kept", [pytest.param(10**8, marks=pytest.mark.slow), 300_000])
def test_sequences_join_leave_and_resume_beside_each_other(
    shape: str, bytes_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Depths in turn, greedy and seeded, prompts with a common prefix and some evicted, answers of every length."""
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 16)
    model, common = assisted(shape), random_prompt(assisted(shape), 40, 1)
    prefix = PrefixCache(bytes_kept, chunk=16)
    engine = Engine(model, max_sequences=4, depth=EveryDepth.of(model), prefix=prefix)
    asked: list[Any] = []
    for n in range(8):
        prompt = (common if n % 2 else []) + random_prompt(model, 5 + 9 * n, n)
        params: dict[str, Any] = {"seed": n, "temperature": 0.6} if n % 3 == 1 else {}
        params |= {"presence_penalty": 0.4, "repetition_penalty": 1.2} if n % 6 == 1 else {}
        k = (0, 8, 4)[n % 3] if n % 5 == 4 else "auto"
        asked.append((prompt, {**params, "max_tokens": 10 + 7 * (n % 3), "k": k}))
    handles = []
    for prompt, params in asked:
        handles.append(submit(engine, prompt, **params))
        engine.run_once()
    answers = [collect(handle) for handle in handles]
    sources = Counter[str]()
    for (prompt, params), answer in zip(asked, answers, strict=True):
        assert answer.tokens == generate(model, prompt, **{**params, "k": 0}).tokens
        assert answer.stats is not None
        sources += Counter(answer.stats.accepted_by_source)
    assert sources["drafter"], sources
    assert any(answer.stats.prefix_cache_hit for answer in answers if answer.stats)
    assert bool(prefix.stats().evictions) == (bytes_kept < 10**6)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """The hidden states that the assistant is given for every draft."""
    hiddens: list[mx.array] = []

    def noted(self: Drafts, backend: Backend, embed: Callable[..., mx.array], *pair: mx.array) -> Any:
        hiddens.append(pair[0])
        return OWN(self, backend, embed, *pair)

    monkeypatch.setattr(Drafts, "__call__", noted)
    return hiddens


def test_a_hit_on_what_a_sequence_without_drafts_left_drafts_what_a_miss_drafts(
    fed: list[mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 16)
    model = assisted()
    prompt = random_prompt(model, 17, 3)  # a chunk, and `last`
    engine = Engine(model, prefix=PrefixCache(10**8, chunk=16))
    stored, hit = (collect(submit(engine, prompt, k=k, max_tokens=12)) for k in (0, 5))
    drafted = len(fed)
    miss = collect(submit(Engine(model), prompt, k=5, max_tokens=12))
    assert hit.stats is not None
    assert hit.stats.prefix_cache_hit == 16
    assert stored.tokens == miss.tokens == hit.tokens
    assert len(fed) == 2 * drafted > 0
    assert all(mx.array_equal(*pair) for pair in zip(fed[:drafted], fed[drafted:], strict=True))


def test_sequences_of_a_batch_draft_as_alone(fed: list[mx.array]) -> None:  # by its own logits
    model = assisted("gemma4_e2b")
    prompts = [random_prompt(model, length, length) for length in (3, 31, 12)]
    together = assistant_drafts(model, prefill_prompts(model, prompts, max_k=6), 6).tokens.tolist()
    alone = [
        assistant_drafts(model, prefill_prompts(model, [each], max_k=6), 6).tokens[0].tolist() for each in prompts
    ]
    assert together == alone


def test_drafting_goes_on_after_a_pause_as_if_there_had_been_none(fed: list[mx.array]) -> None:
    model, prompt = assisted(), random_prompt(assisted(), 20, 3)
    batch, text = prefill_prompts(model, [prompt], max_k=8), list(prompt)
    for k in (5, 0, 2, 0, 0):
        result = step(model, batch, k, source=Source.ASSISTANT)
        text += result.verdict.tokens[0, : int(result.verdict.accepted[0]) + 1].tolist()  # type: ignore[arg-type]
    fed.clear()
    for each in (batch, prefill_prompts(model, [text], max_k=8)):
        assistant_drafts(model, each, 1)
    assert mx.allclose(*fed, rtol=1e-4, atol=1e-4)


def test_a_prompt_of_one_token_and_keys_in_eight_bits() -> None:
    model = assisted()
    assert generate(model, [7], k=4, max_tokens=20).tokens == generate(model, [7], k=0, max_tokens=20).tokens
    small, prompt = model.with_kv_bits(8), random_prompt(model, 30, 7)
    answer = generate(small, prompt, k=4, max_tokens=40)
    assert answer.tokens == generate(small, prompt, k=0, max_tokens=40).tokens
    assert answer.stats is not None
    assert answer.stats.accepted_by_source["drafter"] > 4


def test_unseeded_sequences_draw_and_accept_by_the_drafts_own_distribution() -> None:
    for shape in ("gemma4_unified", "gemma4_e2b"):  # all tokens, and some clusters of them
        model, accepted, proposed = assisted(shape), 0, 0
        for _ in range(20):  # one draft in a hundred is accepted, by chance
            answer = generate(model, random_prompt(model, 30, 7), k=4, max_tokens=60, temperature=0.8)
            assert answer.stats is not None
            accepted += answer.stats.accepted_by_source["drafter"]
            proposed += answer.stats.proposed_by_source["drafter"]
            if accepted:
                break
        assert 0 < accepted < proposed


def test_a_recomputed_sequence_goes_on_as_if_nothing_had_happened() -> None:
    model, prompt = assisted(), random_prompt(assisted(), 33, 2)
    engine = Engine(model)
    handle = submit(engine, prompt, k=6, max_tokens=40)
    for _ in range(5):
        engine.run_once()
    engine.recovery.recompute_all()
    assert collect(handle).tokens == generate(model, prompt, k=0, max_tokens=40).tokens


def test_a_grammar_is_obeyed_and_its_text_the_same(tmp_path: Path) -> None:
    target = write_shape(tmp_path / "model", "gemma4_e2b", vocab_size=8192, vocab_size_per_layer_input=8192)
    tokenizer = load_tokenizer(target)
    model = load_model(target, dtype=mx.float32, drafter=write_assistant(tmp_path / "assistant", target))
    grammar = GrammarSpec("regex", r"(yes|no|maybe)( or (yes|no|maybe)){3}")
    texts = {batch_generate(model, tokenizer, ["Is it?"], 30, k=k, grammar=grammar).texts[0] for k in (0, 2, 8)}
    assert len(texts) == 1
    assert texts.pop().count(" or ") == 3


def test_limits_and_plans_name_the_assistant() -> None:
    model = assisted()
    assert draft_limits(model) == {Source.ASSISTANT: 8}
    sequence: Any = SimpleNamespace(limits=DraftLimit(5, 0, None))
    assert fixed_plan(model, [sequence]) == Plan(5, Source.ASSISTANT)
    answer = generate(model, [1, 2, 3], k=15, max_tokens=20)
    assert answer.stats is not None
    assert answer.stats.clamped_to == 8
    assert answer.stats.drafter_kind == "gemma4_assistant"
    assert generate(model, [1, 2, 3], k="auto", max_tokens=20).stats.drafter_kind == "gemma4_assistant+copy"
