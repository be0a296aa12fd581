"""Clients with fixed names for models: aliases of a server, and what any other name means."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from running import Running, running

from checkpoints import write
from headstart.cli.serve_settings import ServeSettings
from headstart.errors import RequestError
from headstart.server.model_names import ModelNames
from headstart.server.pooled_model import PooledModel


@contextmanager
def named(aliases: dict[str, str], default: str | None) -> Iterator[tuple[Running, ModelNames]]:
    with running() as server:
        pool = server.server._state.pool
        assert pool is not None
        pool.names.use(aliases, default)
        yield server, pool.names


def test_an_alias_is_the_model_on_every_endpoint() -> None:
    with named({"gpt-4o": "tiny"}, None) as (server, _), server.http() as http:
        client = server.openai()
        hello: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
        answers = [
            client.chat.completions.create(model="gpt-4o", messages=hello, max_tokens=1),
            client.completions.create(model="gpt-4o", prompt="Hi", max_tokens=1),
            client.responses.create(model="gpt-4o", input="Hi", max_output_tokens=1),
            server.anthropic().messages.create(model="gpt-4o", messages=hello, max_tokens=1),  # type: ignore[arg-type]
        ]
        assert [answer.model for answer in answers] == ["tiny"] * 4
        assert http.post("/tokenize", json={"model": "gpt-4o", "content": "Hi"}).status_code == 200
        (entry,) = http.get("/v1/models").json()["data"]
        assert (entry["id"], entry["aliases"]) == ("tiny", ["gpt-4o"])
        assert client.models.retrieve("gpt-4o").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-4o-mini", prompt="Hi", max_tokens=1)


def test_a_relative_folder_is_a_name_as_the_command_line_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "models" / "mine", "dense")
    monkeypatch.chdir(tmp_path)
    model = PooledModel.of(Path("models/mine"))
    names = ("mine", "models/mine", "models/mine/", str(tmp_path / "models/mine"), "mine/models", "other/mine")
    assert [model.answers_to(name) for name in names] == [True, True, True, True, False, False]


def test_any_name_may_mean_the_default_model() -> None:
    with named({}, "tiny") as (server, names):
        answer = server.openai().completions.create(model="claude-fable-5", prompt="Hi", max_tokens=1)
        assert answer.model == "tiny"
        assert [names.resolve(name) for name in (None, "tiny", "else")] == [None, "tiny", "tiny"]


@pytest.mark.parametrize(
    ("aliases", "default", "wrong"),
    [({"a": "none"}, None, "none"), ({}, "none", "none"), ({"tiny": "tiny"}, None, "tiny")],
)
def test_names_that_mean_nothing_or_two_things_are_refused(
    server: Running, aliases: dict[str, str], default: str | None, wrong: str
) -> None:
    pool = server.server._state.pool
    assert pool is not None
    with pytest.raises(RequestError, match=wrong):
        ModelNames(pool.models).use(aliases, default)


def test_an_alias_on_the_command_line_has_a_name_and_a_model() -> None:
    assert ServeSettings(model_alias=["a=b", "c=d=e"]).aliases == {"a": "b", "c": "d=e"}
    for wrong in ("a", "a=", "=b"):
        with pytest.raises(RequestError, match="NAME=MODEL"):
            ServeSettings(model_alias=[wrong]).check([])
