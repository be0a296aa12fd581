"""A block drafter changes no token: whatever the block, the rule, the batch, or what the prefix cache held.

A random drafter is right too seldom to test much. So its logits are raised for what usually follows in the model's
own greedy text: some blocks are accepted whole, and most in part.
"""

from collections import Counter, defaultdict
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from checkpoints import write, write_drafter
from fixtures import collect, generate, random_prompt, remembering, submit
from headstart import batch_generate
from headstart.checkpoint import load_model, load_tokenizer, resolve
from headstart.engine import Engine
from headstart.engine.batch import Batch
from headstart.engine.depth import DepthController, Plan
from headstart.engine.draft import Source, block_drafts, draft_limits
from headstart.engine.limit import DraftLimit, fixed_plan
from headstart.engine.step import prefill_prompts, step
from headstart.kernels import graph
from headstart.models import Model
from headstart.models.dflash import DFlash
from headstart.sampling import GrammarSpec, Proposal, SamplingParams, SequenceParams
from headstart.state import BatchState, PrefixCache

WINDOWED = ("full_attention", "sliding_attention")


@lru_cache
def folders() -> tuple[TemporaryDirectory[str], Path, Path]:
    place = TemporaryDirectory()
    target = write(Path(place.name, "target"))
    return place, target, write_drafter(Path(place.name, "drafter"), target, kinds=WINDOWED, window=24)


@lru_cache
def pair() -> Model:
    _, target, drafter = folders()
    return load_model(target, drafter=drafter, dtype=mx.float32)


