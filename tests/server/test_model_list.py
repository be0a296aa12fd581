"""What clients learn of the served model."""

from pathlib import Path

import pytest
from running import CONTEXT, folder, running, serving

from checkpoints import write
from headstart.engine import DeviceThread
from headstart.server.model_pool import ModelPool
from headstart.server.pooled_model import PooledModel


def test_no_client_learns_the_folder_of_a_model_that_cannot_draft() -> None:
    path = str(folder(False, CONTEXT))
    with running(head=False) as server, server.http() as http:
        body = {"prompt": "hi", "max_tokens": 2}
        told = [http.post("/v1/completions", json=body), *map(http.get, ("/v1/models", "/v1/mtp/stats", "/metrics"))]
        told += [http.post("/v1/completions", json=body | {"num_draft_tokens": 2})]
        told += [http.patch("/v1/settings", json={"max_k": 2})]
        for response in told:
            assert "headstart graft tiny" in response.text
            assert path not in response.text


@pytest.mark.parametrize("name", ["org/a..b", "org/-bad-", f"org/{'a' * 97}", "org/a--b", "org"])
def test_a_mistyped_id_is_refused_and_not_downloaded(tmp_path: Path, name: str) -> None:
    pool = ModelPool(DeviceThread(), [PooledModel.of(write(tmp_path / "red", vocab_size=8192))])
    with serving(pool, allow_download=True) as server, server.http() as http:
        refused = http.post("/v1/models/pull", json={"model": name})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        assert "is not a hub id: send org/name" in refused.json()["error"]["message"]
        unknown = http.post("/v1/completions", json={"model": name, "prompt": "hi"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert http.get("/v1/models").json()["downloads"] == []
