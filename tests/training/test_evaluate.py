"""The figures of the models' pages, by headstart itself."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from checkpoints import write_drafter
from fixtures import builtin_model, random_model, random_prompt
from headstart.checkpoint import resolve
from training import evaluate_drafter
from training.evaluate import Evaluation, Greedy, RealText, _chains, loops, read, table
from training.held_out import held_out

REFERENCE = Path(__file__).parents[1] / "reference"


def test_chains_over_a_text_draft_what_was_recorded() -> None:
    model = builtin_model("tiny-qwen3.5-moe", mx.float32)
    for prompt in json.loads((REFERENCE / "tiny-qwen3.5-moe-reference.json").read_text())["prompts"][:3]:
        for d in (0, 7, 15):
            committed, drafts = prompt["prompt_ids"] + prompt["greedy_ids"][: d + 1], prompt["mtp_drafts"][d]
            ids = mx.array([[*committed, *drafts, 0]])  # a text that goes on as drafted
            hidden = model.trunk(ids, model.make_state(1), certain=ids.shape[1])
            chain = _chains(model, hidden, ids, mx.array([len(committed) - 2]), len(drafts))
            assert [int(mx.argmax(drafted[0])) for drafted in chain] == drafts


def test_a_chain_is_the_same_alone_and_beside_others() -> None:
    model = random_model("moe")
    ids = mx.array([random_prompt(model, 50)])
    hidden = model.trunk(ids, model.make_state(1), certain=50)
    together = list(_chains(model, hidden, ids, mx.array([5, 20, 31]), 4))
    for i, start in enumerate((5, 20, 31)):
        alone = list(_chains(model, hidden, ids, mx.array([start]), 4))
        for many, one in zip(together, alone, strict=True):
            assert mx.array_equal(many[i], one[0])


def test_a_text_loops_where_few_kinds_of_tokens_fill_a_long_stretch() -> None:
    straight = list(range(160))
    assert not loops(straight)
    assert loops(straight[:70] + [1, 2, 3, 4] * 20)
    assert not loops([1, 2, 3, 4] * 10 + straight)  # it came out of it


def test_a_random_model_reads_as_badly_as_chance() -> None:
    model = random_model("dense")
    found = read(model, [random_prompt(model, 120, seed) for seed in range(3)], k=3)
    assert found.tokens == 3 * 119
    assert found.chains == 3 * 14
    chance = float(mx.log(mx.array(float(model.vocabulary))))
    assert all(loss > chance - 1 for loss in found.loss)


def test_what_stands_in_an_empty_thought_is_no_loss() -> None:
    model = random_model("dense")
    text = random_prompt(model, 60)
    text[20:23] = [opened, empty, closed] = 5, 6, 7
    whole, without = (read(model, [text], 2, thoughts).loss[0] for thoughts in (None, (opened, closed)))
    hidden = model.trunk(mx.array([text]), model.make_state(1), certain=60)
    of_it = -mx.log(mx.softmax(model.logits(hidden)[0, 20].astype(mx.float32)))[empty].item()
    assert abs(59 * whole - (58 * without + of_it)) < 1e-2
    assert read(model, [text], 2, (opened, closed + 1)).loss == read(model, [text], 2).loss


def test_the_table_has_a_line_for_each_kind_and_figure() -> None:
    real = RealText([2.0, 2.5], [0.6, 0.75], 100, 10)
    found = {kind: Evaluation(real, Greedy(0, None), Greedy(0, None)) for kind in ("code", "chat")}
    lines = table("tiny", found).splitlines()
    assert "| code | loss, nats per token | 2.000 | 2.500 |" in lines
    assert "| chat | agreement on real text | 60.0% | 75.0% |" in lines


def test_the_held_out_texts_are_there_with_their_licences() -> None:
    texts = held_out()
    assert len(texts.code) == 48
    assert len({chat.package for chat in texts.chats}) == 6


@pytest.mark.slow
def test_a_drafter_is_measured_beside_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = write_drafter(tmp_path / "mine", resolve("tiny-qwen3.5"), layers=(0, 1))
    monkeypatch.setattr(evaluate_drafter, "ANSWER", 16)
    monkeypatch.setattr("sys.argv", ["", str(drafter), "--texts", "1", "--repeats", "1"])
    evaluate_drafter.main()
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    expected = [["| " + kind, drafts] for kind in ("code", "chat") for drafts in ("k = 0", "head", "mine")]
    assert [line[:2] for line in lines] == expected
    assert [line[3] for line in lines if line[1] == "head"] == ["1.00", "1.00"]
