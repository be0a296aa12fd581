"""Images at URLs: fetched where the server allows it, from public addresses only, within limits of size and time."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from running import Running

from headstart.server import image_urls
from headstart.server.image_urls import fetch_image, is_public
from reference.pictures import picture
from vision_models import encoded

PUBLIC, PRIVATE = "127.0.0.2", "127.0.0.1"  # as these tests have it


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        port = self.server.server_address[1]
        where = {
            "/to-loopback": f"http://{PRIVATE}:{port}/x.png",
            "/to-name": f"http://localhost:{port}/x.png",
            "/to-file": "file:///etc/passwd",
            "/around": "/around",
            "/moved": "/x.png",
        }.get(self.path)
        self.send_response(302 if where else 404 if self.path == "/none" else 200)
        if where:
            self.send_header("Location", where)
        body = PNG if self.path == "/picture" else b"x" * (2000 if self.path == "/large" else 10)
        asked.append(self.headers["Host"])
        self.send_header("Content-Type", "image/png; charset=binary")
        self.send_header("Content-Length", str(len(body) + (100 if self.path == "/slow" else 0)))
        self.end_headers()
        self.wfile.write(body)
        if self.path == "/slow":
            stop.wait(30)

    def log_message(self, *_: object) -> None:
        pass


stop = threading.Event()
asked: list[str] = []  # the hosts that were asked
PNG = encoded(picture(16, 16))


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("0.0.0.0", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://pictures.example:{server.server_address[1]}"
    stop.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _network(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = image_urls.resolve_host

    async def to_site(host: str, port: int) -> list[str]:
        return [PUBLIC] if host == "pictures.example" else await resolve(host, port)

    monkeypatch.setattr(image_urls, "resolve_host", to_site)
    monkeypatch.setattr(image_urls, "is_public", lambda address: address == PUBLIC)
    monkeypatch.setattr(image_urls, "MAX_BYTES", 1000)


def test_fetches_and_follows_redirects(site: str) -> None:
    for path in ("/x.png?a=b", "/moved"):
        assert asyncio.run(fetch_image(site + path)) == (b"x" * 10, "image/png")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/to-loopback", "not public"),
        ("/to-name", "not public"),
        ("/to-file", "not at an http or https URL"),
        ("/around", "more than 3 redirects"),
        ("/large", "more than 1,000 bytes"),
        ("/none", "answers 404"),
    ],
)
def test_refuses(site: str, path: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        asyncio.run(fetch_image(site + path))


def test_a_running_server_follows_no_redirect_to_its_own_machine(site: str, seeing: Running) -> None:
    def ask(path: str) -> tuple[int, str]:
        parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": site + path}}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
        with seeing.http() as http:
            answer = http.post("/v1/chat/completions", json=body)
        return answer.status_code, answer.text

    asked.clear()
    assert ask("/picture")[0] == 200
    for path in ("/to-loopback", "/to-name"):
        status, text = ask(path)
        assert status == 400
        assert "messages[0].content[1]: the image is at an address that is not public" in text
    assert asked == [site.removeprefix("http://")] * 3  # neither 127.0.0.1 nor localhost
    assert ask("/picture")[0] == 200


def test_gives_up_in_time(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_urls, "SECONDS", 0.3)
    with pytest.raises(ValueError, match=r"within 0\.3 s"):
        asyncio.run(fetch_image(site + "/slow"))


@pytest.mark.parametrize("url", ["ftp://pictures.example/x", "http://me:secret@pictures.example/", "http:///x", "x"])
def test_refuses_other_urls(url: str) -> None:
    with pytest.raises(ValueError, match="not at an http or https URL"):
        asyncio.run(fetch_image(url))


def test_public_addresses() -> None:
    assert all(map(is_public, ("1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1")))
    private = (
        "127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1",
        "::", "::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
        "x",
    )  # fmt: skip
    assert not any(map(is_public, private))
