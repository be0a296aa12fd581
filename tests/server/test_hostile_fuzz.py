"""Random bodies on every route into llguidance: whatever comes, no process of the server's dies but a worker."""

import ast
import asyncio
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import fuzz
import pytest
from hostile import target
from hostile_bodies import body

HERE = Path(__file__).parent


def drive(seed: str, cases: int) -> tuple[Counter[str], list[str]]:
    """Return how many cases had which outcome, and those at which the process died."""
    outcomes: Counter[str] = Counter()
    crashes, first = list[str](), 0
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    while first < cases:
        command = [sys.executable, str(HERE / "fuzz.py"), seed, str(first), str(cases)]
        result = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        last = result.stdout.strip().rpartition("\n")[2]
        if result.returncode == 0:
            return outcomes + Counter(ast.literal_eval(last)), crashes
        assert last.startswith("case "), result.stderr[-2000:]
        crashes.append(f"{last} of {seed}: {result.returncode}: {result.stderr[-500:]}")
        first = int(last.removeprefix("case ")) + 1
    return outcomes, crashes


def test_some_random_bodies(capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which a crash would end with all its tests."""
    asyncio.run(fuzz.main("short", 0, 30))
    outcomes = Counter(ast.literal_eval(capsys.readouterr().out.strip().rpartition("\n")[2]))
    assert outcomes["followed"] > 5
    assert outcomes["refused 400"] > 5


@pytest.mark.slow
def test_many_random_bodies(capsys: pytest.CaptureFixture[str]) -> None:
    cases = int(os.environ.get("HEADSTART_FUZZ_CASES", "10000"))
    outcomes, crashes = drive(os.environ.get("HEADSTART_FUZZ_SEED", "long"), cases)
    with capsys.disabled():
        print(f"\n{cases} cases, {len(crashes)} crashes, {dict(outcomes)}")
    assert not crashes


@pytest.mark.slow
def test_random_bodies_over_http() -> None:
    with target() as server, server.http(timeout=600) as http:
        for i in range(300):
            path, content = body(Random(f"http/{i}"))
            status = http.post(path, json=content).status_code
            assert status in (200, 400, 408), f"case {i}"
            assert server.process.poll() is None, f"the server died of case {i}"
        server.assert_serving()
