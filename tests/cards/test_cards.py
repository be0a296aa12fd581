"""Cards describe our models correctly, are found for theirs, and give way to the user's."""

import json
from pathlib import Path
from typing import get_args

import mlx.core as mx
import pytest

from checkpoints import write
from fixtures import generate
from headstart import cards, models
from headstart.cards.card import FamilyName
from headstart.checkpoint import load_model, read_layout, resolve
from headstart.checkpoint.hub import BUILTIN
from headstart.checkpoint.layout import original_id
from headstart.errors import CheckpointError

NAMES = [
    *("Qwen3.5-0.8B", "Qwen3.5-2B", "Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B"),
    *("Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B"),
    *("Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3.8-27B", "Qwen3.8-Flash-Next"),
    *("Qwen3-Next-80B-A3B-Instruct", "Qwen3-Next-80B-A3B-Thinking"),
]
DEEPSEEKS = ["DeepSeek-V4-Flash", "DeepSeek-V4-Pro"]
OTHERS = {"GLM-5.3-Flash": "zai-org/GLM-5.3-Flash"}
GEMMAS = [f"gemma-4-{size}-it" for size in ("12B", "26B-A4B", "31B", "E2B", "E4B")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cards."""
    folder = tmp_path / "config" / "cards"
    folder.mkdir(parents=True)
    monkeypatch.setattr("typer.get_app_dir", lambda name: str(tmp_path / "config"))
    return folder


def test_every_promised_model_has_a_card() -> None:
    known = {card.name: card for card in cards.all_cards()}
    assert sorted(known) == sorted([*NAMES, *DEEPSEEKS, *OTHERS, *GEMMAS, *(path.name for path in BUILTIN.iterdir())])
    for name in GEMMAS:
        assert (known[name].hub_id, known[name].drafter) == (f"google/{name}", f"google/{name}-assistant")
        assert known[name].native_mtp is None
    for name in DEEPSEEKS:
        card = known[name]
        assert card.hub_id == card.original == f"deepseek-ai/{name}"
        assert (card.context_length, card.native_mtp is None) == (1_048_576, False)
        assert card.sampling_defaults.params(thinking=True) == {"temperature": 1.0, "top_p": 1.0}
    for name, original in OTHERS.items():
        assert known[name].hub_id == known[name].original == original
        assert known[name].native_mtp
    for name in NAMES:
        card = known[name]
        assert card.hub_id == card.original == f"Qwen/{name}"
        assert card.native_mtp
        assert card.context_length == 262_144
    ids = [name for card in known.values() for name in card.names]
    assert len(ids) == len(set(ids))


def test_the_cards_of_the_builtin_models_agree_with_their_files() -> None:
    for path in BUILTIN.iterdir():
        layout = read_layout(path)
        card = layout.card
        assert card is not None
        assert (card.name, card.family) == (path.name, layout.family)
        assert card.native_mtp
        assert card.native_mtp.num_layers == layout.mtp.num_layers == models.head_modules(layout.config)
        assert card.context_length == models.text_config(layout.config)["max_position_embeddings"]
        says = json.loads((path / "generation_config.json").read_text())
        recommended = card.sampling_defaults.not_thinking
        assert recommended
        assert recommended.model_dump(exclude_none=True) == {k: says[k] for k in ("temperature", "top_p", "top_k")}


def test_cards_know_every_family() -> None:
    assert set(get_args(FamilyName)) == {family.name for family in models.FAMILIES.values()}


@pytest.mark.parametrize(
    ("ids", "folder_name", "family", "expected"),
    [
        (["Qwen/Qwen3.6-27B"], "abc123", "qwen3_5", "Qwen3.6-27B"),
        (["someone/quantised", "qwen/qwen3.6-27b"], "abc123", "qwen3_5", "Qwen3.6-27B"),
        ([None], "Qwen3.6-27B-4bit", "qwen3_5", "Qwen3.6-27B"),
        ([None], "qwen3.5-27b", "qwen3_5", "Qwen3.5-27B"),  # not Qwen3.5-2B
        ([None], "Qwen3.5-2B_mlx", "qwen3_5", "Qwen3.5-2B"),
        ([None], "Qwen3-Next-80B-A3B-Thinking-8bit", "qwen3_next", "Qwen3-Next-80B-A3B-Thinking"),
        ([None], "gemma-4-E2B-it-4bit", "gemma4", "gemma-4-E2B-it"),
        ([None], "tiny-qwen3.5-moe", "qwen3_5_moe", "tiny-qwen3.5-moe"),
        ([None], "Qwen3.6-27B-4bit", "qwen3_next", None),  # another family whatever its name
        ([None], "Qwen3.5-4Bits", "qwen3_5", None),
        ([None], "my-model", "qwen3_5", None),
    ],
)
def test_a_model_finds_its_card(ids: list[str | None], folder_name: str, family: str, expected: str | None) -> None:
    card = cards.match_card(ids, folder_name, family)
    assert (card.name if card else None) == expected


def test_a_folder_is_known_by_its_readme_or_its_name(tmp_path: Path) -> None:
    path = write(tmp_path / "Qwen3.5-9B-4bit", "dense", "stripped")
    layout = read_layout(path)
    assert layout.report()["card"] == "Qwen3.5-9B"
    assert original_id(path, layout.family) == "Qwen/Qwen3.5-9B"
    assert layout.mtp.reason
    assert "--from Qwen/Qwen3.5-9B" in layout.mtp.reason
    (path / "README.md").write_text("---\nbase_model: Qwen/Qwen3.6-27B\n---\n")
    assert read_layout(path).report()["card"] == "Qwen3.6-27B"


def test_a_card_of_the_user_goes_before_ours(folder: Path) -> None:
    (folder / "mine.toml").write_text(
        'name = "qwen3.6-27b"\nfamily = "qwen3_5"\n[native_mtp]\nnum_layers = 1\ndefault_k = 3\nmax_k = 4\n'
    )
    card = cards.find_card("Qwen3.6-27B")
    assert card
    assert card.native_mtp
    assert (card.native_mtp.default_k, card.hub_id) == (3, None)
    assert len(cards.all_cards()) == len(NAMES) + len(DEEPSEEKS) + len(OTHERS) + len(GEMMAS) + 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "mine.toml: not a model card"),
        ('name = "x"\n', "mine.toml: family: Field required"),
        ('name = "x"\nfamily = "gpt_oss"\n', "mine.toml: family: Input should be 'qwen3_5'"),
        ('name = "x"\nfamily = "qwen3_5"\nk = 2\n', "mine.toml: k: Extra inputs are not permitted"),
        (
            'name = "x"\nfamily = "qwen3_5"\n[native_mtp]\nnum_layers = 1\ndefault_k = 3\nmax_k = 2\n',
            "mine.toml: native_mtp: .*default_k 3 is above max_k 2",
        ),
        (
            'name = "x"\nfamily = "qwen3_5"\n[native_mtp]\nnum_layers = 1\ndefault_k = 3\nmax_k = 12\n',
            "mine.toml: native_mtp.max_k: Input should be less than or equal to 8",
        ),
        ('name = "x\udcff"\n', "mine.toml: not a model card"),  # a byte that is no UTF-8
    ],
)
def test_a_card_that_is_wrong_is_named(folder: Path, text: str, message: str) -> None:
    (folder / "mine.toml").write_text(text, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=message):
        cards.all_cards()


def test_a_name_of_a_card_is_a_model_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("headstart.checkpoint.hub.download", lambda repo, **parts: asked.append(repo))
    resolve("qwen3.6-27b")
    assert asked == ["Qwen/Qwen3.6-27B"]


# -- does the head draft?

CARD = cards.Card(name="x", family="qwen3_5", native_mtp=cards.NativeMtp(num_layers=1, default_k=3, max_k=5))


@pytest.mark.parametrize("environment", [{}, {"HEADSTART_MTP": "1"}])
def test_the_head_drafts_by_default(environment: dict[str, str]) -> None:
    by_card = cards.dispatch(CARD, promised=0, unusable=None, environment=environment)
    assert (by_card.drafts, by_card.k, by_card.max_k) == (True, 3, 5)
    by_config = cards.dispatch(None, promised=1, unusable=None, environment=environment)
    assert (by_config.drafts, by_config.k, by_config.max_k) == (True, 2, 8)
    insists = cards.dispatch(CARD, promised=1, unusable=None, environment={"HEADSTART_MTP": "0"}, mtp=True)
    assert insists.drafts


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"mtp": False}, "without the head"),
        ({"environment": {"HEADSTART_MTP": "0"}}, "HEADSTART_MTP"),
        ({"environment": {"HEADSTART_MTP": "false"}}, "HEADSTART_MTP"),
        ({"unusable": "no file holds it"}, "no file holds it"),
    ],
)
def test_one_who_opts_out_is_heard(how: dict[str, object], reason: str) -> None:
    decision = cards.dispatch(CARD, **{"promised": 1, "unusable": None, "environment": {}, **how})  # type: ignore[arg-type]
    assert (decision.drafts, decision.k, decision.max_k) == (False, 0, 0)
    assert decision.reason
    assert reason in decision.reason


def test_a_head_that_nobody_declared_does_not_draft() -> None:
    decision = cards.dispatch(None, promised=0, unusable=None, environment={})
    assert decision.reason == "neither the model card nor config.json declares an MTP head"


def test_the_environment_is_the_process_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_MTP", "0")
    assert not cards.dispatch(CARD, promised=1, unusable=None).drafts


def test_the_card_s_depths_reach_the_engine(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "mine", "dense")
    (folder / "mine.toml").write_text(
        'name = "mine"\nfamily = "qwen3_5"\n[native_mtp]\nnum_layers = 1\ndefault_k = 1\nmax_k = 3\n'
    )
    model = load_model(path, dtype=mx.float32)
    assert (model.default_k, model.max_k) == (1, 3)
    deep = generate(model, [1, 2, 3], k=8, max_tokens=12)
    assert deep.stats is not None
    assert (deep.stats.clamped_to, len(deep.stats.proposed_by_position)) == (3, 3)
    assert deep.stats.as_dict()["num_draft_tokens_clamped_to"] == 3
    within = generate(model, [1, 2, 3], k=2, max_tokens=12)
    assert within.stats is not None
    assert within.stats.clamped_to is None
    assert within.tokens == deep.tokens


@pytest.mark.parametrize("how", [{"mtp": False}, {}])
def test_a_head_that_nobody_wants_is_not_loaded(how: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_MTP", "0")
    assert not load_model("tiny-qwen3.5", **how).has_head
    assert load_model("tiny-qwen3.5", mtp=True).has_head
