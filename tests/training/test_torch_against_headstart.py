"""The PyTorch model, headstart and the recorded outputs agree on the shipped weights."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install -e '.[training]'")

import headstart  # noqa: E402
from fixtures import builtin_model  # noqa: E402
from training import export  # noqa: E402
from training.evaluate import _chains  # noqa: E402
from training.model import Net  # noqa: E402
from training.reference import drafts, greedy, record, routed  # noqa: E402
from training.shapes import SHAPES  # noqa: E402

BUILTIN = Path(headstart.__file__).parent / "builtin"
REFERENCE = Path(__file__).parents[1] / "reference"
NAMES = pytest.mark.parametrize("name", SHAPES)


@lru_cache
def net(name: str) -> Net:
    return export.load(BUILTIN / name, SHAPES[name])


@lru_cache
def recorded(name: str) -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = json.loads((REFERENCE / f"{name}-reference.json").read_text())["prompts"]
    return prompts


@NAMES
def test_logits_and_drafts_are_headstarts(name: str) -> None:
    prompt = recorded(name)[0]
    ids = prompt["prompt_ids"] + prompt["greedy_ids"]
    model, steps, starts = builtin_model(name, mx.float32), 6, [3, 17, 40]
    hidden = model.trunk(mx.array([ids]), model.make_state(1), certain=len(ids))
    ours = list(_chains(model, hidden, mx.array([ids]), mx.array(starts), steps))
    with torch.no_grad():
        embedded = net(name).embed(torch.tensor([ids]))
        theirs = net(name).model(embedded, [])
        chains = net(name).mtp.unroll(embedded, theirs[:, :60], torch.tensor(starts), steps, [])
        logits = net(name).logits(theirs)
        drafted = [net(name).logits(x[:, starts] if j == 0 else x)[0] for j, x in enumerate(chains)]
    assert np.abs(np.array(model.logits(hidden)) - logits.numpy()).max() < 1e-3
    for ours_j, theirs_j in zip(ours, drafted, strict=True):
        assert np.abs(np.array(ours_j) - theirs_j.numpy()).max() < 1e-3


@NAMES
def test_greedy_tokens_and_drafts_are_the_recorded_ones(name: str) -> None:
    for prompt in recorded(name)[:2]:
        said, margins, first = greedy(net(name), prompt["prompt_ids"])
        assert said == prompt["greedy_ids"]
        assert np.allclose(margins, prompt["greedy_margins"], atol=1e-3)
        assert first[prompt["first_step_top5"]["ids"]].tolist() == pytest.approx(
            prompt["first_step_top5"]["logits"], abs=1e-3
        )
        ids = prompt["prompt_ids"] + said
        with torch.no_grad():
            hidden = net(name).model(net(name).embed(torch.tensor([ids])), [])
        for d in (0, 7, 15):
            chain, _ = drafts(net(name), ids, hidden, len(prompt["prompt_ids"]) - 1 + d, 3)
            assert chain == prompt["mtp_drafts"][d]


def test_the_recorded_experts_are_chosen() -> None:
    prompt = recorded("tiny-qwen3.5-moe")[0]
    assert routed(net("tiny-qwen3.5-moe"), prompt["prompt_ids"])["router_topk"] == prompt["router_topk"]


def test_a_new_record_is_the_recorded_one() -> None:
    from tokenizers import Tokenizer

    name = "tiny-qwen3.5-moe"
    prompt = recorded(name)[1]
    tokenizer = Tokenizer.from_file(str(BUILTIN / name / "tokenizer.json"))
    made = record(net(name), tokenizer, prompt["text"], greedy(net(name), prompt["prompt_ids"]))
    for field in ("prompt_ids", "greedy_ids", "greedy_text", "mtp_drafts"):
        assert made[field] == prompt[field]


@NAMES
def test_what_is_exported_is_what_was_loaded_to_the_last_bit(name: str, tmp_path: Path) -> None:
    export.save(net(name), tmp_path)
    shipped = json.loads((BUILTIN / name / "config.json").read_text())
    assert json.loads((tmp_path / "config.json").read_text()) == shipped
    before, after = (
        {k: w for f in folder.glob("*.safetensors") for k, w in mx.load(str(f)).items()}
        for folder in (BUILTIN / name, tmp_path)
    )
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[key], after[key]) for key in before)
