"""Prompts that a client made up to block the server."""

import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attacks import COUNT, PROMPTS, TEXT, Case, long
from hostile import Target, target

from headstart.checkpoint import resolve

CONTEXT = 8_000_000


@pytest.fixture(scope="module")
def vast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server whose context holds any body: only time limits what is tokenised."""
    folder = tmp_path_factory.mktemp("models") / "vast"
    shutil.copytree(resolve("tiny-qwen3.5"), folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('_embeddings": 4096', f'_embeddings": {CONTEXT}'))
    with target(model=str(folder)) as here:
        yield here


@pytest.mark.parametrize("case", PROMPTS, ids=lambda case: case.name)
def test_it_is_refused_while_others_are_served(attacked: Target, case: Case) -> None:
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(attacked.check, case)
        attacked.assert_serving()
        refused.result()


@pytest.mark.slow
def test_long_texts_keep_no_small_request_waiting(vast: Target) -> None:
    """Three of them, from one address. Each takes many seconds, until it is refused for its time or its memory."""
    body = Case("long", COUNT, long("1" * 15_000_000), 400, None)
    with ThreadPoolExecutor(3) as pool, vast.http(timeout=600) as http:
        pending = [pool.submit(body.send, http) for _ in range(3)]
        for _ in range(3):
            vast.assert_serving()
        assert not all(each.done() for each in pending), "they were over before the small ones"
        assert {each.result().status_code for each in pending} <= {400, 408, 429}


@pytest.mark.slow
def test_work_for_a_client_that_has_gone_is_stopped(vast: Target) -> None:
    host, port = vast.url.removeprefix("http://").split(":")
    text = "1" * 15_000_000
    head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    for _ in range(2):
        before = _children(vast)
        with socket.create_connection((host, int(port))) as client:
            body = f'{{"prompt": "{text}", "max_tokens": 1}}'
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            vast.small()  # by now it has begun, or soon will
    with vast.http() as http:
        assert http.post(COUNT, json=long("1 " * 20_000)).status_code == 200
    assert len(_children(vast)) <= max(2, len(before))


def _children(server: Target) -> list[int]:
    """Return the worker processes of a server, where the system lists them."""
    path = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []
