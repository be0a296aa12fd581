"""Each sequence is sampled from mlx-lm's distribution, whatever else is in the batch."""

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc, make_logits_processors

from headstart.sampling import SamplingParams, SequenceParams, controls
from headstart.sampling.distribution import Distribution, gumbel_argmax, process_logits, sampling_distribution
from headstart.sampling.noise import gumbel

VOCABULARY, CONTEXT = 97, 30
P = SamplingParams

SAMPLERS = {
    "temperature": P(temperature=0.7),
    "hot": P(temperature=1.8),
    "top_p": P(temperature=1.0, top_p=0.7),
    "narrow top_p": P(temperature=0.6, top_p=0.05),
    "min_p": P(temperature=1.0, min_p=0.1),
    "min_p that keeps": P(temperature=1.0, min_p=0.8, min_tokens_to_keep=5),
    "top_k": P(temperature=0.9, top_k=7),
    "top_k of all": P(temperature=0.9, top_k=VOCABULARY + 5),
    "top_p and min_p": P(temperature=0.8, top_p=0.9, min_p=0.05),
    "top_p and top_k": P(temperature=0.6, top_p=0.95, top_k=20),
    "all three": P(temperature=0.7, top_p=0.8, min_p=0.02, min_tokens_to_keep=3, top_k=12),
    "xtc": P(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.05),
    "xtc and top_k": P(temperature=0.9, xtc_probability=1.0, xtc_threshold=0.04, top_k=6),
    "xtc and all": P(
        temperature=0.7, top_p=0.9, min_p=0.02, xtc_probability=1.0, xtc_threshold=0.06, top_k=4,
        xtc_special_tokens=[3, 5, 90],
    ),
    "greedy": P(),
}  # fmt: skip
PROCESSORS = {
    "bias": P(logit_bias={3: 4.0, 96: -7.5, 0: 1.25}),
    "repetition": P(repetition_penalty=1.4),
    "repetition of 3": P(repetition_penalty=0.6, repetition_context_size=3),
    "presence": P(presence_penalty=0.8, presence_context_size=11),
    "frequency": P(frequency_penalty=0.35, frequency_context_size=29),
    "negative": P(presence_penalty=-0.5, frequency_penalty=-0.2),
    "all": P(
        logit_bias={7: -2.0, 1: 0.5}, repetition_penalty=1.2, repetition_context_size=5, presence_penalty=1.0,
        presence_context_size=9, frequency_penalty=0.3, frequency_context_size=17,
    ),
    "none": P(),
}  # fmt: skip
SIGMAS = {
    "all": P(temperature=0.8, top_n_sigma=30),
    "some": P(temperature=1.3, top_n_sigma=1.5),
    "fractions": P(temperature=1.0, top_n_sigma=0.01),
    "penalised and truncated": P(temperature=0.7, top_n_sigma=2, top_p=0.9, top_k=9, presence_penalty=0.8),
    "no early stop": P(temperature=0.7, top_n_sigma=1.2, stop_ids=[3, 5], min_tokens=200),
}


@pytest.fixture(autouse=True)
def without_compiling():
    """mlx-lm compiles each of its samplers, which takes g++ seconds on CPU."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def random_logits(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 2.5, shape).astype(np.float32))


def random_text(rows: int, width: int, seed: int = 0) -> mx.array:
    """[B, W, L]: few different tokens, so that they repeat; the first sequence's context begins with nothing."""
    text = np.random.default_rng(seed).integers(0, 12, (rows, width, CONTEXT)).astype(np.int32)
    text[0, :, : CONTEXT - 4] = -1
    return mx.array(text)


def ruled(*params: SamplingParams):
    return controls([SequenceParams(p, 11, 0, p.max_tokens) for p in params], VOCABULARY)


def probabilities(logits: mx.array, *params: SamplingParams, coin: float = 0.5) -> Distribution:
    return sampling_distribution(logits, ruled(*params), mx.full(logits.shape[:2], coin))


