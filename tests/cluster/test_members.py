"""A cluster of one, which is enough to see what a member does by itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import mlx.core as mx
import pytest

import headstart.cluster.link
from checkpoints import write
from fixtures import collect, random_prompt, submit
from headstart.cluster import Machines, lead, load_part
from headstart.cluster.communicator import Communicator
from headstart.cluster.link import Link
from headstart.engine import Engine
from headstart.errors import ClusterError


class Ended(Exception):
    pass


class Noted(Link):
    """Does not end the process."""

    def abort(self, rank: int, reason: str) -> NoReturn:
        raise Ended(rank, reason)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), "dense")


@pytest.fixture
def leader(folder: Path) -> Iterator[Engine]:
    mx.disable_compile()  # nothing here is worth a compiler run
    yield leads(folder, Communicator(mx.distributed.init()))
    mx.enable_compile()


def leads(folder: Path, comm: Communicator) -> Engine:
    model, tokenizer = load_part(folder, comm, dtype=mx.float32)
    return lead(Machines(comm, Noted(0, 1, {})), model, tokenizer)


class Another(Communicator):
    """There is a second rank, and of what is gathered it has one thing otherwise."""

    place = 0

    def gather(self, x: mx.array) -> mx.array:
        return mx.stack([x, x + (mx.arange(x.size) == self.place)])


@pytest.mark.parametrize(
    ("place", "thing"),
    [
        (0, "version of headstart"),
        (1, "version of mlx"),
        (3, "split"),
        (4, "config.json"),
        (6, "chat template"),
        (7, "KV cache"),
        (8, "multi-token.* head"),
    ],
)
def test_a_rank_that_has_loaded_something_else_is_named(place: int, thing: str, folder: Path) -> None:
    comm = Another(mx.distributed.init())
    comm.place = place
    with pytest.raises(ClusterError, match=f"rank 1 has another {thing} than rank 0"):
        leads(folder, comm)


def test_prompts_are_not_prefilled_without_the_others(leader: Engine) -> None:
    submit(leader, random_prompt(leader.model, 9))
    with pytest.raises(ClusterError, match="prefill_all is not available on several machines"):
        leader.prefill_all()


@pytest.mark.parametrize(
    "broken", ["scheduler.Scheduler.drop_finished", "prompt_reader.run_pass", "engine.build_step"]
)
def test_an_iteration_that_fails_ends_with_its_cause(
    broken: str, leader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in the iteration: no rank recovers alone."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise ValueError("out of memory")

    monkeypatch.setattr(headstart.cluster.link, "GRACE", 0.0)
    monkeypatch.setattr(f"headstart.engine.{broken}", fail)
    with pytest.raises(Ended, match="failed: ValueError: out of memory"):
        collect(submit(leader, random_prompt(leader.model, 9), max_tokens=4))
