"""`HeadSpec` is general: a made-up family with everything wired the other way runs through the same loop."""

from copy import copy
from dataclasses import replace
from itertools import product

import mlx.core as mx
import pytest

from fixtures import assert_greedy, batch_of, generate, random_model, random_prompt
from headstart.engine.draft import head_drafts as draft
from headstart.engine.step import step
from headstart.models import Head, HeadSpec, Model, Weights, use_float32_norms

SPECS = [
    HeadSpec(embedding_first=False, own_lm_head=True, fed_after_norm=fed, chains_after_norm=chains)
    for fed, chains in product([True, False], repeat=2)
]


def made_up(spec: HeadSpec, modules: int) -> Model:
    """A dense model whose head is wired by `spec`, with weights under which every wiring matters."""
    model = random_model.__wrapped__("dense", mtp_num_hidden_layers=modules)  # our own: its norms are changed here
    old, lm_head, H = model.weights.mtp, model.weights.lm_head.weight, 64
    mtp = Head(spec, old.layers, H, model.vocabulary, model.config["rms_norm_eps"])
    use_float32_norms(mtp)
    keys = iter(mx.random.split(mx.random.key(0), 8))
    for norm in (model.weights.norm, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm):
        norm.weight = mx.random.uniform(0.2, 2.0, (H,), key=next(keys))
    # As much of the first half of its input as of the second, so it matters which is the hidden.
    noise = mx.random.normal((H, 2 * H), key=next(keys)) / H**0.5
    mtp.fc.weight = mx.concatenate([mx.eye(H), mx.eye(H)], axis=1) + 0.5 * noise
    if spec.own_lm_head:
        mtp.lm_head.weight = lm_head + 0.2 * mx.random.normal(lm_head.shape, key=next(keys))
    weights = Weights(model.family.text(model.lm), model.weights.lm_head, mtp)
    return replace(model, family=replace(model.family, head=spec), weights=weights)


def trunk_hidden(model: Model, tokens: mx.array) -> mx.array:
    """[1, T, H] before the final norm, by mlx-lm's own layers."""
    x = model.weights.embed_tokens(tokens)
    for layer in model.weights.layers:
        x = layer(x, None if layer.is_linear else "causal", None)
    return x


def plain_chain(model: Model, tokens: list[int], k: int) -> list[int]:
    """k drafts after `tokens`, by definition: no cache, every module over its whole input again for every draft."""
    spec, mtp, norm = model.family.head, model.weights.mtp, model.weights.norm

    def pair(hidden: mx.array, token: mx.array) -> mx.array:
        embedding = mtp.pre_fc_norm_embedding(model.weights.embed_tokens(token))
        hidden = mtp.pre_fc_norm_hidden(hidden)
        return mtp.fc(mx.concatenate([embedding, hidden] if spec.embedding_first else [hidden, embedding], axis=-1))

    def run(module: int, hidden: mx.array, following: list[int]) -> tuple[mx.array, int]:
        """What the module hands on, [1, T, H], and its draft."""
        before = mtp.layers[module](pair(hidden, mx.array([following])), "causal", None)
        after = mtp.norm(before)
        logits = (mtp.lm_head if spec.own_lm_head else model.weights.lm_head)(after[:, -1])
        return after if spec.chains_after_norm else before, int(mx.argmax(logits).item())

    x = trunk_hidden(model, mx.array([tokens[:-1]]))
    hidden = outputs = norm(x) if spec.fed_after_norm else x
    following, drafts, last = tokens[1:], list[int](), len(mtp.layers) - 1
    for j in range(k):
        if j <= last:  # module j over all positions, with the token that is j further on
            hidden = outputs if spec.chained else hidden
            following = [*following[1:], drafts[-1]] if j else following
        else:  # the last goes on alone
            hidden = mx.concatenate([hidden, outputs[:, -1:]], axis=1)
            following = [*following, drafts[-1]]
        outputs, token = run(min(j, last), hidden, following)
        drafts.append(token)
    return drafts


@pytest.mark.parametrize("spec", [HeadSpec(), *SPECS], ids=str)
def test_drafts_of_one_module_are_the_plain_computation(spec: HeadSpec) -> None:
    model = made_up(spec, modules=1)
    for seed in range(4):
        prompt = random_prompt(model, 9 + 4 * seed, seed)
        drafts = draft(model, batch_of(model, prompt), 8).tokens
        assert drafts[0].tolist() == plain_chain(model, prompt, 8)


@pytest.mark.parametrize(
    ("modules", "chained"), [pytest.param(1, True, marks=pytest.mark.slow), (3, True), (3, False)]
)
def test_drafts_of_ragged_sequences_are_the_plain_computation_after_every_round(modules: int, chained: bool) -> None:
    """Sequences catch up by different counts, after accepted and rejected drafts, and after a pause."""
    model = made_up(HeadSpec(chained=chained), modules)
    sequences = [random_prompt(model, length, length) for length in (2, 9, 14)]
    batch = batch_of(model, *sequences)
    accepted = set()
    for k in (3, 8, 1, 0, 0, 4, 2):
        round = step(model, batch, k)
        for sequence, tokens, n in zip(
            sequences, round.verdict.tokens.tolist(), round.verdict.accepted.tolist(), strict=True
        ):
            sequence += tokens[: n + 1]
        accepted |= {tuple(round.verdict.accepted.tolist())}
        if k:
            again = copy(batch)  # drafting moves the head on, which the next round shall not see
            again.head_state = copy(batch.head_state)
            again.head_state.layers = [copy(memory) for memory in batch.head_state.layers]
            drafts = draft(model, again, 5).tokens.tolist()
            assert drafts == [plain_chain(model, sequence, 5) for sequence in sequences]
    assert any(len(set(counts)) > 1 for counts in accepted)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_drafts_of_two_modules_are_the_plain_computation(spec: HeadSpec) -> None:
    model = made_up(spec, modules=2)
    for seed in range(4):
        prompt = random_prompt(model, 9 + 4 * seed, seed)
        drafts = draft(model, batch_of(model, prompt), 5).tokens
        assert drafts[0].tolist() == plain_chain(model, prompt, 5)


@pytest.mark.slow  # of the tests above alone
def test_no_two_wirings_draft_the_same() -> None:
    """Else the tests above would show nothing."""
    every = [HeadSpec(*bits) for bits in product([True, False], repeat=4)]
    models = [made_up(spec, modules=1) for spec in every]
    prompts = [random_prompt(models[0], 12, seed) for seed in range(4)]
    assert len({str([plain_chain(model, prompt, 8) for prompt in prompts]) for model in models}) == len(every)


@pytest.mark.parametrize(
    ("spec", "modules"),
    [
        pytest.param(spec, modules, marks=[] if (n, modules) in ((0, 1), (1, 2)) else pytest.mark.slow)
        for n, spec in enumerate(SPECS)
        for modules in (1, 2)
    ],
    ids=str,
)
def test_greedy_output_is_the_same_for_every_wiring(spec: HeadSpec, modules: int) -> None:
    model = made_up(spec, modules)
    prompt = random_prompt(model, 12)
    plain = generate(model, prompt, max_tokens=24, k=0).tokens
    assert_greedy(model, prompt, plain)
    for k in (1, 2, 3, 8):
        answer = generate(model, prompt, max_tokens=24, k=k)
        assert answer.tokens == plain
        assert answer.stats.accepted_draft_tokens > 0
