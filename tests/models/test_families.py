"""Families beside Qwen3.5's: a release of each loads, and decodes like mlx-lm whatever is drafted or batched."""

import tempfile
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model as mlx_lm_load

from families import CONFIGS, write_family
from fixtures import collect, generate, random_prompt, submit
from headstart.checkpoint import load_model
from headstart.engine import Engine
from headstart.models import Model
from headstart.state import PrefixCache


@lru_cache
def loaded(family: str) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        return load_model(write_family(Path(folder), family), dtype=mx.float32)


def trunk(model: Model, tokens: mx.array) -> mx.array:
    return model.trunk(tokens, model.make_state(tokens.shape[0]), certain=tokens.shape[1])


@pytest.mark.parametrize("family", CONFIGS)
def test_trunk_logits_are_those_of_mlx_lms_own_loader_to_rounding(family: str, tmp_path: Path) -> None:
    theirs, _ = mlx_lm_load(write_family(tmp_path, family))
    model = loaded(family)
    tokens = mx.array([random_prompt(model, 40, seed) for seed in range(2)])
    ours, expected = model.logits(trunk(model, tokens)), theirs(tokens)
    assert mx.abs(ours - expected).max() < 2e-5 * mx.abs(expected).max()


@pytest.mark.parametrize("family", CONFIGS)
def test_output_is_the_same_for_every_k_batch_and_prefix(family: str) -> None:
    """Greedy and seeded; sequences join and leave, and a prompt of two chunks is found in the prefix cache."""
    model = loaded(family)
    prompts = [random_prompt(model, length, length) for length in (5, 11, 520, 520)]
    prompts[3] = prompts[2]
    kinds = [{}, {"temperature": 0.8, "seed": 3}, {}, {"temperature": 0.8, "seed": 4}]
    plain = [generate(model, p, max_tokens=16, k=0, **kind).tokens for p, kind in zip(prompts, kinds, strict=True)]
    for k in (1, 2, 3, 4) if model.has_head else (0, "auto"):
        engine = Engine(model, max_sequences=3, prefix=PrefixCache(10**8))
        handles = [
            submit(engine, prompt, max_tokens=16 - 3 * n, k=k, **kind)
            for n, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
        ]
        answers = [collect(handle) for handle in handles]
        for n, (answer, expected) in enumerate(zip(answers, plain, strict=True)):
            assert answer.tokens == expected[: 16 - 3 * n], (k, n)
            assert answer.stats.exact
        assert answers[3].stats.prefix_cache_hit == 512
