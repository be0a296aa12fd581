"""A Hugging Face hub on loopback that speaks the few routes huggingface_hub asks for."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves folders as models, and records which of their files were requested."""

    def __init__(self) -> None:
        self.models: dict[str, Path] = {}
        self.downloaded: list[str] = []  # whole
        self.read: list[tuple[str, int, int]] = []  # of a file: from, to
        self.requests = 0
        self.cut: str | None = None  # a shard in the middle of which connections break
        self.held: str | None = None  # a shard of which half is sent, and the rest once `gate` is set
        self.gate = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests += 1
        parts = request.path.split("?")[0].strip("/").split("/")
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        folder = self.models.get(repo)
        if folder is None:
            return self.send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if parts[0] == "api" and "paths-info" in parts:
            paths = parse_qs(request.rfile.read(int(request.headers["Content-Length"])).decode())["paths"]
            return self.send(request, 200, json.dumps([self.entry(folder, file) for file in paths]).encode())
        if parts[0] == "api" and "tree" in parts:
            return self.send(request, 200, json.dumps([self.entry(folder, file) for file in files(folder)]).encode())
        if parts[0] == "api":
            siblings = [{"rfilename": file, "size": (folder / file).stat().st_size} for file in files(folder)]
            return self.send(request, 200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())
        file = "/".join(parts[4:])
        if not (folder / file).is_file():
            return self.send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
        content = (folder / file).read_bytes()
        etag = hashlib.sha1(content).hexdigest()
        if "Range" in request.headers:
            begin, _, end = request.headers["Range"].removeprefix("bytes=").partition("-")
            first, last = int(begin), int(end or len(content) - 1)
            self.read.append((file, first, last))
            return self.send(request, 206, content[first : last + 1])
        if request.command == "GET":
            self.downloaded.append(file)
        return self.send(request, 200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

    def entry(self, folder: Path, file: str) -> dict[str, Any]:
        content = (folder / file).read_bytes()
        return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            half = len(body) // 2 if request.path.endswith(".safetensors") else 0
            request.wfile.write(body[:half])
            if half and self.cut and request.path.endswith(self.cut):
                return
            if half and self.held and request.path.endswith(self.held):
                self.gate.wait(60)
            request.wfile.write(body[half:])


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def point_at(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    hub = Hub()
    point_at(monkeypatch, hub.url, cache)
    try:
        yield hub
    finally:
        hub.close()