def in_mlx_lm(logits: mx.array, params: SamplingParams, coin: float = 0.5) -> np.ndarray:
    """One position [V] through mlx-lm's own functions, in the order of its make_sampler.

    A filter that mlx-lm does not have is written out here in numpy, from its paper.
    """
    if params.temperature == 0:
        return np.eye(VOCABULARY)[int(mx.argmax(logits))]
    logp = (logits - mx.logsumexp(logits))[None]
    if 0 < params.top_p < 1:
        logp = apply_top_p(logp, params.top_p)
    if params.min_p:
        logp = apply_min_p(logp, params.min_p, params.min_tokens_to_keep)
    if params.xtc_probability and coin <= params.xtc_probability:  # apply_xtc tosses its coin inside; the rest is it
        p = mx.softmax(logp, -1)
        mask = p > mx.where(p > params.xtc_threshold, p, mx.inf).min(axis=-1, keepdims=True)
        if params.xtc_special_tokens:
            mask[..., list(params.xtc_special_tokens)] = False
        logp = mx.where(mask, -mx.inf, logp)
    if 0 < params.top_k < VOCABULARY:
        logp = apply_top_k(logp, params.top_k)
    return np.array(mx.softmax(logp * (1 / params.temperature), axis=-1)[0])


@pytest.mark.parametrize("name", SAMPLERS)
def test_support_and_probabilities_are_those_of_mlx_lm(name: str) -> None:
    logits = random_logits(3, 4, VOCABULARY, seed=len(name))
    dense = np.array(probabilities(logits, *[SAMPLERS[name]] * 3).dense(VOCABULARY))
    for b, w in itertools.product(range(3), range(4)):
        expected = in_mlx_lm(logits[b, w], SAMPLERS[name])
        assert ((dense[b, w] > 0) == (expected > 0)).all(), "another support"
        assert np.allclose(dense[b, w], expected, atol=2e-6)


def test_the_copy_of_xtc_above_is_mlx_lms() -> None:
    for seed in range(5):
        logits = random_logits(1, VOCABULARY, seed=seed)
        logp = logits - mx.logsumexp(logits)
        theirs = mx.softmax(apply_xtc(logp, 1.0, 0.05, [3, 5]), axis=-1)
        params = P(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.05, xtc_special_tokens=[3, 5])
        assert np.allclose(np.array(theirs[0]), in_mlx_lm(logits[0], params), atol=1e-7)


def test_xtc_leaves_a_position_alone_where_its_coin_decides_so() -> None:
    params, logits = P(temperature=1.0, xtc_probability=0.3, xtc_threshold=0.05), random_logits(1, 3, VOCABULARY)
    coins = mx.array([[0.2, 0.31, 0.3]])
    found = sampling_distribution(logits, ruled(params), coins).dense(VOCABULARY)
    for w, coin in enumerate([0.2, 0.31, 0.3]):
        assert np.allclose(np.array(found[0, w]), in_mlx_lm(logits[0, w], params, coin), atol=2e-6)
    assert found[0, 0].max() < found[0, 1].max()


@pytest.mark.parametrize("name", PROCESSORS)
def test_bias_and_penalties_are_those_of_mlx_lm(name: str) -> None:
    params = PROCESSORS[name]
    processors = make_logits_processors(
        dict(params.logit_bias), params.repetition_penalty, params.repetition_context_size, params.presence_penalty,
        params.presence_context_size, params.frequency_penalty, params.frequency_context_size,
    )  # fmt: skip
    logits, text = random_logits(3, 4, VOCABULARY, seed=3), random_text(3, 4)
    found = process_logits(logits, ruled(*[params] * 3), text, mx.full((3, 4), 100))
    for b, w in itertools.product(range(3), range(4)):
        tokens = mx.array([t for t in text[b, w].tolist() if t >= 0])
        expected = logits[b, w][None] + 0
        for process in processors:
            expected = process(tokens, expected)
        assert np.allclose(np.array(found[b, w]), np.array(expected[0]), rtol=1e-6, atol=1e-6)


def within_sigma(logits: np.ndarray, n: float) -> np.ndarray:
    """[V]: which tokens llama.cpp's top-n-sigma keeps."""
    possible = logits[np.isfinite(logits)].astype(np.float64)
    return logits >= possible.max() - n * possible.std()


