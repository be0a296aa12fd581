"""A DFlash drafter drafts what transformers and mlx-vlm draft, and its caches follow what the trunk commits."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from checkpoints import write, write_drafter
from headstart.checkpoint import load_model
from headstart.engine.draft import block_drafts
from headstart.engine.step import prefill_prompts
from headstart.models import Model
from headstart.models.dflash import block_mask

RECORDED = json.loads((Path(__file__).parents[1] / "reference/dflash.json").read_text())


def tiny_pair(place: Path, **fields: Any) -> Model:
    target = write(place / "target", dtype=mx.float32)
    return load_model(target, drafter=write_drafter(place / "drafter", target, dtype=mx.float32, **fields))


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        ("transformers", {}),
        ("mlx-vlm", {"flat": True}),
        ("mlx-vlm, DFlash2", {"second": True}),
    ],
)
def test_both_rounds_draft_what_others_draft(other: str, fields: Any, tmp_path: Path) -> None:
    model, prompt = tiny_pair(tmp_path, **fields), RECORDED["prompt"]
    batch = prefill_prompts(model, [prompt], max_k=15)
    for expected in RECORDED[other]:
        logits, _ = model.block_logits(batch.last, 15, batch.trunk_state)
        assert mx.allclose(logits[0, mx.array([0, -1])], mx.array(expected["logits"]), rtol=0, atol=2e-4)
        assert block_drafts(model, batch, 15).tokens[0].tolist() == expected["drafts"]
        # The block's own entries are overwritten by the pass that verifies, and the rejected ones by the next.
        window, accepted = RECORDED["window"], RECORDED["accepted"]
        model.trunk(mx.array([[int(batch.last[0]), *window]]), batch.trunk_state, certain=1)
        batch.trunk_state.accepted = mx.array([accepted])
        batch.trunk_state.commit(mx.array([accepted + 1]), most=len(window) + 1)
        batch.last = mx.array([window[accepted]])


def test_sequences_of_a_batch_draft_as_alone(tmp_path: Path) -> None:
    model, lengths = tiny_pair(tmp_path, kinds=("full_attention", "sliding_attention")), (3, 11, 7)
    tokens = mx.array([[(11 * row + 7 * n) % 255 for n in range(12)] for row in range(3)])
    together = model.make_state(3)
    model.trunk(tokens, together, certain=12)
    together.commit(mx.array(lengths), most=12)
    drafts, _ = model.block_logits(tokens[:, 0], 5, together)
    for row, length in enumerate(lengths):
        alone = model.make_state(1)
        model.trunk(tokens[row : row + 1, :length], alone, certain=length)
        alone.commit(mx.array([length]), most=length)
        logits, _ = model.block_logits(tokens[row : row + 1, 0], 5, alone)
        assert mx.allclose(logits[0], drafts[row], atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, lambda q, k, end: k < end),  # full: the context, and all of the block
        ({"kinds": ("sliding_attention",) * 2}, lambda q, k, end: q - 6 < k <= q),  # released ones are causal
        ({"kinds": ("sliding_attention",) * 2, "is_causal": False}, lambda q, k, end: abs(q - k) < 6 and k < end),
    ],
)
def test_every_kind_of_layer_sees_what_it_was_trained_to_see(fields: Any, seen: Any, tmp_path: Path) -> None:
    drafter = tiny_pair(tmp_path, **fields).drafter
    assert drafter is not None
    positions = list(range(9, 13))
    mask = block_mask(mx.array([positions]), 20, drafter.spec.causal[0], drafter.spec.windows[0])
    assert mask[0, 0].tolist() == [[seen(q, k, 13) for k in range(20)] for q in positions]
