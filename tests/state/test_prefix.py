"""What is kept of prompts, for how long, and in how many bytes. Rows here are made up, so that every number tells
which token it belongs to; tests/engine/test_prefix_cache.py does it with models."""

import gc
import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise

import mlx.core as mx
import pytest

from headstart.errors import RequestError
from headstart.state import BLOCK, CHUNK, KV, BatchState, Chunks, PrefixCache, Recurrent
from headstart.state.prefix import TAIL, Node, Retention
from headstart.state.snapshot import States, take_snapshot

C = 32  # tokens a chunk
LOTS = 1 << 30


def numbers(prompt: Sequence[int]) -> mx.array:
    """[1, 1, T, 1]: a number for each token that depends on all before it and on its place."""
    at = mx.arange(len(prompt))
    return mx.cumsum((mx.array(prompt) + 1) * (at + 1)).astype(mx.float32).reshape(1, 1, -1, 1)


def keys_and_values(prompt: Sequence[int], length: int, heads: int) -> KV:
    room = [(0, 0), (0, 0), (0, -(-length // BLOCK) * BLOCK - len(prompt)), (0, 0)]
    keys = mx.pad(numbers(prompt) * (1 + mx.arange(heads * 32).reshape(1, heads, 1, 32)), room)
    return KV(keys, -keys, mx.zeros((1,), mx.int32))


def memory(prompt: Sequence[int], *, head: bool = True, hybrid: bool = True) -> tuple[States, mx.array]:
    """Of a sequence that has prefilled `prompt`: the trunk's, the head's and the last hidden."""
    last = numbers(prompt)[:, :, -1:]
    layers: list[KV | Recurrent] = [keys_and_values(prompt, len(prompt), 2)]
    if hybrid:
        layers.insert(0, Recurrent(last * mx.ones((1, 4, 8, 8)), last.reshape(1, 1, 1) * mx.ones((1, 3, 16))))
    length = mx.array([len(prompt)], mx.int32)
    states = [(BatchState(layers, length, mx.zeros((1,), mx.int32), [len(prompt)]), 0)]
    if head:
        pairs = keys_and_values([a + 10 * b for a, b in pairwise(prompt)], len(prompt), 1)
        states.append((BatchState([pairs], length - 1, mx.zeros((1,), mx.int32), [len(prompt)]), 1))
    return states, last.reshape(1, 1, 1) * mx.ones((1, 1, 16))


def blank(*, head: bool = True, hybrid: bool = True) -> States:
    layers: list[KV | Recurrent] = [KV.empty(1, 2, 32, mx.float32)]
    if hybrid:
        layers.insert(0, Recurrent.empty(1, 4, 8, 8, 4, 16, mx.float32))
    states = [(BatchState.empty(layers, 1), 0)]
    return [*states, (BatchState.empty([KV.empty(1, 1, 32, mx.float32)], 1), 1)] if head else states


def chunks(prompt: Sequence[int], ends: list[int] | None = None) -> Chunks:
    return Chunks.of(prompt, list(range(C, len(prompt), C)) if ends is None else ends)


def store(prefix: PrefixCache, prompt: Sequence[int], end: int, **kind: bool) -> None:
    states, hidden = memory(prompt[:end], **kind)
    prefix.store(chunks(prompt), end // C, states, take_snapshot(states[0][0], hidden))


def arrays(states: States) -> list[mx.array]:
    return [array for state, _ in states for layer in state.layers for array in layer.arrays()]


def prefill_prompts(prefix: PrefixCache, prompt: Sequence[int], until: int | None = None, **kind: bool) -> int:
    """Do as the engine does → the tokens that did not have to be read."""
    taken = resumed(prefix, prompt, **kind)
    for end in range(taken + C, min(len(prompt), until + 1 if until else len(prompt)), C):
        store(prefix, prompt, end, **kind)
    return taken


def resumed(prefix: PrefixCache, prompt: Sequence[int], ends: list[int] | None = None, **kind: bool) -> int:
    """Resume, and compare what comes back with what the sequence would have computed itself."""
    states = blank(**kind)
    found = prefix.resume(chunks(prompt, ends), states)
    if found is None:
        return 0
    taken, hidden = found
    assert taken < len(prompt)
    expected, true_hidden = memory(prompt[:taken], **kind)
    assert mx.array_equal(hidden, true_hidden)
    for (mine, _), (true, _) in zip(states, expected, strict=True):
        assert mine.bounds == true.bounds
        assert mx.array_equal(mine.lengths, true.lengths)
        assert mx.array_equal(mine.accepted, true.accepted)
    assert all(mx.array_equal(a, b) for a, b in zip(arrays(states), arrays(expected), strict=True))
    return taken


def nodes(prefix: PrefixCache) -> Iterator[Node]:
    waiting = list(prefix._root.children.values())
    while waiting:
        yield (node := waiting.pop())
        waiting += node.children.values()


def depths_with_states(prefix: PrefixCache, prompt: Sequence[int]) -> list[int]:
    return [n + 1 for n, node in enumerate(prefix._walk(chunks(prompt).tokens)) if node.states is not None]


def prompt_of(chunks: int, seed: int = 0, more: int = C - 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(8) for _ in range(chunks * C + more)]


@pytest.mark.parametrize(
    "kind", [{}, {"head": False}, {"hybrid": False}], ids=["hybrid", "no head", "attention only"]
)
def test_a_prompt_resumes_with_exactly_what_a_sequence_holds_there(kind: dict[str, bool]) -> None:
    prefix = PrefixCache(LOTS, chunk=C)
    prompt = prompt_of(5)
    assert prefill_prompts(prefix, prompt, **kind) == 0
    for length in (1, C - 1, C, C + 1, 2 * C, 2 * C + 1, 4 * C, 4 * C + 5, len(prompt)):
        taken = resumed(prefix, prompt[:length], **kind)
        assert taken % C == 0
        if length == len(prompt):
            assert taken == 5 * C


def test_the_last_token_of_a_prompt_is_never_taken_from_the_cache() -> None:
    """It opens the first window. A prompt of whole chunks and a token is known up to it, one of whole chunks not."""
    prefix = PrefixCache(LOTS, chunk=C)
    prefill_prompts(prefix, prompt_of(2))
    assert resumed(prefix, prompt_of(2)[: 2 * C + 1]) == 2 * C
    assert resumed(prefix, prompt_of(2)[: 2 * C]) == C


@pytest.mark.parametrize("at", range(0, 4 * C, 13))
def test_one_other_token_is_another_prompt_from_its_chunk_on(at: int) -> None:
    prefix = PrefixCache(LOTS, chunk=C)
    prompt = prompt_of(4)
    prefill_prompts(prefix, prompt, hybrid=False)
    other = [*prompt[:at], prompt[at] + 1, *prompt[at + 1 :]]
    assert resumed(prefix, other, hybrid=False) == at // C * C


def test_the_same_tokens_in_another_order_are_another_prompt() -> None:
    prefix = PrefixCache(LOTS, chunk=C)
    prompt = prompt_of(2)
    prefill_prompts(prefix, prompt)
    assert resumed(prefix, prompt[:C][::-1] + prompt[C:]) == 0
    assert resumed(prefix, prompt[C : 2 * C] + prompt[:C] + prompt[2 * C :]) == 0


def test_chunks_that_prompts_have_in_common_are_kept_once() -> None:
    prefix = PrefixCache(LOTS, chunk=C)
    prompt = prompt_of(6)
    prefill_prompts(prefix, prompt)
    before = prefix.stats()
    prefill_prompts(prefix, prompt)
    assert prefix.stats().bytes == before.bytes
    prefill_prompts(prefix, prompt[: 4 * C] + prompt_of(2, seed=1))
    assert (before.entries, prefix.stats().entries) == (6, 8)


def test_chunks_of_any_length_are_found_by_prompts_that_are_cut_alike() -> None:
    """A prompt that has the same tokens but other chunks would compute them in other steps, and finds nothing."""
    prefix, prompt, ends = PrefixCache(LOTS, chunk=C), prompt_of(4), [C, C + 7, 2 * C + 7, 2 * C + 10]
    for count, end in enumerate(ends, 1):
        states, hidden = memory(prompt[:end])
        prefix.store(chunks(prompt, ends), count, states, take_snapshot(states[0][0], hidden))
    assert resumed(prefix, prompt, ends) == 2 * C + 10
    assert resumed(prefix, [*prompt[: 2 * C + 8], 9, 9, 9, 9], ends) == 2 * C + 7
    assert resumed(prefix, prompt, [C, 2 * C]) == C
    assert resumed(prefix, prompt, [7, C + 7]) == 0


def test_a_conversation_goes_on_where_forks_alone_would_fill_the_cache() -> None:
    """States at forks outlive other prompts, but not the newest turn of their own."""
    prefix = PrefixCache(size_of(prompt_of(11)), chunk=C)
    for n in range(2, 12):
        assert prefill_prompts(prefix, prompt_of(n)) == ((n - 1) * C if n > 2 else 0)
        assert resumed(prefix, [*prompt_of(n)[: (n - 1) * C], *[9] * C]) == (n - 1) * C
    assert prefix.stats().evictions
    assert resumed(prefix, prompt_of(11)) == 11 * C


def test_states_are_kept_at_powers_of_two_and_where_the_prompt_ends() -> None:
    prefix = PrefixCache(LOTS, chunk=C)
    prompt = prompt_of(13)
    prefill_prompts(prefix, prompt, until=11 * C)
    assert depths_with_states(prefix, prompt) == [1, 2, 4, 8, 11]  # cancelled here: the way so far is not lost
    prefill_prompts(prefix, prompt + [1] * TAIL)
    assert depths_with_states(prefix, prompt) == [1, 2, 4, 8, 13]


def test_a_model_without_recurrent_states_can_go_on_from_every_chunk() -> None:
    prefix = PrefixCache(LOTS, chunk=C)
    prefill_prompts(prefix, prompt_of(13), hybrid=False)
    for depth in range(1, 14):
        assert resumed(prefix, prompt_of(13)[: depth * C + 1], hybrid=False) == depth * C


@pytest.mark.parametrize("more", range(0, C, 5))
def test_the_next_turn_of_a_chat_reads_only_the_last_chunk_of_the_one_before_again(more: int) -> None:
    """Even where the template then writes the end of the last turn otherwise."""
    prefix, turn = PrefixCache(LOTS, chunk=C), prompt_of(11, more=more)
    for seed in range(5):
        prefill_prompts(prefix, turn)
        following = turn + prompt_of(3, seed, more=seed)
        rewritten = turn[:-TAIL] + [8] * 5 + following
        assert resumed(prefix, following) >= len(turn) - 1 - C
        assert resumed(prefix, rewritten) >= len(turn) - TAIL - C
        turn = following


def test_the_second_prompt_that_parts_somewhere_leaves_states_there_for_the_third() -> None:
    """Agents with one long system prompt and tasks of their own."""
    prefix = PrefixCache(LOTS, chunk=C)
    system = prompt_of(13, more=3)
    tasks = [system + prompt_of(9, seed=seed) for seed in (1, 2, 3)]
    assert [prefill_prompts(prefix, task) for task in tasks] == [0, 8 * C, 13 * C]


def test_a_prompt_that_ends_within_a_longer_one_leaves_states_there() -> None:
    prefix = PrefixCache(LOTS, chunk=C)
    prompt = prompt_of(30)
    prefill_prompts(prefix, prompt)
    short = prompt[: 13 * C + 2]
    assert [prefill_prompts(prefix, short), prefill_prompts(prefix, short)] == [8 * C, 13 * C]
    assert next(node for node in nodes(prefix) if node.retention is Retention.FORK).states is not None


def size_of(*prompts: Sequence[int]) -> int:
    prefix = PrefixCache(LOTS, chunk=C)
    for prompt in prompts:
        prefill_prompts(prefix, prompt)
    return prefix.stats().bytes


def test_what_was_least_recently_used_goes_first() -> None:
    a, b, c = (prompt_of(1, seed) for seed in range(3))
    prefix = PrefixCache(size_of(a, b), chunk=C)
    prefill_prompts(prefix, a)
    prefill_prompts(prefix, b)
    assert resumed(prefix, a) == C
    prefill_prompts(prefix, c)
    assert (resumed(prefix, a), resumed(prefix, b), resumed(prefix, c)) == (C, 0, C)
    assert prefix.stats().evictions == 1


def test_states_within_prompts_go_before_any_prompt_does() -> None:
    a, b = (prompt_of(9, seed) for seed in range(2))
    room = size_of(a, b)
    prefix = PrefixCache(room - 1, chunk=C)
    prefill_prompts(prefix, a)
    prefill_prompts(prefix, b)
    assert (resumed(prefix, a), resumed(prefix, b)) == (9 * C, 9 * C)
    assert prefix.stats().entries == 18
    assert depths_with_states(prefix, a) == [2, 4, 8, 9]  # one of those that were not used for longest
    assert depths_with_states(prefix, b) == [1, 2, 4, 8, 9]


def test_a_fork_outlives_the_states_that_only_save_room() -> None:
    system = prompt_of(3, more=3)
    tasks = [system + prompt_of(6, seed=seed) for seed in (1, 2)]
    prefix = PrefixCache(size_of(*tasks), chunk=C)
    for task in tasks:
        prefill_prompts(prefix, task)
    prefill_prompts(prefix, prompt_of(3, seed=9))
    assert prefix.stats().evictions
    assert depths_with_states(prefix, tasks[1])[0] == 3
    assert prefill_prompts(prefix, system + prompt_of(1, seed=3)) == 3 * C


def test_children_go_before_their_parents() -> None:
    """Where prompts part one can go on, so that stays when all who went on from there have gone."""
    system = prompt_of(3, more=3)
    tasks = [system + prompt_of(6, seed=seed) for seed in (1, 2)]
    prefix = PrefixCache(size_of(*tasks), chunk=C)
    for task in tasks:
        prefill_prompts(prefix, task)
    prefill_prompts(prefix, prompt_of(12, seed=3))
    assert [resumed(prefix, task) for task in tasks] == [3 * C, 3 * C]


def test_a_prompt_that_goes_takes_all_along_that_only_it_could_use() -> None:
    """What is left can be resumed from: no chunk is kept that leads nowhere."""
    a, b = prompt_of(7, seed=1), prompt_of(7, seed=2)
    prefix = PrefixCache(size_of(a), chunk=C)
    prefill_prompts(prefix, a)
    prefill_prompts(prefix, b)
    assert resumed(prefix, a) == 0
    assert resumed(prefix, b) == 7 * C
    assert all(node.states is not None for node in nodes(prefix) if not node.children)


def test_a_prompt_too_large_for_the_cache_leaves_its_beginning() -> None:
    """And drives out nothing for the sake of what does not fit in any case."""
    large = prompt_of(12)
    prefix = PrefixCache(size_of(prompt_of(5)), chunk=C)
    prefill_prompts(prefix, large, until=6 * C)
    before, taken = prefix.stats(), resumed(prefix, large)
    assert 4 * C <= taken <= 6 * C
    store(prefix, large, 12 * C)
    assert (prefix.stats().bytes, prefix.stats().evictions) == (before.bytes, before.evictions)
    assert resumed(prefix, large) == taken


def test_a_cache_of_no_bytes_keeps_nothing() -> None:
    prefix = PrefixCache(0, chunk=C)
    assert [prefill_prompts(prefix, prompt_of(2)) for _ in range(2)] == [0, 0]
    assert prefix.stats().entries == 0


@pytest.mark.parametrize("share", [0.05, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.2, 0.6))])
def test_bytes_stay_within_their_bound_whatever_comes(share: float) -> None:
    rng = random.Random(share)
    systems = [prompt_of(rng.randrange(6), seed, more=rng.randrange(C)) for seed in range(4)]
    prompts = [rng.choice(systems) + prompt_of(rng.randrange(6), rng.randrange(30)) for _ in range(60)]
    prefix = PrefixCache(int(share * size_of(*prompts)), chunk=C)
    served = 0
    for prompt in prompts:
        served += prefill_prompts(prefix, prompt, until=rng.choice([None, None, 2 * C]))
        kept = list(nodes(prefix))
        stats = prefix.stats()
        held = [part for node in kept for pack in node.packs for part in pack]
        held += [a for node in kept if node.states is not None for a in node.states.arrays()]
        assert stats.bytes == sum(a.nbytes for a in held) <= prefix.max_bytes
        assert stats.entries == len(kept)
        assert all(node.states is not None for node in kept if not node.children)
    assert prefix.stats().evictions
    assert prefix.stats().tokens == served > 0


def test_what_is_not_finite_is_not_kept() -> None:
    prompt = prompt_of(2)
    for broken in range(3):
        prefix = PrefixCache(LOTS, chunk=C)
        states, hidden = memory(prompt[:C])
        target = arrays(states)[(0, 3, 4)[broken]]  # recurrent state, values, the head's keys
        target[0, 0, 3] = mx.array(mx.nan)
        prefix.store(chunks(prompt), 1, states, take_snapshot(states[0][0], hidden))
        assert prefix.stats().entries == 0
        store(prefix, prompt, C)
        assert resumed(prefix, prompt) == C


def test_a_sequence_that_was_resumed_may_overwrite_its_state() -> None:
    prefix = PrefixCache(LOTS, chunk=C)
    prompt = prompt_of(1)
    prefill_prompts(prefix, prompt)
    states = blank()
    found = prefix.resume(chunks(prompt), states)
    assert found is not None
    for array in (found[1], *arrays(states)):
        array[:] = mx.array(mx.nan)
    assert resumed(prefix, prompt) == C


def test_a_sequence_that_was_stored_may_overwrite_its_state() -> None:
    prefix = PrefixCache(LOTS, chunk=C)
    prompt = prompt_of(1)
    states, hidden = memory(prompt[:C])
    prefix.store(chunks(prompt), 1, states, take_snapshot(states[0][0], hidden))
    for array in (hidden, *arrays(states)):
        array[:] = mx.array(mx.nan)
    assert resumed(prefix, prompt) == C


def test_an_entry_keeps_no_more_memory_alive_than_it_counts() -> None:
    """Not the sequence's whole buffers, of which it holds a slice."""
    prefix = PrefixCache(LOTS)
    gc.collect()
    before = mx.get_active_memory()
    prompt = [1] * (CHUNK + 1)
    shape = (1, 1, 8 * CHUNK, 256)  # one head: such a slice is contiguous as it is
    conv = mx.zeros((1, CHUNK + 3, 512))[:, -3:]
    layers: list[KV | Recurrent] = [
        KV(mx.zeros(shape), mx.zeros(shape), mx.zeros((1,), mx.int32)),
        Recurrent(mx.zeros((1, 4, 64, 64)), conv),
    ]
    hidden = mx.zeros((1, CHUNK, 512))[:, -1:]
    rows = BatchState.empty(layers, 1)
    mx.eval(rows.arrays(), hidden)
    prefix.store(Chunks.of(prompt, [CHUNK]), 1, [(rows, 0)], take_snapshot(rows, hidden))
    held = mx.get_active_memory() - before
    del rows, layers, hidden, conv
    gc.collect()
    kept, counted = mx.get_active_memory() - before, prefix.stats().bytes
    assert counted == 2 * CHUNK * 256 * 4 + 4 * 64 * 64 * 4 + 3 * 512 * 4 + 512 * 4
    assert counted <= kept < 1.05 * counted < held / 4


def test_eight_bits_keep_keys_and_values_nearly_and_the_rest_exactly() -> None:
    prompt = prompt_of(4)
    whole, small = PrefixCache(LOTS, chunk=C), PrefixCache(LOTS, chunk=C, eight_bits=True)
    for prefix in (whole, small):
        prefill_prompts(prefix, prompt, until=C)
    assert small.stats().bytes < 0.6 * whole.stats().bytes
    states = blank()
    found = small.resume(chunks(prompt), states)
    assert found is not None
    true, hidden = memory(prompt[: found[0]])
    recurrent, kv = states[0][0].layers
    expected, exact_kv = true[0][0].layers
    assert mx.array_equal(found[1], hidden)
    for a, b in zip(recurrent.arrays(), expected.arrays(), strict=True):
        assert mx.array_equal(a, b)
    for a, b in zip(kv.arrays(), exact_kv.arrays(), strict=True):
        assert not mx.array_equal(a, b)
        assert mx.allclose(a, b, rtol=0.01, atol=0.01 * float(mx.abs(b).max()))


def test_stats_count_hits_misses_and_tokens_served() -> None:
    prefix = PrefixCache(LOTS, chunk=C)
    prefill_prompts(prefix, prompt_of(2))
    prefill_prompts(prefix, prompt_of(2))
    prefill_prompts(prefix, prompt_of(0))  # less than a chunk: neither
    stats = prefix.stats()
    assert (stats.hits, stats.misses, stats.tokens, stats.entries, stats.max_bytes) == (1, 1, 2 * C, 2, LOTS)


def test_clearing_forgets_everything_and_a_running_sequence_stores_all_of_its_prompt_again() -> None:
    prefix = PrefixCache(LOTS, chunk=C)
    prompt = prompt_of(6)
    prefill_prompts(prefix, prompt, until=3 * C)
    prefix.clear()
    assert (prefix.stats().entries, prefix.stats().bytes) == (0, 0)
    for end in range(4 * C, 6 * C + 1, C):
        store(prefix, prompt, end)
    assert resumed(prefix, prompt) == 6 * C


def test_clearing_frees_the_memory_at_once() -> None:
    prefix = PrefixCache(LOTS, chunk=C)
    prefill_prompts(prefix, prompt_of(3))
    gone = [weakref.ref(node) for node in nodes(prefix)]
    gc.disable()  # who clears because memory is short cannot wait for it
    try:
        prefix.clear()
        assert len(gone) == 3
        assert not any(node() for node in gone)
    finally:
        gc.enable()


def test_stats_and_clear_may_come_from_other_threads_at_any_time() -> None:
    prefix = PrefixCache(size_of(prompt_of(6)), chunk=C)
    over, troubles = threading.Event(), []

    def disturb() -> None:
        try:
            while not over.wait(0.001):
                assert prefix.stats().bytes <= prefix.max_bytes
                prefix.clear()
        except BaseException as trouble:
            troubles.append(trouble)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for seed in range(40):
            prefill_prompts(prefix, prompt_of(6, seed=seed % 2))
    finally:
        over.set()
        thread.join()
    assert not troubles


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(RequestError, match="max_bytes"):
        PrefixCache(-1)
