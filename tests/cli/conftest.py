"""Commands time the model before their first answer. Here a glance is enough: no test is of the depth chosen."""

import pytest

import headstart.engine.engine
from headstart.engine.step_time import time_steps


@pytest.fixture(autouse=True)
def at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        headstart.engine.engine, "time_steps", lambda model, most, rows, enough: time_steps(model, most, rows, 0.01)
    )
