"""Hostile pictures take no more memory than is said: of a real server process and its workers."""

import json
import os
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import Target, error_code, target

from headstart.images import MAX_FILE_PIXELS
from headstart.server.images import MAX_IMAGES
from vision_models import encoded, giant_png, write_with_tower

MB = 10**6
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peaks of memory"),
]


def memory(pid: int, name: str) -> int:
    """Return `VmRSS` or `VmHWM`, the peak, of a process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def chat(*pictures: bytes) -> dict[str, Any]:
    urls = [f"data:image/png;base64,{b64encode(each).decode()}" for each in pictures]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}


class Watched:
    """A server, and how far its memory and that of its workers rises."""

    def __init__(self, server: Target):
        self.server = server
        with server.http() as http:  # starts the workers
            assert http.post("/v1/chat/completions", json=chat(encoded(np.zeros((8, 8, 3), np.uint8)))).is_success

    def send(self, body: dict[str, Any]) -> tuple[tuple[int, str | None], int, int]:
        """Return the status and code of the answer, and the growth of the server and of any worker, in bytes."""
        pid = self.server.process.pid
        tasks = Path(f"/proc/{pid}/task").iterdir()
        workers = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        before = {}
        for each in (pid, *workers):
            Path(f"/proc/{each}/clear_refs").write_text("5")  # the peak starts anew
            before[each] = memory(each, "VmRSS")
        with self.server.http(timeout=600) as http:
            answer = http.post("/v1/chat/completions", json=body)
        grown = {each: memory(each, "VmHWM") - before[each] for each in before}  # fails if a worker died
        code = error_code(answer) if answer.status_code != 200 else None
        return (answer.status_code, code), grown.pop(pid), max(grown.values())


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = write_with_tower(tmp_path_factory.mktemp("model"))
    with target("--images", model=str(folder)) as server:
        yield Watched(server)


def test_a_bomb_is_not_decoded(watched: Watched) -> None:
    answer, server, worker = watched.send(chat(giant_png(30_000, 40_000)))  # 3.6 GB
    assert answer == (400, "invalid_value")
    assert server < 50 * MB
    assert worker < 50 * MB


def test_a_small_file_of_as_many_pixels_as_allowed(watched: Watched) -> None:
    side = int(MAX_FILE_PIXELS**0.5)
    picture = encoded(np.zeros((side, side, 4), np.uint8))
    assert len(picture) < MB
    answer, server, worker = watched.send(chat(picture))
    assert answer == (200, None)
    assert server < 50 * MB
    assert 4 * side**2 < worker < 2**30  # of which a worker has two


def test_a_hundred_pictures_are_not_decoded(watched: Watched) -> None:
    noise = encoded(np.random.default_rng(0).integers(0, 255, (400, 350, 3), np.uint8))
    for count, expected in ((100, (400, "invalid_value")), (MAX_IMAGES, (200, None))):
        body = chat(*[noise] * count)
        answer, server, worker = watched.send(body)
        assert answer == expected
        assert server < 6 * len(json.dumps(body))
        assert worker < 50 * MB