@pytest.mark.parametrize("name", SIGMAS)
def test_top_n_sigma_is_llama_cpps(name: str) -> None:
    """Before other truncations, after all else that changes logits; grammars and stops have no part in sigma."""
    params, permitted = SIGMAS[name], random_logits(3, 4, VOCABULARY, seed=7) > -1
    logits, text, left = random_logits(3, 4, VOCABULARY, seed=6), random_text(3, 4), mx.full((3, 4), 100)
    without = ruled(*[replace(params, top_n_sigma=0)] * 3)
    for allowed in (None, permitted):
        before = np.array(process_logits(logits, without, text, left, None, allowed))
        after = np.array(process_logits(logits, ruled(*[params] * 3), text, left, None, allowed))
        for b, w in itertools.product(range(3), range(4)):
            kept = within_sigma(before[b, w], params.top_n_sigma)
            assert np.array_equal(after[b, w], np.where(kept, before[b, w], -np.inf))
            assert kept.sum() == 1 if name == "fractions" else kept.sum() > 1


def test_top_n_sigma_keeps_the_best_where_all_are_equal_or_one_is_possible() -> None:
    level = mx.zeros((2, 1, VOCABULARY))
    alone = mx.where(mx.arange(VOCABULARY) == 5, 2.0, -mx.inf) + level
    for logits in (level, alone):
        found = process_logits(logits, ruled(*[SIGMAS["some"]] * 2), random_text(2, 1), mx.full((2, 1), 100))
        assert mx.array_equal(found, logits)


SAMPLED = [*SAMPLERS.values(), *SIGMAS.values(), *[replace(p, temperature=0.8) for p in PROCESSORS.values()]]
ALL = [*SAMPLED, *PROCESSORS.values()]


def through(logits: mx.array, text: mx.array, *params: SamplingParams) -> Distribution:
    adjusted = process_logits(logits, ruled(*params), text, mx.full(logits.shape[:2], 100))
    return probabilities(adjusted, *params)


def test_a_row_is_the_same_beside_any_others() -> None:
    """Same support, same probabilities; what it draws is held bit for bit below."""
    logits, text = random_logits(len(ALL), 3, VOCABULARY), random_text(len(ALL), 3)
    together = np.array(through(logits, text, *ALL).dense(VOCABULARY))
    for b, params in enumerate(ALL):
        alone = np.array(through(logits[b : b + 1], text[b : b + 1], params).dense(VOCABULARY))[0]
        assert ((alone > 0) == (together[b] > 0)).all(), params
        assert np.allclose(alone, together[b], rtol=2e-6, atol=1e-9), params


def scores(found: Distribution) -> np.ndarray:
    """What a draw compares, in the order of the vocabulary: [B, W, V], float32."""
    if found.ids is None:
        return np.array(found.scores)
    everywhere = mx.full((*found.scores.shape[:2], VOCABULARY), -mx.inf)
    return np.array(mx.put_along_axis(everywhere, found.ids, found.scores, axis=-1))


@pytest.mark.parametrize("step", [None, 0.5])
def test_what_a_draw_compares_is_bitwise_the_same_beside_any_others(step: float | None) -> None:
    """Else the seeded text of a sequence would depend on its neighbours: rarely, by the last bit of a sum, or, where
    logits tie as they do in bfloat16, by which of the equals a truncation keeps."""
    logits, text = random_logits(len(ALL), 5, VOCABULARY), random_text(len(ALL), 5)
    if step is not None:
        logits = mx.round(logits / step) * step
    together = scores(through(logits, text, *ALL))
    for b, params in enumerate(ALL):
        if params.temperature:
            for others in ([], [P(temperature=1.0, top_k=40)], [P(), P(temperature=1.0, top_p=0.5)]):
                here = mx.array([b] * (1 + len(others)))
                found = scores(through(logits[here], text[here], params, *others))[0]
                assert np.array_equal(found, together[b]), (params, others)


