"""After every step the committed state is, bit for bit, what mlx-lm holds after the same tokens read plainly."""

import random
from functools import lru_cache
from itertools import pairwise

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

import headstart.engine.draft as drafts
import headstart.engine.step as loop
from fixtures import FAMILIES, batch_of, mlx_lm_greedy, random_model, random_prompt
from headstart.engine.batch import RESUME_PAIRS, Batch, UnseenPairs
from headstart.kernels.types import PendingDrafts
from headstart.limits import MAX_K
from headstart.models import Model
from headstart.sampling import Proposal
from headstart.state import KV, Recurrent

pytestmark = pytest.mark.usefixtures("stock_ops")  # tests/kernels/test_cpu_kernels.py has our kernels'
LENGTHS = (5, 19, 33)  # prompts of three ragged rows
MOST = 48  # tokens that a test accepts of a sequence


@lru_cache
def sequences(family: str) -> list[list[int]]:
    """Each sequence's prompt and what the model generates after it, for as long as any test runs."""
    model = random_model(family)
    prompts = [random_prompt(model, length, length) for length in LENGTHS]
    return [prompt + mlx_lm_greedy(model, prompt, MOST + MAX_K + 1) for prompt in prompts]


def committed(memory: KV | Recurrent, row: int, length: int, accepted: int) -> list[mx.array]:
    """What `memory` holds of a sequence: keys and values, or the convolution's inputs and the state with the accepted
    drafts folded in. Folded here one by one and without a mask, so not by the code under test."""
    if isinstance(memory, KV):
        return [memory.keys[row, :, :length], memory.values[row, :, :length]]
    state, conv = memory.state[row : row + 1], memory.conv[row : row + 1]
    if memory.pending is not None:
        drafts = PendingDrafts(*memory.pending)
        for t in range(accepted):
            k, v, g, beta = (a[row : row + 1, t : t + 1] for a in (drafts.k, drafts.v, drafts.g, drafts.beta))
            _, state = gated_delta_ops(k, k, v, g, beta, state)
        kernel = conv.shape[1]
        conv = mx.concatenate([conv, drafts.qkv[row : row + 1, :accepted]], axis=1)[:, -kernel:]
    return [conv[0], state[0]]


def plain(model: Model, tokens: list[int]) -> tuple[list[list[mx.array]], mx.array]:
    """mlx-lm's own caches after `tokens`, layer by layer, and its hiddens [T, H]."""
    caches = model.lm.make_cache()
    hidden = model.family.text(model.lm)(mx.array([tokens]), cache=caches)
    layers = [
        [cache[0][0], cache[1][0]]
        if layer.is_linear
        else [cache.keys[0, :, : len(tokens)], cache.values[0, :, : len(tokens)]]
        for layer, cache in zip(model.weights.layers, caches, strict=True)
    ]
    return layers, hidden[0]


def assert_equals_plain(model: Model, batch: Batch, row: int, sequence: list[int]) -> None:
    """`sequence` has all prefilled and generated tokens; its last token is not in the trunk yet."""
    length = len(sequence) - 1
    assert batch.trunk_state.lengths[row].item() == length
    assert batch.trunk_state.bounds[row] >= length
    assert batch.last[row].item() == sequence[-1]
    layers, hidden = plain(model, sequence[:-1])
    for memory, expected in zip(batch.trunk_state.layers, layers, strict=True):
        found = committed(memory, row, length, int(batch.trunk_state.accepted[row].item()))
        for ours, theirs in zip(found, expected, strict=True):
            assert mx.array_equal(ours, theirs)

    # The head: the pairs it has seen, and behind them those that wait.
    assert batch.head_state is not None
    batch.collect_unseen()
    seen, waiting = int(batch.head_state.lengths[row].item()), int(batch.unseen.counts[row].item())
    assert seen + waiting == length
    assert mx.array_equal(batch.unseen.hidden[row, :waiting], hidden[seen:])
    assert batch.unseen.tokens[row, :waiting].tolist() == sequence[seen + 1 :]
    if seen:
        fresh = model.make_head_state(1)
        model.head(hidden[None, :seen], mx.array([sequence[1 : seen + 1]]), fresh)
        for memory, expected in zip(batch.head_state.layers, fresh.layers, strict=True):
            assert mx.array_equal(memory.keys[row, :, :seen], expected.keys[0, :, :seen])
            assert mx.array_equal(memory.values[row, :, :seen], expected.values[0, :, :seen])


