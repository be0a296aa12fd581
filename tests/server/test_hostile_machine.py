"""A server on a machine that lacks what it would like to have, and with weights that are broken."""

from pathlib import Path

import httpx
import mlx.core as mx
import pytest
from hostile import SMALL, target

from checkpoints import write

MISSING = "/proc/nowhere"  # cannot be made, not even by root


def test_a_server_without_a_home_or_a_temporary_folder_serves(tmp_path: Path) -> None:
    model = str(write(tmp_path / "model", vocab_size=8192))
    missing = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TMPDIR"), MISSING)
    with target(model=model, **missing) as server:
        server.assert_serving()
        with server.http() as http:
            changed = http.patch("/v1/settings", json={"max_k": 2}).json()
        assert changed["max_k"] == 2
        server.assert_serving()
        assert "Traceback" not in server.log()


@pytest.mark.slow  # tests/engine/test_failing_sequences.py and test_faults.py have it in one process
def test_a_model_of_nans_fails_its_requests_and_not_the_server(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", vocab_size=8192, shards=1)
    file = folder / "model-00001-of-00001.safetensors"
    arrays: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
    name = "model.language_model.norm.weight"
    mx.save_safetensors(str(file), arrays | {name: arrays[name] * float("nan")}, {"format": "pt"})
    with target(model=str(folder)) as server, server.http() as http:
        for _ in range(2):
            response = http.post("/v1/completions", json=SMALL)
            assert response.status_code == 500
            assert "not finite" in response.json()["error"]["message"]
        assert httpx.get(f"{server.url}/health").status_code == 200