def test_equal_scores_are_decided_alike_on_every_path() -> None:
    """By the lowest id: the sorted tokens of a truncated row and the unsorted ones of others must agree."""
    ids = mx.array([[[5, 2, 9, 0]]])
    even = mx.array([[[-mx.inf, 0.0, 0.0, 0.0]]])
    keys = (mx.array([[7]], mx.uint32), mx.array([[9]], mx.uint32))
    level = even - gumbel(keys, ids)
    level = mx.where(even == 0, level, -mx.inf)
    values = level + gumbel(keys, ids)
    tied = [
        int(i) for i, v in zip(ids[0, 0].tolist(), values[0, 0].tolist(), strict=True) if v == values.max().item()
    ]
    assert len(tied) > 1
    assert gumbel_argmax(level, ids, keys).item() == min(tied)


BOUNDED = [name for name, p in SAMPLERS.items() if 0 < p.top_k < VOCABULARY]


@pytest.mark.parametrize("name", BOUNDED)
def test_the_bounded_support_is_the_full_one(name: str) -> None:
    """All sequences have a top_k: only so many tokens are sorted. With one that has none, all are."""
    logits = random_logits(2, 3, VOCABULARY, seed=9)
    bounded = probabilities(logits, SAMPLERS[name], SAMPLERS[name])
    full = probabilities(logits, SAMPLERS[name], SAMPLERS["temperature"])
    assert full.logp.shape[-1] == VOCABULARY
    if not SAMPLERS[name].xtc_probability:
        assert bounded.logp.shape[-1] == SAMPLERS[name].top_k
    a, b = (np.array(d.dense(VOCABULARY))[0] for d in (bounded, full))
    assert ((a > 0) == (b > 0)).all()
    assert np.allclose(a, b, rtol=2e-6)


def test_greedy_sequences_are_greedy_beside_any_others_even_where_logits_tie() -> None:
    logits = np.array(random_logits(2, 3, VOCABULARY))
    logits[0, :, [11, 40, 41]] = logits.max() + 1
    for other in SAMPLERS.values():
        found = probabilities(mx.array(logits), P(), other)
        best = found.sample((mx.zeros((2, 3), mx.uint32), mx.ones((2, 3), mx.uint32)))[0]
        assert best.tolist() == [11, 11, 11]


def test_chance_and_alignment_read_the_right_tokens() -> None:
    logits = random_logits(2, 4, VOCABULARY)
    for params in (P(temperature=0.9), P(temperature=0.9, top_k=5), P(temperature=0.9, top_p=0.8)):
        found = probabilities(logits, params, params)
        dense = found.dense(VOCABULARY)
        assert np.allclose(np.array(dense.sum(axis=-1)), 1, atol=1e-5)
        for token in range(0, VOCABULARY, 7):
            assert np.allclose(
                np.array(found.probability(mx.full((2, 4), token))), np.array(dense[..., token]), atol=1e-7
            )
        assert np.allclose(np.array(found.aligned(dense)), np.exp(np.array(found.logp)), atol=1e-7)


def test_no_stop_before_min_tokens() -> None:
    params = [P(min_tokens=3, max_tokens=10, stop_ids=[5, 9]), P(stop_ids=[5]), P(), P(min_tokens=1, stop_ids=[0])]
    rows = controls([SequenceParams(p, 0, 0, 10) for p in params], VOCABULARY)
    logits = random_logits(4, 3, VOCABULARY)
    for said in range(6):
        remaining = mx.broadcast_to(10 - said - mx.arange(3), (4, 3))  # the window's positions come one by one
        found = np.array(process_logits(logits, rows, mx.zeros((4, 3, 0), mx.int32), remaining))
        expected = np.array(logits)
        for w in range(3):
            if said + w < 3:
                expected[0, w, [5, 9]] = -np.inf
            if said + w < 1:
                expected[3, w, 0] = -np.inf
        assert np.array_equal(found, expected)


def test_nothing_is_drawn_where_everybody_takes_the_best_token() -> None:
    """Penalties on greedy sequences must not cost noise over the whole vocabulary."""
    logits = random_logits(2, 3, VOCABULARY)
    for params in (P(presence_penalty=1.0), P(temperature=0.8, top_k=1)):
        found = probabilities(logits, params, P())
        assert found.logp.shape == (2, 3, 1)
        assert found.ids is not None
        assert mx.array_equal(found.ids.squeeze(-1), mx.argmax(logits, axis=-1))
        assert mx.array_equal(found.dense(VOCABULARY).argmax(axis=-1), mx.argmax(logits, axis=-1))
