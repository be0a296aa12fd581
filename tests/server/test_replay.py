"""Saved answers are decoded again, by the server that gave them and by another; what was changed is found."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Running, folder, running, tiny, wait_until
from typer.testing import CliRunner, Result

from headstart.cli.main import app
from headstart.server import fingerprint
from headstart.server.fingerprint import Fingerprint

HELLO = [{"role": "user", "content": "Hello there"}]
CHAT = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["red", "blue"]}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False
TOOL = {"name": "paint", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
MESSAGE = {"messages": HELLO, "max_tokens": 80, "seed": 5}
RESPONSE = {"input": "Hello", "max_output_tokens": 80, "temperature": 0}
RECEIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": HELLO, "max_tokens": 40, "seed": 7, "temperature": 0.8}),
    "schema": (CHAT, {"messages": HELLO, "max_tokens": 60, "temperature": 0, "json_schema": SCHEMA}),
    "tools": (
        CHAT,
        {"messages": HELLO, "max_tokens": 80, "temperature": 0, "tool_choice": "required",
         "tools": [{"type": "function", "function": TOOL}]},
    ),
    "completion": ("/v1/completions", {"prompt": "Hello", "max_tokens": 40, "seed": 3, "temperature": 1, "n": 2}),
    "completion, schema": ("/v1/completions", {"prompt": "A", "seed": 3, "max_tokens": 60, "json_schema": SCHEMA}),
    "message": ("/v1/messages", {"messages": HELLO, "max_tokens": 40, "seed": 5}),
    "message, schema": ("/v1/messages", MESSAGE | {"output_config": {"format": FORMAT}}),
    "message, tools": (
        "/v1/messages",
        MESSAGE | {"tool_choice": {"type": "any"}, "tools": [{"name": "paint", "input_schema": SCHEMA}]},
    ),
    "response": ("/v1/responses", {"input": "Hello", "max_output_tokens": 40, "seed": 5, "temperature": 1}),
    "response, schema": ("/v1/responses", RESPONSE | {"text": {"format": FORMAT | {"name": "colour"}}}),
    "response, tools": (
        "/v1/responses", RESPONSE | {"tool_choice": "required", "tools": [{"type": "function", **TOOL}]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Running, Running]]:
    with running() as one, running() as other:
        yield one, other


def save(server: Running, path: Path, kind: str, **changed: Any) -> dict[str, Any]:
    endpoint, request = RECEIPTS[kind]
    with server.http() as http:
        response = http.post(endpoint, json=request)
    assert response.status_code == 200, response.text
    receipt = {"request": request | changed, "response": response.json()}
    path.write_text(json.dumps(receipt))
    return receipt


def replay(server: Running, path: Path) -> Result:
    return CliRunner().invoke(app, ["replay", str(path), "--url", server.url])


@pytest.mark.parametrize("kind", RECEIPTS)
def test_an_answer_is_the_same_from_one_server_and_another(
    servers: tuple[Running, Running], tmp_path: Path, kind: str
) -> None:
    receipt = save(servers[0], path := tmp_path / "receipt.json", kind)
    usage = receipt["response"]["usage"]
    for server in servers:
        result = replay(server, path)
        count = usage.get("completion_tokens") or usage["output_tokens"]
        assert (result.exit_code, result.stdout) == (0, f"the same {count} tokens, 3 times\n")


def test_what_was_changed_is_found(servers: tuple[Running, Running], tmp_path: Path) -> None:
    receipt = save(servers[0], path := tmp_path / "receipt.json", "chat")
    message = receipt["response"]["choices"][0]["message"]
    message["content"] = message["content"][:5] + "?" + message["content"][6:]
    path.write_text(json.dumps(receipt))
    result = replay(servers[0], path)
    assert result.exit_code == 1
    assert "choices[0].message.content parts after 5 characters" in result.stdout
    stats = receipt["response"]["generation_stats"]
    stats["system_fingerprint"] = "b00000000" + stats["system_fingerprint"][9:]
    path.write_text(json.dumps(receipt))
    assert "differ in the model's files (00000000, " in replay(servers[0], path).stdout


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"seed": None}, "neither a seed nor the temperature 0"),
        ({"previous_response_id": "resp_1"}, "whole conversations"),
        ({"top_p": 5}, "refuses the request"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    servers: tuple[Running, Running], tmp_path: Path, changed: dict[str, Any], problem: str
) -> None:
    save(servers[0], path := tmp_path / "receipt.json", "chat", **changed)
    result = replay(servers[0], path)
    assert result.exit_code == 1
    assert problem in result.stderr
    path.write_text('{"request": 5}')
    assert "holds no" in replay(servers[0], path).stderr


def text_of(model: Path) -> str:
    found = Fingerprint([model], tiny(True, 4096))
    wait_until(lambda: found.text)
    assert found.text is not None
    return found.text


def test_a_fingerprint_says_which_part_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = text_of(folder(True, 4096))
    assert text_of(folder(True, 4096)) == same
    moved = Path(shutil.copytree(folder(True, 4096), tmp_path / "model"))
    assert text_of(moved) == same
    weights = next(moved.glob("*.safetensors"))
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert [a == b for a, b in zip(text_of(moved).split("-"), same.split("-"), strict=True)] == [False, True, True]
    root = Path(fingerprint.__file__).parents[1]
    for package in fingerprint.PACKAGES:
        shutil.copytree(root / package, tmp_path / "source" / package)
    assert fingerprint.sources_part(tmp_path / "source") == fingerprint.sources_part()
    kernel = next((tmp_path / "source").rglob("*.cu"))
    kernel.write_text(kernel.read_text() + " ")
    monkeypatch.setattr(fingerprint, "sources_part", lambda: fingerprint._digest(iter([kernel])))
    again = text_of(folder(True, 4096))
    assert [a == b for a, b in zip(again.split("-"), same.split("-"), strict=True)] == [True, False, True]
