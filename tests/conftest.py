"""Runs before any test module, and so before anything imports mlx: what is set here holds for all of them."""

import os
import shutil
import signal
import tempfile

import pytest
from hypothesis import settings

# mx.compile on CPU builds shared libraries in a folder under $TMPDIR, without a lock: every worker gets its
# own. A worker inherits its parent's $TMPDIR, so its folder lies inside the parent's and goes with it.
# tempfile has cached the old place by then, so pytest keeps tmp_path where it always does.
_tmpdir = tempfile.mkdtemp(prefix="headstart-tests-")
os.environ["TMPDIR"] = _tmpdir

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell has its background jobs ignore Ctrl-C, and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The first example of a property may compile for seconds; that says nothing about the property.
settings.register_profile("headstart", deadline=None)
settings.load_profile("headstart")


@pytest.fixture
def stock_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx's own operations in place of our CPU kernels: what equals mlx-lm to the last bit does so with these."""
    from headstart.kernels.cpu import load

    monkeypatch.setattr(load, "_loaded", load.Loaded(None, "stock (this test)"))


def pytest_unconfigure() -> None:
    shutil.rmtree(_tmpdir, ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import mlx.core as mx

        if not mx.is_available(mx.gpu):
            pytest.skip("mlx has no GPU here")
