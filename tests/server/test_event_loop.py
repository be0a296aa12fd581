"""The server runs on asyncio's event loop, whatever else is installed."""

import sys
from types import ModuleType

import httpx
import pytest
from running import starting


def test_an_installed_uvloop_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", ModuleType("uvloop"))
    monkeypatch.delitem(sys.modules, "uvicorn.loops.uvloop", raising=False)
    with starting() as start:
        assert httpx.get(f"{start.url}/health").json()["status"] == "starting"
