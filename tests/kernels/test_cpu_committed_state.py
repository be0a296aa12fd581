"""With native kernels the state after drafts and commits is bit for bit what decoding token by token makes."""

import random

import mlx.core as mx
import pytest

from fixtures import FAMILIES, random_model
from headstart.kernels import choose_backend
from headstart.kernels.cpu.backend import CpuBackend
from headstart.models import Model
from headstart.state import KV, BatchState

pytestmark = pytest.mark.skipif(not isinstance(choose_backend(), CpuBackend), reason="no CPU kernels here")
PROMPTS = (5, 19, 33)  # tokens of three sequences
ROUNDS = 6


def token_by_token(model: Model, tokens: list[int], prompt: int) -> tuple[mx.array, BatchState]:
    """Hiddens [T, H] of the tokens after the prompt, each in a pass of its own, and the state after them."""
    state = prefilled(model, tokens, prompt)
    hidden = []
    for token in tokens[prompt:]:
        hidden.append(model.trunk(mx.array([[token]]), state, certain=1))
        state.accepted = mx.zeros((1,), mx.int32)
        state.commit(mx.array([1], mx.int32), most=1)
    return mx.concatenate(hidden, axis=1)[0], state


def prefilled(model: Model, tokens: list[int], prompt: int) -> BatchState:
    state = model.make_state(1)
    model.trunk(mx.array([tokens[:prompt]]), state, certain=prompt)
    state.commit(mx.array([prompt], mx.int32), most=prompt)
    return state


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_after_drafts_is_that_of_decoding_token_by_token(family: str, dtype: mx.Dtype) -> None:
    model, rng = random_model(family, seed=70 + (dtype == mx.float32)), random.Random(1)
    model.weights.set_dtype(dtype)
    vocabulary = model.vocabulary
    texts = [[rng.randrange(vocabulary) for _ in range(prompt + 5 * ROUNDS + 21)] for prompt in PROMPTS]
    read = list(PROMPTS)  # tokens of each sequence that are committed
    batch = prefilled(model, texts[0], PROMPTS[0])
    for text, prompt in zip(texts[1:], PROMPTS[1:], strict=True):
        batch.join(prefilled(model, text, prompt))
    hidden: list[list[mx.array]] = [[], [], []]
    for k in [rng.randrange(5) for _ in range(ROUNDS)] + [15, 0]:  # the last pass folds what is pending
        accepted = [rng.randint(0, k) for _ in PROMPTS]
        window = []
        for text, at, right in zip(texts, read, accepted, strict=True):
            drafts = text[at + 1 : at + 1 + right]
            wrong = [(token + 1) % vocabulary for token in text[at + 1 + right : at + 1 + k]]
            window.append([text[at], *drafts, *wrong])
        made = model.trunk(mx.array(window), batch, certain=1)
        batch.accepted = mx.array(accepted, mx.int32)
        batch.commit(batch.accepted + 1, most=k + 1)
        mx.eval(made, batch.arrays())  # what is not needed any more is written over
        for row, right in enumerate(accepted):
            hidden[row].append(made[row, : right + 1])
            read[row] += right + 1

    for row, (text, prompt) in enumerate(zip(texts, PROMPTS, strict=True)):
        expected, alone = token_by_token(model, text[: read[row]], prompt)
        assert mx.array_equal(mx.concatenate(hidden[row]), expected)
        for mine, theirs in zip(batch.layers, alone.layers, strict=True):
            if isinstance(mine, KV):
                assert isinstance(theirs, KV)
                assert mx.array_equal(mine.keys[row, :, : read[row]], theirs.keys[0, :, : read[row]])
                assert mx.array_equal(mine.values[row, :, : read[row]], theirs.values[0, :, : read[row]])
            else:
                assert not isinstance(theirs, KV)
                assert mx.array_equal(mine.state[row], theirs.state[0])
                assert mx.array_equal(mine.conv[row], theirs.conv[0])
