"""/v1/cards: models on this machine and known ones, with reasons and without local folders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import CONTEXT, HUB_ID, folder, running

from headstart.cards import all_cards


@pytest.fixture(scope="module")
def told(cache: Path) -> Iterator[dict[str, Any]]:
    with running() as server, server.http() as http:
        response = http.get("/v1/cards")
        assert str(cache) not in response.text, "clients may be anywhere"
        assert response.status_code == 200
        yield response.json()


def on_disk(told: dict[str, Any], name: str) -> Any:
    return next(model for model in told["on_disk"] if model["id"] == name)


def test_our_models_are_listed_and_nobody_elses(told: dict[str, Any]) -> None:
    lost, torn = "mlx-community/Qwen3.5-0.8B-4bit", "someone/torn"
    assert [model["id"] for model in told["on_disk"]] == ["tiny-qwen3.5", "tiny-qwen3.5-moe", lost, HUB_ID, torn]


def test_what_is_loaded_is_marked_whatever_it_is_called(told: dict[str, Any]) -> None:
    assert [model["id"] for model in told["on_disk"] if model["loaded"]] == [HUB_ID]


def test_a_model_has_what_its_card_and_its_files_say(told: dict[str, Any]) -> None:
    builtin = on_disk(told, "tiny-qwen3.5")
    assert builtin["bytes"] > 10**6
    assert (builtin["problem"], builtin["family"], builtin["quantization"]) == (None, "qwen3_5", None)
    assert builtin["native_mtp"] == {"available": True, "default_k": 2, "max_k": 8, "reason": None}
    assert "text" in builtin["capabilities"]
    lost = on_disk(told, "mlx-community/Qwen3.5-0.8B-4bit")
    assert (lost["quantization"]["bits"], lost["quantization"]["group_size"]) == (4, 64)
    assert lost["context_length"] == 262144
    assert lost["capabilities"] == ["text", "vision", "thinking", "tools"]


def test_a_head_that_is_not_there_is_told_with_the_way_out(told: dict[str, Any]) -> None:
    head = on_disk(told, "mlx-community/Qwen3.5-0.8B-4bit")["native_mtp"]
    assert (head["available"], head["default_k"], head["max_k"]) == (False, 0, 0)
    way_out = "`headstart graft mlx-community/Qwen3.5-0.8B-4bit --from Qwen/Qwen3.5-0.8B`"
    assert head["reason"] == f"config.json promises an MTP head but no file holds it. {way_out} brings it back."


def test_a_model_that_cannot_be_loaded_says_why(told: dict[str, Any]) -> None:
    torn = on_disk(told, "someone/torn")
    assert torn["problem"].startswith("someone/torn/model-00001-of-00002.safetensors: is missing")
    assert not torn["native_mtp"]["available"]
    assert torn["bytes"] is None


def test_known_are_the_cards_of_what_is_not_here(told: dict[str, Any]) -> None:
    here = {"tiny-qwen3.5", "tiny-qwen3.5-moe", "Qwen3.5-0.8B"}
    assert {card["id"] for card in told["known"]} == {
        card.hub_id or card.name for card in all_cards() if card.name not in here
    }
    large = next(card for card in told["known"] if card["id"] == "Qwen/Qwen3.6-27B")
    assert large["native_mtp"] == {"available": True, "default_k": 2, "max_k": 5, "reason": None}
    assert (large["parameters"], large["family"]) == ("27B", "qwen3_5")


def test_no_client_learns_the_folder_of_a_model_that_cannot_draft() -> None:
    path = str(folder(False, CONTEXT))
    with running(head=False) as server, server.http() as http:
        body = {"prompt": "hi", "max_tokens": 2}
        told = [http.post("/v1/completions", json=body), *map(http.get, ("/v1/models", "/v1/mtp/stats", "/metrics"))]
        told += [http.post("/v1/completions", json=body | {"num_draft_tokens": 2})]
        told += [http.patch("/v1/settings", json={"max_k": 2})]
        for response in told:
            assert "headstart graft tiny" in response.text
            assert path not in response.text