class Rigged:
    """The head's drafts, replaced so that row b accepts exactly `pattern[b]` of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sequences: list[list[int]], vocabulary: int):
        self.sequences, self.vocabulary = sequences, vocabulary
        self.said = list(LENGTHS)
        self.pattern: list[int] = []
        monkeypatch.setitem(drafts.SOURCES, drafts.Source.HEAD, self.draft)

    def draft(self, model: Model, batch: Batch, k: int, certain: object) -> Proposal:
        own = drafts.head_drafts(model, batch, k)
        assert own.tokens.shape == (batch.size, k)
        rows = []
        for b, (sequence, said) in enumerate(zip(self.sequences, self.said, strict=True)):
            truth = sequence[said : said + k]
            good = min(self.pattern[b], k)
            rows.append(truth[:good] + [(token + 1) % self.vocabulary for token in truth[good:]])
        return own._replace(tokens=mx.array(rows, mx.int32).reshape(batch.size, k))

    def step(self, model: Model, batch: Batch, k: int, pattern: list[int]) -> None:
        self.pattern = pattern
        mx.eval(loop.step(model, batch, k), batch.arrays())
        assert batch.trunk_state.accepted.tolist() == [min(n, k) for n in pattern]
        self.said = [said + min(n, k) + 1 for said, n in zip(self.said, pattern, strict=True)]


ORDINARY = (("dense", "random"), ("next", "all"))


@pytest.mark.parametrize(
    ("family", "pattern"),
    [
        pytest.param(family, pattern, marks=[] if (family, pattern) in ORDINARY else pytest.mark.slow)
        for family in FAMILIES
        for pattern in ("random", "all", "none")
    ],
)
def test_committed_state_is_what_plain_reading_leaves(
    family: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rng = random_model(family), random.Random(0)
    batch = batch_of(model, *[s[:n] for s, n in zip(sequences(family), LENGTHS, strict=True)])
    batch.max_k = mx.full(len(LENGTHS), MAX_K)  # as other sources than the head draft
    rigged = Rigged(monkeypatch, sequences(family), model.vocabulary)
    for round in range(8 if pattern == "random" else 4):
        k = rng.choice((0, 1, 3, 8, 12, 15)) if pattern == "random" else (15, 1, 3, 9)[round]
        accepted = {"random": [rng.randint(0, k) for _ in LENGTHS], "all": [k] * 3, "none": [0] * 3}[pattern]
        rigged.step(model, batch, k, accepted)
        if round % 2:  # what a round leaves is what the next one builds on
            for row, (sequence, said) in enumerate(zip(rigged.sequences, rigged.said, strict=True)):
                assert_equals_plain(model, batch, row, sequence[:said])


def test_committed_state_survives_sequences_leaving_and_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rng = random_model("dense"), random.Random(1)
    prompts = [s[:n] for s, n in zip(sequences("dense"), LENGTHS, strict=True)]
    batch = batch_of(model, *prompts)
    rigged = Rigged(monkeypatch, list(sequences("dense")), model.vocabulary)
    for round in range(8):
        rigged.step(model, batch, 3, [rng.randint(0, 3) for _ in range(batch.size)])
        if round % 2:  # the row in the middle leaves with drafts in doubt, and one with a fresh prompt joins
            staying = [0, *range(2, batch.size)]
            batch.keep(staying, model)
            batch.join(batch_of(model, prompts[1]), model)
            rigged.sequences = [rigged.sequences[i] for i in staying] + [sequences("dense")[1]]
            rigged.said = [rigged.said[i] for i in staying] + [LENGTHS[1]]
        for row, (sequence, said) in enumerate(zip(rigged.sequences, rigged.said, strict=True)):
            assert_equals_plain(model, batch, row, sequence[:said])


@pytest.mark.parametrize(
    ("chunk", "family"),
    [
        (1, "dense"),
        *(pytest.param(1, family, marks=pytest.mark.slow) for family in FAMILIES if family != "dense"),
        *((7, family) for family in FAMILIES),
        *(pytest.param(chunk, family, marks=pytest.mark.slow) for chunk in (32, 512) for family in FAMILIES),
    ],
)
def test_a_prompt_leaves_the_same_state_however_it_is_cut(family: str, chunk: int) -> None:
    model = random_model(family)
    prompt = sequences(family)[2][:60]
    assert_equals_plain(model, batch_of(model, prompt, chunk=chunk), 0, prompt)


def test_the_last_draft_of_a_full_accept_enters_the_heads_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """exo#2110: its pair is made by no draft step, so it must come from the trunk's own hidden."""
    model = random_model("dense")
    batch = batch_of(model, *[s[:n] for s, n in zip(sequences("dense"), LENGTHS, strict=True)])
    rigged = Rigged(monkeypatch, sequences("dense"), model.vocabulary)
    before = batch.trunk_state.lengths.tolist()
    rigged.step(model, batch, 4, [4, 4, 4])
    assert batch.trunk_state.lengths.tolist() == [length + 5 for length in before]
    drafts.see_pairs(model, batch)
    assert batch.head_state.lengths.tolist() == batch.trunk_state.lengths.tolist()
    for row, (sequence, said) in enumerate(zip(rigged.sequences, rigged.said, strict=True)):
        assert_equals_plain(model, batch, row, sequence[:said])


