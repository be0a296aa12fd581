"""Here the engine launches steps ahead, as on a GPU. On a CPU it would not, and does not in the other tests."""

import pytest


@pytest.fixture(autouse=True)
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.kernels.cpu.backend.StockCpu.asynchronous", True)
