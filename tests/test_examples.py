"""The examples run, and do what their docstrings promise."""

import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(ROOT / "tests/server")


def test_a_program_for_mlx_lm_runs(capsys: pytest.CaptureFixture[str]) -> None:
    import_module("from_mlx_lm").main("Write a Python function that reads a JSON file and returns its contents.")
    told = capsys.readouterr().out
    assert "def reads(self, path: str) -> bytes:" in told
    assert "46 tokens, " in told
    assert " tokens per round, " in told


def test_it_differs_from_one_for_mlx_lm_by_its_import() -> None:
    """mlx-lm has everything else that the program takes from the responses and the tokenizer."""
    source = (EXAMPLES / "from_mlx_lm.py").read_text()
    theirs = "\n".join(line.removeprefix("# ") for line in source.splitlines() if "import load" in line)
    assert theirs == "from mlx_lm import load, stream_generate\nfrom headstart import load, stream_generate"


def test_a_chat_streams_from_a_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter(["Write a function.", "And another one."])
    monkeypatch.setattr("builtins.input", lambda prompt: next(asked, ""))
    client = import_module("chat_client")
    monkeypatch.setattr(client, "MAX_TOKENS", 20)
    with import_module("running").running() as here:
        client.main(f"{here.url}/v1")
        assert here.metric("headstart_requests_total", endpoint="/v1/chat/completions", outcome="length") == 2
    assert capsys.readouterr().out.count(" tokens per round, ") == 2


def test_a_backend_counts_what_it_multiplies(capsys: pytest.CaptureFixture[str]) -> None:
    backend = import_module("custom_backend").main()
    shape, count = backend.counted.most_common(1)[0]
    assert f"{count} products with {shape[0]} × {shape[1]}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_structured_answer_is_of_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module("structured")
    signature = module.main()
    assert isinstance(signature, module.Signature)
    assert str(signature) in capsys.readouterr().out


@pytest.mark.slow
def test_a_batch_answers_every_prompt_by_its_own_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    module: Any = import_module("batch")
    texts = module.main()
    assert len(texts) == len(module.TASKS) == 4
    assert all(texts)
    assert "return" not in texts[3]
    told = [line for line in capsys.readouterr().out.splitlines() if "tokens per round" in line]
    assert told[2].endswith(" 1.00 tokens per round")  # k = 0
    assert any(not line.endswith(" 1.00 tokens per round") for line in told)


def test_a_fastapi_application_streams_answers_from_one_batch() -> None:
    """A real uvicorn and real connections: three clients at once get what each gets alone."""
    uvicorn, httpx = import_module("uvicorn"), import_module("httpx")
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(import_module("fastapi_app").app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/generate"
        bodies = [{"question": f"Write a Python function that adds {n} numbers.", "max_tokens": 12} for n in range(3)]

        def ask(body: dict[str, Any]) -> list[str]:
            with httpx.stream("POST", url, json=body, timeout=120) as response:
                assert response.status_code == 200
                return list(response.iter_text())

        alone = [ask(body) for body in bodies]
        with ThreadPoolExecutor() as pool:
            together = list(pool.map(ask, bodies))
    finally:
        server.should_exit = True
        thread.join()
    assert ["".join(pieces) for pieces in together] == ["".join(pieces) for pieces in alone]
    assert all("def " in "".join(pieces) and len(pieces) > 1 for pieces in alone)


@pytest.mark.slow
def test_a_family_of_ones_own_is_driven_by_the_same_loop(capsys: pytest.CaptureFixture[str]) -> None:
    from headstart.models import FAMILIES

    try:
        plain, drafted = import_module("custom_family").main()
    finally:
        FAMILIES.pop("my_family", None)
        sys.modules.pop("custom_family", None)
    assert plain == drafted
    assert "def " in plain
    rounds = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Speculation: ")]
    assert rounds[0] == "Speculation: 1.00 tokens per round"
    assert float(rounds[1].split()[1]) > 1.5  # a head that is wired wrong drafts little that stands


def test_every_example_is_short_and_in_the_list() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"({path.name})" in listed
        assert len(path.read_text().splitlines()) <= 60