@pytest.mark.slow
def test_after_a_prompt_of_2000_tokens_the_heads_cache_is_that_of_a_run_token_by_token() -> None:
    model = random_model("dense", num_hidden_layers=2, full_attention_interval=2)
    prompt = random_prompt(model, 2000)
    batch = batch_of(model, prompt)
    slow = batch_of(model, prompt[:1])
    for token, following in pairwise(prompt):
        hidden = model.trunk(mx.array([[token]]), slow.trunk_state, certain=1)
        slow.trunk_state.commit(mx.array([1]), most=1)
        slow.head_state.bounds = slow.trunk_state.bounds
        model.head(hidden, mx.array([[following]]), slow.head_state)
        slow.head_state.commit(mx.array([1]), most=0)
        mx.async_eval(slow.arrays())
    drafts.see_pairs(model, batch)
    assert batch.head_state.lengths.tolist() == slow.head_state.lengths.tolist() == [1999]
    for fast_memory, slow_memory in zip(batch.head_state.layers, slow.head_state.layers, strict=True):
        assert mx.array_equal(fast_memory.keys[:, :, :1999], slow_memory.keys[:, :, :1999])
        assert mx.array_equal(fast_memory.values[:, :, :1999], slow_memory.values[:, :, :1999])


@pytest.mark.parametrize("rounds", [9, RESUME_PAIRS, 40])
def test_a_head_that_resumes_is_shown_the_latest_pairs_it_missed(rounds: int) -> None:
    """After few rounds at k = 0 that is all of it: the state it would have had. Later pairs follow those it saw."""
    model = random_model("dense")
    sequence, start = sequences("dense")[0], LENGTHS[0]
    batch = batch_of(model, sequence[:start])
    drafts.see_pairs(model, batch)
    seen = int(batch.head_state.lengths.item())
    for _ in range(rounds):
        mx.eval(loop.step(model, batch, 0), batch.arrays())
        assert len(batch.paused_pairs) <= RESUME_PAIRS
        assert batch.unseen.width <= 1  # nothing is computed for it meanwhile
    said = start + rounds
    missed = max(rounds - RESUME_PAIRS, 0)
    drafts.head_drafts(model, batch, 1)
    assert batch.head_state.lengths.tolist() == [seen + rounds - missed]
    _, hidden = plain(model, sequence[: said - 1])
    kept = [*range(seen), *range(seen + missed, said - 1)]
    fresh = model.make_head_state(1)
    model.head(hidden[None, mx.array(kept)], mx.array([[sequence[at + 1] for at in kept]]), fresh)
    for memory, expected in zip(batch.head_state.layers, fresh.layers, strict=True):
        assert mx.array_equal(memory.keys[:, :, : len(kept)], expected.keys[:, :, : len(kept)])
        assert mx.array_equal(memory.values[:, :, : len(kept)], expected.values[:, :, : len(kept)])


def test_rows_that_wait_with_different_counts_keep_their_own_latest_pairs() -> None:
    hidden = mx.arange(2 * 6, dtype=mx.float32).reshape(2, 6, 1)
    waiting = UnseenPairs(hidden, mx.arange(12).reshape(2, 6), mx.array([6, 3]))
    latest = waiting.latest(4)
    assert latest.counts.tolist() == [4, 3]
    assert latest.tokens[0].tolist() == [2, 3, 4, 5]
    assert latest.tokens[1, :3].tolist() == [6, 7, 8]
    assert latest.hidden[0, :, 0].tolist() == [2, 3, 4, 5]
    assert waiting.latest(6) is waiting
