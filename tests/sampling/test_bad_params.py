"""What cannot be honoured is refused before any work is done, by the name of its field."""

import math
from typing import Any

import pytest

from fixtures import random_model, submit
from headstart.engine import Engine
from headstart.errors import RequestError
from headstart.sampling import SamplingParams

NUMBERS = {  # a value that is right, and those just outside
    "max_tokens": (1, [0, -1]),
    "min_tokens": (0, [-1]),
    "temperature": (0.7, [-0.1, 100.1]),
    "top_n_sigma": (1.5, [-0.01, 2**31]),
    "top_p": (0.9, [-0.01, 1.01]),
    "min_p": (0.1, [-0.01, 1.01]),
    "min_tokens_to_keep": (1, [0, -3]),
    "xtc_probability": (0.5, [-0.1, 1.1]),
    "xtc_threshold": (0.1, [-0.1, 0.51]),
    "top_k": (20, [-1]),
    "repetition_penalty": (1.1, [-1, 0, 100.5]),
    "repetition_context_size": (20, [0, -1, 4097]),
    "presence_penalty": (0.5, [-100.5, 100.5]),
    "presence_context_size": (20, [0, 4097]),
    "frequency_penalty": (0.5, [-100.5, 100.5]),
    "frequency_context_size": (20, [0, 4097]),
    "top_logprobs": (0, [-1, 21]),
    "k": (3, [-1, 16]),
}
WHOLE = {"max_tokens", "min_tokens", "min_tokens_to_keep", "top_k", "top_logprobs", "k"} | {
    f"{kind}_context_size" for kind in ("repetition", "presence", "frequency")
}
NOT_NUMBERS = [True, False, math.nan, math.inf, -math.inf, "1", None, [1], 1j, 10**400]


def refused(field: str, **params: Any) -> str:
    with pytest.raises(RequestError, match=field) as error:
        SamplingParams(**params)
    return str(error.value)


@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_outside_its_range_is_refused(field: str) -> None:
    right, wrong = NUMBERS[field]
    assert getattr(SamplingParams(**{field: right}), field) == right  # type: ignore[arg-type]
    for value in wrong:
        assert str(value) in refused(field, **{field: value})


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda v: repr(v)[:8])
@pytest.mark.parametrize("field", NUMBERS)
def test_what_is_no_number_is_refused(field: str, value: Any) -> None:
    if value is None and field in ("presence_context_size", "frequency_context_size"):
        return  # all generated tokens
    refused(field, **{field: value})


@pytest.mark.parametrize("field", sorted(WHOLE))
def test_half_a_token_is_refused(field: str) -> None:
    refused(field, **{field: 1.5})
    refused(field, **{field: 2.0})  # it would be an index


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("seed", {"seed": "7"}),
        ("seed", {"seed": 1.5}),
        ("seed", {"seed": True}),
        ("seed", {"seed": 2**64}),
        ("seed", {"seed": -(2**63) - 1}),
        ("accept", {"accept": "exact"}),
        ("accept", {"accept": None}),
        ("logprobs", {"logprobs": "yes"}),
        ("logprobs", {"logprobs": 1}),
        ("stop", {"stop": "end"}),
        ("stop", {"stop": [""]}),
        ("stop", {"stop": [3]}),
        ("stop", {"stop": None}),
        ("stop", {"stop": ["x"] * 65}),
        ("stop", {"stop": ["x" * 257]}),
        ("stop_ids", {"stop_ids": list(range(65))}),
        ("stop_ids", {"stop_ids": ["5"]}),
        ("stop_ids", {"stop_ids": [1.5]}),
        ("stop_ids", {"stop_ids": [True]}),
        ("stop_ids", {"stop_ids": 5}),
        ("stop_ids", {"stop_ids": "5"}),
        ("xtc_special_tokens", {"xtc_special_tokens": ["a"]}),
        ("xtc_special_tokens", {"xtc_special_tokens": 3}),
        ("logit_bias", {"logit_bias": {3: 100.5}}),
        ("logit_bias", {"logit_bias": {3: math.nan}}),
        ("logit_bias", {"logit_bias": {3: "1"}}),
        ("logit_bias", {"logit_bias": {3: True}}),
        ("logit_bias", {"logit_bias": {"3": 1.0}}),
        ("logit_bias", {"logit_bias": {1.5: 1.0}}),
        ("logit_bias", {"logit_bias": [3, 1.0]}),
        ("logit_bias", {"logit_bias": None}),
        ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
    ],
)  # fmt: skip
def test_other_fields_are_refused_by_name(field: str, params: dict[str, Any]) -> None:
    refused(field, **params)


@pytest.mark.parametrize("accept", ["ratio", "optimistic"])
def test_a_seed_wants_the_coupled_rule(accept: str) -> None:
    message = refused("accept", seed=1, temperature=1.0, accept=accept)
    assert "seed" in message
    assert accept in message
    assert SamplingParams(seed=1, temperature=1.0).rule == "coupled"
    assert SamplingParams(seed=1, temperature=1.0, accept="coupled").rule == "coupled"


def test_contradictions_are_refused() -> None:
    assert "max_tokens" in refused("min_tokens", min_tokens=5, max_tokens=4)
    assert "logprobs" in refused("top_logprobs", top_logprobs=3)


@pytest.mark.parametrize("field", ["logit_bias", "stop_ids", "xtc_special_tokens"])
@pytest.mark.parametrize("token", [256, -1, 2**40])
def test_a_token_that_does_not_exist_is_refused_by_the_engine(field: str, token: int) -> None:
    engine = Engine(random_model())
    value = {token: 1.0} if field == "logit_bias" else [0, token]
    with pytest.raises(RequestError, match=rf"{field}.*{token}"):
        submit(engine, [1, 2, 3], **{field: value})
    assert not engine.run_once()  # nothing was queued


def test_the_rule_follows_from_what_is_asked() -> None:
    assert SamplingParams().rule == "coupled"  # greedy: its limit
    assert SamplingParams(temperature=1.0).rule == "ratio"
    assert SamplingParams(temperature=1.0, seed=0).rule == "coupled"
    assert SamplingParams(temperature=1.0, accept="optimistic").rule == "optimistic"
    assert SamplingParams(temperature=0.0, accept="ratio").rule == "coupled"


def test_a_refusal_names_the_value_and_the_range() -> None:
    assert "from 0 to 1" in refused("top_p", top_p=1.5)
    assert "whole number" in refused("top_k", top_k=2.5)
