"""What clients learn of the served model."""

from running import CONTEXT, folder, running


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
