"""The files of the page: open without a key, few, closed to anything foreign, and with their makers' licences."""

import http.client
import re

import httpx
import pytest
from running import Running, running

from headstart.server.dashboard import HERE

FILES = sorted(path for path in HERE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc"))
URLS = ["/", *(f"/{path.relative_to(HERE)}" for path in FILES if path.name != "page.html")]


def test_the_page_and_its_files_need_no_key_and_nothing_else_is_open() -> None:
    with running(key="sesame") as server, httpx.Client(base_url=server.url) as stranger:
        for url in URLS:
            assert stranger.get(url).status_code == 200, url
        for url in ("/v1/mtp/stats", "/v1/cache", "/v1/settings", "/assets", "/assets."):
            assert stranger.get(url).status_code == 401, url
        assert stranger.get("/assets/nothing").status_code == 404
        assert stranger.patch("/v1/settings", json={"speculation": False}).status_code == 401
        assert server.room.settings.speculation


@pytest.mark.parametrize("path", ["/assets/../v1/settings", "/assets/%2e%2e/page.html", "/assets//etc/passwd"])
def test_no_way_leads_out_of_the_files(path: str) -> None:
    with running(key="sesame") as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        connection.request("GET", path)  # as it is: other clients would tidy it up
        assert connection.getresponse().status == 404


def test_whatever_is_sent_forbids_everything_foreign(server: Running) -> None:
    with server.http() as client:
        for url in (*URLS, "/assets/nothing"):
            response = client.get(url)
            policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
            assert policy["default-src"] == "'none'", url
            assert set(policy.values()) <= {"'none'", "'self'", "'script'", "markdown"}, url
            assert response.headers["x-content-type-options"] == "nosniff"


def test_the_page_has_no_scripts_or_styles_of_its_own() -> None:
    page = (HERE / "page.html").read_text()
    assert not re.findall(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|https?:", page)


def test_it_is_under_400_kb_in_all() -> None:
    assert sum(path.stat().st_size for path in FILES) < 400_000


def test_other_peoples_code_has_its_licence_beside_it() -> None:
    libraries = [path for path in (HERE / "assets" / "vendor").iterdir() if path.is_dir()]
    assert libraries
    for library in libraries:
        assert "Permission is hereby granted" in (library / "LICENSE").read_text(), library.name
