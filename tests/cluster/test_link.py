"""The sockets between ranks: decisions come in order, and a lost rank is named."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import pytest

import headstart.cluster.link
from headstart.cluster.link import Link, connect
from headstart.errors import ClusterError


class Noted(Link):
    """Notes how it would have ended the process, after it has notified the others, as it does."""

    def __init__(self, *arguments: object):
        self.ended: list[tuple[int, str]] = []
        super().__init__(*arguments)  # type: ignore[arg-type]

    def abort(self, rank: int, reason: str) -> None:
        self.ended.append((rank, reason))


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Noted]]:
    """Three ranks in one process."""
    monkeypatch.setattr(headstart.cluster.link, "HEARTBEAT", 0.05)
    monkeypatch.setattr(headstart.cluster.link, "SILENCE", 1.0)
    pairs = {rank: connected() for rank in (1, 2)}
    first = Noted(0, 3, {rank: pair[0] for rank, pair in pairs.items()})
    links = [first, *(Noted(rank, 3, {0: pair[1]}) for rank, pair in pairs.items())]
    yield links
    for link in links:
        link.close()


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        there = socket.create_connection(door.getsockname())
        return door.accept()[0], there


def wait(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_decisions_reach_everybody_in_order(links: list[Noted]) -> None:
    for decision in ("an iteration", 3, ["the", "next"], None):
        links[0].broadcast(decision)
    for link in links[1:]:
        assert [link.receive() for _ in range(4)] == ["an iteration", 3, ["the", "next"], None]


def test_a_rank_whose_process_ends_is_named(links: list[Noted]) -> None:
    links[1]._sockets[0].shutdown(socket.SHUT_RDWR)
    wait(lambda: links[0].ended)
    assert links[0].ended == [(1, "is gone: its process ended, or its machine or the connection to it")]
    assert links[2].ended == []


def test_a_rank_that_falls_silent_is_named(links: list[Noted]) -> None:
    links[2]._closing = True  # its heart stops, and nothing else
    wait(lambda: links[0].ended)
    assert links[0].ended == [(2, "has been silent for 1 s")]


def test_a_rank_that_sends_an_invalid_message_is_named(links: list[Noted]) -> None:
    links[2]._send(0, headstart.cluster.link.CHECKSUM, b"?")
    wait(lambda: links[0].ended)
    rank, reason = links[0].ended[0]
    assert rank == 2
    assert "sent an invalid message" in reason


def test_who_is_gone_is_reported_to_the_others(links: list[Noted]) -> None:
    links[0]._send(2, headstart.cluster.link.ABORT, b'[1, "is gone"]')
    wait(lambda: links[2].ended)
    assert links[2].ended == [(1, "is gone")]


def test_ranks_with_the_same_checksums_go_on(links: list[Noted]) -> None:
    for round in range(5):
        for link in reversed(links):
            link.check(round, 1000 + round)
    wait(lambda: not links[0]._checksums)
    assert links[0].ended == []


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_generates_something_else_is_named(links: list[Noted], first: bool) -> None:
    for link in links if first else reversed(links):
        link.check(7, 1000 + (link.rank == 2))
    wait(lambda: links[0].ended)
    assert {rank for rank, _ in links[0].ended} == {2}
    assert "generated other tokens than rank 0 in step 7" in links[0].ended[0][1]


@pytest.mark.parametrize(
    ("turns", "named"),
    [
        ((4, 4, 3), 2),
        ((4, 5, 4), 2),
        ((4, 4, 4), 1),
    ],
)
def test_an_iteration_that_does_not_end_names_the_rank_that_is_behind(
    turns: tuple[int, ...], named: int, links: list[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank waits for the others, so it is the last to be named."""
    for link, many in zip(links, turns, strict=True):
        for _ in range(many):
            with link.iteration():
                pass
    wait(lambda: links[0].iterations == dict(enumerate(turns)))
    monkeypatch.setattr(headstart.cluster.link, "STUCK", 0.1)
    with links[0].iteration():
        wait(lambda: links[0].ended)
    assert links[0].ended[0] == (named, "has not finished an iteration for 0 s")


def test_a_rank_that_takes_nothing_in_does_not_silence_the_first_one_for_the_others(links: list[Noted]) -> None:
    with links[0]._sending[1]:  # as while a decision waits for room in its socket
        time.sleep(2 * headstart.cluster.link.SILENCE)
        assert links[2].ended == []


def test_the_cause_of_a_failure_is_reported(links: list[Noted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headstart.cluster.link, "GRACE", 0.0)
    error = ClusterError("it cannot keep a prompt")
    error.__cause__ = MemoryError("none left")
    links[1].fail(error)
    assert links[1].ended == [
        (1, "failed: ClusterError: it cannot keep a prompt, because of MemoryError('none left')")
    ]


def test_a_rank_that_closes_is_not_reported_as_lost(links: list[Noted]) -> None:
    for link in reversed(links):
        link.close()
    assert [link.receive() for link in links[1:]] == [None, None]
    time.sleep(0.1)
    assert [link.ended for link in links] == [[], [], []]


def test_nobody_exits_in_peace_while_another_thread_ends_it_all(links: list[Noted]) -> None:
    with links[1]._ending:
        closing = Thread(target=links[1].close, daemon=True)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()


def test_an_error_of_one_is_reported_to_all(links: list[Noted]) -> None:
    links[1].close(ValueError("config.json is missing"))
    wait(lambda: links[0].ended)
    assert links[0].ended[0] == (1, "failed: config.json is missing")


@dataclass
class Communicator:
    """On which all ranks receive what the first sends, in one process."""

    rank: int
    ranks: int = 2
    sent: list[mx.array] = field(default_factory=list)

    def gather(self, x: mx.array) -> list[mx.array]:
        if self.rank == 0:
            self.sent.append(x)
        wait(lambda: self.sent)
        return self.sent


def met(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What two ranks come to whose hostfile has the first one at `address`: a link or an error each."""
    (tmp_path / "hosts.json").write_text(json.dumps([[f"{address}:5000"], ["127.0.0.1:5001"]]))
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
    first, found = Communicator(0), {}

    def meet(comm: Any) -> None:
        try:
            found[comm.rank] = connect(comm)
        except ClusterError as error:
            found[comm.rank] = error

    threads = [Thread(target=meet, args=(comm,)) for comm in (first, Communicator(1, sent=first.sent))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found[0], found[1]]


def test_a_first_rank_that_cannot_listen_reports_it_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """203.0.113.1 is kept for documentation: nobody has it."""
    first, second = met("203.0.113.1", tmp_path, monkeypatch)
    assert "rank 0 cannot listen at 203.0.113.1" in str(first)
    assert str(second) == str(first)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]", "::1"])
def test_ranks_meet_at_an_address_of_either_kind(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ":" in address and not has_ipv6():
        pytest.skip("there is no IPv6 here")
    links = met(address, tmp_path, monkeypatch)
    assert [link.rank for link in links] == [0, 1]
    links[0].broadcast("an iteration")
    assert links[1].receive() == "an iteration"
    for link in links:
        link.close()