@lru_cache
def successors() -> mx.array:
    """What usually follows each token, [V]."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for seed in range(3):
        text = generate(pair(), random_prompt(pair(), 9, seed), k=0, max_tokens=150).tokens
        for before, after in pairwise(text):
            counts[before][after] += 1
    return mx.array([counts[token].most_common(1)[0][0] if token in counts else 0 for token in range(256)])


@pytest.fixture(autouse=True)
def _good_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    follows, drafted = successors(), Model.block_logits

    def raised(self: Model, last: mx.array, k: int, state: BatchState) -> tuple[mx.array, mx.array]:
        (logits, hidden), tokens = drafted(self, last, k, state), [last]
        for _ in range(k):
            tokens.append(follows[tokens[-1] % 256])
        return logits + 25.0 * (mx.arange(logits.shape[-1]) == mx.stack(tokens[1:], axis=1)[..., None]), hidden

    monkeypatch.setattr(Model, "block_logits", raised)


SEEDED = {"seed": 4, "temperature": 0.7, "top_p": 0.9}
PENALISED = {"seed": 5, "temperature": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("params", "blocks"),
    [
        pytest.param({}, (2, 6, 16), id="greedy"),
        pytest.param(SEEDED, (3, 9), id="seeded"),
        pytest.param({}, (3, 9), id="greedy, others", marks=pytest.mark.slow),
        pytest.param(SEEDED, (2, 6, 16), id="seeded, others", marks=pytest.mark.slow),
        # `test_sequences_join_…` has them at many depths
        pytest.param(PENALISED, (2, 3, 6, 9, 16), id="penalties", marks=pytest.mark.slow),
    ],
)
def test_text_is_that_of_plain_decoding_for_every_block(params: Any, blocks: tuple[int, ...]) -> None:
    prompt, most = random_prompt(pair(), 30, 7), 0
    plain = generate(pair(), prompt, k=0, max_tokens=60, **params)
    for block in blocks:
        answer = generate(pair(), prompt, k=block - 1, max_tokens=60, **params)
        assert answer.tokens == plain.tokens
        assert answer.stats is not None
        assert answer.stats.exact
        assert answer.stats.drafter_kind == "dflash+native_mtp"
        assert answer.stats.accepted_by_source["drafter"] == answer.stats.accepted_draft_tokens > 8
        assert 0 in [answer.origins.count(each) for each in ("copy", "plain")]
        most = max(most, *map(len, answer.bursts))
    assert most > 4, "blocks are hardly accepted: the test shows little"


def test_the_optimistic_rule_accepts_whole_blocks_and_says_so() -> None:
    prompt = random_prompt(pair(), 30, 7)
    answer = generate(pair(), prompt, k=6, max_tokens=36, temperature=0.8, accept="optimistic")
    stats = answer.stats
    assert stats is not None
    assert not stats.exact
    assert stats.accepted_by_source["drafter"] == stats.proposed_by_source["drafter"] > 24
    assert [*map(len, answer.bursts)][1:-1] == [7] * (len(answer.bursts) - 2)


def test_a_drafter_that_selects_changes_no_token_either(tmp_path: Path) -> None:
    _, target, _ = folders()
    drafter = write_drafter(tmp_path, target, second=True, block_size=8)
    model, prompt = load_model(target, drafter=drafter, dtype=mx.float32), random_prompt(pair(), 30, 7)
    for params in ({}, {"seed": 4, "temperature": 0.7}):
        plain = generate(model, prompt, k=0, max_tokens=40, **params)
        answer = generate(model, prompt, k=15, max_tokens=40, **params)
        assert answer.tokens == plain.tokens
        assert answer.stats is not None
        assert answer.stats.clamped_to == 7
        assert answer.stats.accepted_by_source["drafter"] > 8


class EverySource(DepthController):
    """Lets the drafter, the head and nothing draft in turn, at many depths, and copies with all of them."""

    rounds = 0

    def plan(self, *known: Any) -> Plan:
        found = super().plan(*known)
        self.rounds += 1
        source = (Source.BLOCK, Source.HEAD, Source.BLOCK, Source.NONE)[self.rounds % 4]
        k = (15, 3, 4, 9, 0, 8)[self.rounds % 6]
        distances = found.distances if self.rounds % 3 else ()
        if not distances and source == Source.NONE:
            k = 0
        return Plan(min(k, 8) if source == Source.HEAD else k, source, distances)


def test_sequences_join_leave_and_resume_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sources in turn, every rule but the unseeded, prompts with a common prefix, and answers of every length."""
    monkeypatch.setattr("headstart.kernels.backend.Backend.chunk", 16)
    model, common = pair(), random_prompt(pair(), 40, 1)
    engine = Engine(model, max_sequences=4, depth=EverySource.of(model), prefix=PrefixCache(10**8, chunk=16))
    asked: list[Any] = []
    for n in range(10):
        prompt = (common if n % 2 else []) + random_prompt(model, 5 + 9 * n, n)
        params: dict[str, Any] = {"seed": n, "temperature": 0.6} if n % 3 == 1 else {}
        params |= {"presence_penalty": 0.4, "repetition_penalty": 1.2} if n % 6 == 1 else {}
        k = (0, 15, 4)[n % 3] if n % 5 == 4 else "auto"
        asked.append((prompt, {**params, "max_tokens": 10 + 7 * (n % 4), "k": k}))
    handles = []
    for prompt, params in asked:
        handles.append(submit(engine, prompt, **params))
        engine.run_once()
    answers = [collect(handle) for handle in handles]
    assert any(answer.stats.prefix_cache_hit for answer in answers if answer.stats)
    sources = Counter[str]()
    for (prompt, params), answer in zip(asked, answers, strict=True):
        assert answer.tokens == generate(model, prompt, **{**params, "k": 0}).tokens
        assert answer.stats is not None
        sources += Counter(answer.stats.accepted_by_source)
    assert all(sources[each] for each in ("head", "drafter")), sources


def caches(batch: Batch) -> list[mx.array]:
    """Committed keys and values of the drafter for the first sequence."""
    length = int(batch.trunk_state.lengths[0])
    return [a[0, :, :length] for layer in batch.trunk_state.kv_layers[-len(WINDOWED) :] for a in layer.arrays()]


