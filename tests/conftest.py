"""Runs before any test module, and so before anything imports mlx: what is set here holds for all of them."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certifi
import pytest
from hypothesis import settings

from compiled import CompiledFunctions

# Every process gets a $TMPDIR of its own: mx.compile on CPU builds shared libraries there, without a lock. A worker's
# lies inside its parent's and goes with it. pytest keeps tmp_path where it always does.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
_tmpdir = tempfile.mkdtemp(prefix="headstart-tests-")
tempfile.tempdir = os.environ["TMPDIR"] = _tmpdir
atexit.register(shutil.rmtree, _tmpdir, ignore_errors=True)  # after what multiprocessing does at exit
_compiled = CompiledFunctions(Path(_tmpdir))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# No test speaks TLS, and every HTTP client would read certifi's authorities, 50 ms each time: one is enough.
_certificates = Path(certifi.where()).read_text().partition(_END := "-----END CERTIFICATE-----\n")
os.environ["SSL_CERT_FILE"] = str(Path(_tmpdir) / "one-authority.pem")
Path(os.environ["SSL_CERT_FILE"]).write_text(_certificates[0] + _END)

# A shell has its background jobs ignore Ctrl-C, and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The first example of a property may compile for seconds; that says nothing about the property.
settings.register_profile("headstart", deadline=None)
settings.load_profile("headstart")


@pytest.fixture(autouse=True)
def _no_prefixes_of_other_tests() -> None:
    """Models are shared by tests, and a model keeps the prefixes that it has read."""
    for module, kept in (("headstart.engine.engine", "_prefixes"), ("headstart.library", "_engines")):
        if module in sys.modules:
            getattr(sys.modules[module], kept).clear()


@pytest.fixture
def stock_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx's own operations in place of our CPU kernels: what equals mlx-lm to the last bit does so with these."""
    from headstart.kernels.cpu import load

    monkeypatch.setattr(load, "_loaded", load.Loaded(None, "stock (this test)"))


# Files that share a server; those of the dashboard share a browser.
ATTACKED = tuple(f"test_hostile_{name}.py" for name in ("grammars", "hosts", "prompts", "signals"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Have one worker more than cores: while a test waits for a server or a page, others compute."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file on one worker, so that what it loads is loaded once, and together files that share a process."""
    from xdist.scheduler import LoadFileScheduling

    class LoadServerScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "attacked" if file.endswith(ATTACKED) else "dashboard" if "/dashboard/" in file else file

    return LoadServerScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix the server's files, which wait for much of their time, evenly among those that compute."""
    order = {}
    for serves in (True, False):
        files = dict.fromkeys(item.path for item in items if ("server" in item.path.parts) == serves)
        order |= {file: n / len(files) for n, file in enumerate(files)}
    items.sort(key=lambda item: order[item.path])


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays, and need not be looked at again by every full collection


def pytest_runtest_logfinish() -> None:
    _compiled.publish()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """Say in the last lines what was left out for want of a program."""
    yield
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())]
    for program, tests in (("Chromium", "of the dashboard"), ("clang", "of the language of Metal kernels")):
        absent = [reason.removeprefix("Skipped: ") for reason in reasons if program in reason]
        if absent:
            terminalreporter.write_line(f"{len(absent)} tests {tests} were left out: {absent[0]}", yellow=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    _compiled.fetch()
    if item.get_closest_marker("gpu"):
        import mlx.core as mx

        if not mx.is_available(mx.gpu):
            pytest.skip("mlx has no GPU here")
