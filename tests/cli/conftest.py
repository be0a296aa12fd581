"""Commands time the model before their first answer. Here a glance is enough: no test is of the depth chosen."""

import pytest

import headstart.engine.engine
from headstart.engine.calibrate import step_times


@pytest.fixture(autouse=True)
def at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        headstart.engine.engine, "step_times", lambda model, most, rows, enough: step_times(model, most, rows, 0.01)
    )
