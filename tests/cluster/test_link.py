"""The sockets between ranks: decisions come in order, and whoever is gone is named."""

import socket
import time
from collections.abc import Callable, Iterator

import pytest

import headstart.cluster.link
from headstart.cluster.link import Link


class Noted(Link):
    """Notes how it would have ended the process, with the others told first, as it is."""

    def __init__(self, *arguments: object):
        self.ended: list[tuple[int, str]] = []
        super().__init__(*arguments)  # type: ignore[arg-type]

    def end(self, rank: int, reason: str) -> None:
        self.ended.append((rank, reason))


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Noted]]:
    """Three ranks in one process."""
    monkeypatch.setattr(headstart.cluster.link, "BEAT", 0.05)
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
    for decision in ("a turn", 3, ["the", "next"], None):
        links[0].decide(decision)
    for link in links[1:]:
        assert [link.decided() for _ in range(4)] == ["a turn", 3, ["the", "next"], None]


def test_a_rank_whose_process_ends_is_named(links: list[Noted]) -> None:
    links[1]._sockets[0].shutdown(socket.SHUT_RDWR)
    wait(lambda: links[0].ended)
    assert links[0].ended == [(1, "is gone: its process ended, or its machine or the connection to it")]
    assert links[2].ended == []


def test_a_rank_that_falls_silent_is_named(links: list[Noted]) -> None:
    links[2]._closing = True  # its heart stops, and nothing else
    wait(lambda: links[0].ended)
    assert links[0].ended == [(2, "has been silent for 1 s")]


def test_a_rank_that_says_what_nobody_understands_is_named(links: list[Noted]) -> None:
    links[2]._send(0, headstart.cluster.link.SAID, b"?")
    wait(lambda: links[0].ended)
    rank, reason = links[0].ended[0]
    assert rank == 2
    assert "cannot be understood" in reason


def test_who_is_gone_is_told_to_the_others(links: list[Noted]) -> None:
    links[0]._send(2, b"l", b'[1, "is gone"]')
    wait(lambda: links[2].ended)
    assert links[2].ended == [(1, "is gone")]


def test_ranks_that_say_the_same_go_on(links: list[Noted]) -> None:
    for round in range(5):
        for link in reversed(links):
            link.check(round, 1000 + round)
    wait(lambda: not links[0]._checks)
    assert links[0].ended == []


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_says_something_else_is_named(links: list[Noted], first: bool) -> None:
    for link in links if first else reversed(links):
        link.check(7, 1000 + (link.rank == 2))
    wait(lambda: links[0].ended)
    assert {rank for rank, _ in links[0].ended} == {2}
    assert "something else than rank 0 in round 7" in links[0].ended[0][1]


def test_a_turn_that_does_not_end_names_the_rank_that_is_behind(
    links: list[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    for link in links:
        for _ in range(3 if link.rank == 2 else 4):
            link.begin_turn()
            link.end_turn()
    wait(lambda: links[0].turns == {0: 4, 1: 4, 2: 3})
    monkeypatch.setattr(headstart.cluster.link, "STUCK", 0.1)
    links[0].begin_turn()
    wait(lambda: links[0].ended)
    assert links[0].ended[0] == (2, "has not finished a turn for 0 s")


def test_whoever_leaves_in_peace_is_not_missed(links: list[Noted]) -> None:
    for link in reversed(links):
        link.close()
    assert [link.decided() for link in links[1:]] == [None, None]
    time.sleep(0.1)
    assert [link.ended for link in links] == [[], [], []]


def test_an_error_of_one_is_told_to_all(links: list[Noted]) -> None:
    links[1].close(ValueError("config.json is missing"))
    wait(lambda: links[0].ended)
    assert links[0].ended[0] == (1, "failed: config.json is missing")