def test_caches_hold_what_a_prefill_of_the_same_text_makes() -> None:
    """After blocks that were accepted in part, and steps of other sources and of none."""
    model, prompt = pair(), random_prompt(pair(), 20, 3)
    batch, text = prefill_prompts(model, [prompt, prompt[:9]], max_k=15), list(prompt)
    for k, source in ((15, Source.BLOCK), (0, Source.HEAD), (3, Source.HEAD), (7, Source.BLOCK), (1, Source.BLOCK)):
        result = step(model, batch, k, source=source)
        text += result.verdict.tokens[0, : int(result.verdict.accepted[0]) + 1].tolist()  # type: ignore[arg-type]
    batch.keep([0], model)
    fresh = prefill_prompts(model, [text], max_k=15)
    for mine, theirs in zip(caches(batch), caches(fresh), strict=True):
        assert mine.shape == theirs.shape
        assert mx.allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_of_a_remembered_pass_are_those_of_one_that_is_described(
    compiled: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """While capacity grows, a sequence joins and another leaves. Where it is not `compiled`, the pass still goes from
    arrays to arrays."""
    if not compiled:
        mx.disable_compile()
        request.addfinalizer(mx.enable_compile)

    def rounds(model: Model) -> list[Any]:
        prompts = [random_prompt(model, length, length) for length in (215, 9)]
        batch, said = prefill_prompts(model, prompts[:1], max_k=15), []
        for n in range(9):
            if n == 3:
                batch.join(prefill_prompts(model, prompts[1:], max_k=15), model)
            if n == 6:
                batch.keep([1], model)
            said.append(block_drafts(model, batch, 15).tokens.tolist())
            result = step(model, batch, 15, source=Source.BLOCK)
            said.append((result.verdict.tokens.tolist(), result.verdict.accepted.tolist()))
            batch.trunk_state.bounds = batch.trunk_state.lengths.tolist()  # type: ignore[assignment]
        said += [layer.keys.sum().item() for layer in batch.trunk_state.kv_layers]
        return said

    described, model = rounds(pair()), remembering(pair())
    monkeypatch.setattr(graph, "OFTEN", 1)
    assert rounds(model) == described
    remembered = [shape for shape, times in model._block.seen.items() if times > 1]
    assert {shape[0] for shape in remembered} >= {256, 512}, "no block was remembered at one of the capacities"
    assert len({shape[3] for shape in remembered}) == 2, "no block of two sequences was remembered"


def test_a_recomputed_sequence_goes_on_as_if_nothing_had_happened() -> None:
    model, prompt = pair(), random_prompt(pair(), 33, 2)
    engine = Engine(model)
    handle = submit(engine, prompt, k=6, max_tokens=40)
    for _ in range(5):
        engine.run_once()
    engine.recovery.recompute_all()
    assert collect(handle).tokens == generate(model, prompt, k=0, max_tokens=40).tokens


def test_a_grammar_is_obeyed_and_its_text_the_same() -> None:
    builtin = resolve("tiny-qwen3.5")
    tokenizer = load_tokenizer(builtin)
    with TemporaryDirectory() as place:
        model = load_model(builtin, dtype=mx.float32, drafter=write_drafter(Path(place), builtin, layers=(0, 1)))
    grammar = GrammarSpec("regex", r"(yes|no|maybe)( or (yes|no|maybe)){3}")
    texts = {batch_generate(model, tokenizer, ["Is it?"], 30, k=k, grammar=grammar).texts[0] for k in (0, 2, 15)}
    assert len(texts) == 1
    assert texts.pop().count(" or ") == 3


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8, "top_k": 9},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.8, "repetition_penalty": 2.0, "presence_penalty": 2.0},
    ],
    ids=["greedy", "ratio", "seeded", "penalties"],
)
def test_a_block_is_drawn_at_once_as_it_would_be_one_by_one(params: Any) -> None:
    model = pair()
    batch = prefill_prompts(model, [random_prompt(model, 12, 5)], max_k=15)
    asked = SamplingParams(**params)
    batch._set_params([SequenceParams(asked, key=3, choice=0, limit=99)], model)
    batch.recent = mx.full((1, asked.context_size), -1, mx.int32)  # what penalties look at
    logits, _ = model.block_logits(batch.last, 6, batch.trunk_state)
    alone = Proposal.none(1)
    for j in range(6):
        alone = model.backend.propose(logits[:, j : j + 1], alone, batch.context(15))
    block = block_drafts(model, batch, 6)
    assert mx.array_equal(block.tokens, alone.tokens)
    assert bool(block.sources) == bool(alone.sources)
    if alone.sources:
        for part in range(len(alone.sources[0])):  # of what each draft was drawn from
            one, other = (mx.concatenate([each[part] for each in made.sources], axis=1) for made in (alone, block))
            assert mx.array_equal(one, other)


def test_limits_and_plans_name_the_drafter_first() -> None:
    model = pair()
    assert draft_limits(model) == {Source.BLOCK: 15, Source.HEAD: 8}
    sequence: Any = SimpleNamespace(limits=DraftLimit(12, 0, None))
    assert fixed_plan(model, [sequence]) == Plan(12, Source.BLOCK)
    assert isinstance(model.drafter, DFlash)
    answer = generate(model, [1, 2, 3], k=15, max_tokens=20)
    assert answer.stats is not None
    assert answer.stats.clamped_to is None
