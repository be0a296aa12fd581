"""A socket from the first rank to each of the others: for what it decides, and to tell who is gone.

Not through `mx.distributed`: a collective that waits for a machine which died waits for ever on some backends, and on
none says which one it was. A socket tells at once, and where a machine only falls silent, so does its heartbeat.

Frames from the first rank to the others are its decisions, pickled; what comes back is numbers and text, and is never
unpickled.
"""

import hmac
import json
import os
import pickle
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NoReturn

import mlx.core as mx

from ..errors import ClusterError
from .wire import Wire

BEAT = 1.0  # seconds between two beats of a heart
SILENCE = 8.0  # seconds after which somebody who is not heard of is gone
STUCK = 120.0  # seconds that a turn may take
ARRIVAL = 60.0  # seconds for all to find each other
LAST_WORDS = 2.0  # seconds for another thread to find out who is gone, and for clients to be told
PLACE = 1024  # bytes for where to meet, or why not

HEADER = struct.Struct("!cI")
ALIVE, DECIDED, SAID, LOST, OVER = b"a", b"d", b"s", b"l", b"o"
COUNT = struct.Struct("!Q")
CHECK = struct.Struct("!QI")
HELLO = struct.Struct("!16sI")


class Link:
    """One rank's end. `on_end` is told the reason when the service is over, before the process is."""

    def __init__(self, rank: int, ranks: int, sockets: dict[int, socket.socket]):
        self.rank, self.ranks = rank, ranks
        self.on_end: Callable[[str], None] = lambda reason: None
        self.turns = dict.fromkeys(range(ranks), 0)  # that each has finished
        self._since: float | None = None  # when the running turn began
        self._sockets = sockets
        self._sending = {peer: Lock() for peer in sockets}
        self._decided: SimpleQueue[Any] = SimpleQueue()
        self._checks: dict[tuple[int, int], int] = {}  # rank and round: a sum over what was said
        self._checking = Lock()
        self._ending = Lock()
        self._closing = False
        for peer, place in sockets.items():
            place.settimeout(SILENCE)
            place.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Thread(target=self._listen, args=(peer,), name=f"rank {peer}", daemon=True).start()
            Thread(target=self._beat, args=(peer,), name=f"heartbeat for rank {peer}", daemon=True).start()

    def decide(self, decision: object) -> None:
        """By the first rank, whose word the others wait for."""
        body = pickle.dumps(decision)
        for peer in self._sockets:
            self._send(peer, DECIDED, body)

    def decided(self) -> Any:
        """What the first rank decides next; None when there is nothing more to do."""
        return self._decided.get()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What everybody does at the same time, and none for longer than STUCK."""
        self._since = time.monotonic()
        yield
        self.turns[self.rank] += 1
        self._since = None

    def check(self, round: int, total: int) -> None:
        """Every rank's `total` over what a round has said must be the first one's."""
        if self.rank:
            self._send(0, SAID, CHECK.pack(round, total))
        else:
            self._compare(0, round, total)

    def end(self, rank: int, reason: str) -> NoReturn:
        """The service is over on every machine, because of `rank`. Does not return: the thread that turns the engine
        may be inside a collective that never ends."""
        told = f"rank {rank} of {self.ranks} {reason}"
        with self._ending:
            try:
                for peer in sorted(self._sockets, key=lambda peer: peer == rank):  # it may take nothing in
                    self._send(peer, LOST, json.dumps([rank, reason]).encode())
                with suppress(OSError, ValueError):  # nobody may be left to read it
                    os.write(sys.stderr.fileno(), f"error: {told}\n".encode())
                self.on_end(told)
            finally:
                os._exit(1)

    def fail(self, error: Exception) -> NoReturn:
        """This rank cannot go on. If that is because another has gone, its thread knows, and has the word first."""
        time.sleep(LAST_WORDS)
        because = f", because of {error.__cause__!r}" if error.__cause__ is not None else ""
        self.end(self.rank, f"failed: {type(error).__name__}: {error}{because}")

    def close(self, error: BaseException | None = None) -> None:
        """Part in peace, or tell the others why not."""
        with self._ending:  # where another thread is at it, this one must not exit before it
            self._closing = True
        if error is not None:
            reason = f"failed: {error}" if isinstance(error, Exception) else "was stopped"
            farewell = LOST, json.dumps([self.rank, reason]).encode()
        else:
            farewell = OVER, b""
        for peer, place in self._sockets.items():
            self._send(peer, *farewell)
            with suppress(OSError):
                place.shutdown(socket.SHUT_WR)

    def _send(self, peer: int, kind: bytes, body: bytes = b"") -> None:
        # An error means that it is gone; whoever listens to that one says so.
        with suppress(OSError), self._sending[peer]:
            self._sockets[peer].sendall(HEADER.pack(kind, len(body)) + body)

    def _beat(self, peer: int) -> None:
        """In a thread for each: one that takes nothing in must not keep the others waiting."""
        while not self._closing:
            self._send(peer, ALIVE, COUNT.pack(self.turns[self.rank]))
            since = self._since
            if self.rank == 0 and since is not None and time.monotonic() - since > STUCK:
                # The first is nearly always among those behind, for it waits for the others: it says the least.
                fewest = min(self.turns.values())
                behind = [rank for rank, turns in self.turns.items() if turns == fewest]
                first, *others = sorted(behind, key=lambda rank: rank == 0)
                also = "".join(f", nor has rank {rank}" for rank in others)
                self.end(first, f"has not finished a turn for {STUCK:.0f} s{also}")
            time.sleep(BEAT)

    def _listen(self, peer: int) -> None:
        try:
            while True:
                kind, size = HEADER.unpack(_exactly(self._sockets[peer], HEADER.size))
                body = _exactly(self._sockets[peer], size)
                if kind == ALIVE:
                    (self.turns[peer],) = COUNT.unpack(body)
                elif kind == SAID:
                    self._compare(peer, *CHECK.unpack(body))
                elif kind == LOST and not self._closing:  # or it has its own word to say
                    self.end(*json.loads(body))
                elif kind == DECIDED and peer == 0:
                    self._decided.put(pickle.loads(body))
                elif kind == OVER:
                    self._decided.put(None)
                    return
        except TimeoutError:
            reason = f"has been silent for {SILENCE:.0f} s"
        except (OSError, EOFError):
            reason = "is gone: its process ended, or its machine or the connection to it"
        except Exception as error:  # of another version, or broken: nobody else listens to it
            reason = f"cannot be understood ({type(error).__name__}: {error}): use the same version everywhere"
        if not self._closing:
            self.end(peer, reason)

    def _compare(self, rank: int, round: int, total: int) -> None:
        with self._checking:
            self._checks[rank, round] = total
            known = {each: self._checks[each, round] for each in range(self.ranks) if (each, round) in self._checks}
            if len(known) == self.ranks:
                for each in known:
                    del self._checks[each, round]
        if 0 in known and (other := next((each for each in known if known[each] != known[0]), None)) is not None:
            self.end(
                other, f"said something else than rank 0 in round {round}: use machines and versions of one kind"
            )


def connect(wire: Wire) -> Link:
    """Everybody at the same time. Where to, and a word that only members know, goes through `wire`."""
    if wire.rank == 0:
        return _await_all(wire)
    place = _share(wire, {})
    if "problem" in place:
        raise ClusterError(place["problem"])
    host, port = place["host"], place["port"]
    try:
        first = socket.create_connection((host, port), timeout=ARRIVAL)
        first.sendall(HELLO.pack(bytes.fromhex(place["word"]), wire.rank))
    except OSError as error:
        raise ClusterError(
            f"rank {wire.rank} cannot reach rank 0 at {host}, port {port} ({error}): the hostfile must name an "
            "address of the first machine that the others can reach"
        ) from error
    return Link(wire.rank, wire.ranks, {0: first})


def _await_all(wire: Wire) -> Link:
    host, word = _own_host(), secrets.token_bytes(16)
    sockets: dict[int, socket.socket] = {}
    try:
        door = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        problem = f"rank 0 cannot listen at {host} ({error}): the hostfile must name an address of its own"
        _share(wire, {"problem": problem})
        raise ClusterError(problem) from error
    with door:
        door.settimeout(ARRIVAL)
        _share(wire, {"host": host, "port": door.getsockname()[1], "word": word.hex()})
        while missing := [rank for rank in range(1, wire.ranks) if rank not in sockets]:
            try:
                place, _ = door.accept()
            except TimeoutError as error:
                raise ClusterError(
                    f"rank {missing[0]} has not reached rank 0 at {host} in {ARRIVAL:.0f} s"
                ) from error
            with suppress(OSError, EOFError):  # a stranger may say anything, or nothing
                place.settimeout(SILENCE)
                said, rank = HELLO.unpack(_exactly(place, HELLO.size))
                if hmac.compare_digest(said, word):
                    sockets[rank] = place
    return Link(0, wire.ranks, sockets)


def _exactly(place: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = place.recv(size - len(got))
        if not more:
            raise EOFError
        got += more
    return got


def _share(wire: Wire, place: dict[str, Any]) -> dict[str, Any]:
    """What the first rank says, on every rank."""
    said = mx.array(list(json.dumps(place).encode().ljust(PLACE)), mx.uint8)
    told: Any = wire.gather(said)[0].tolist()
    return dict(json.loads(bytes(told)))


def _own_host() -> str:
    """The first machine's address, as `mlx.launch` has told the others. One of IPv6 may stand in brackets."""
    if hostfile := os.environ.get("MLX_HOSTFILE"):
        address = str(json.loads(Path(hostfile).read_text())[0][0])
    else:
        address = os.environ.get("MLX_JACCL_COORDINATOR", "")
    host = address.rpartition(":")[0].strip("[]")  # the rest is the port
    return host or os.environ.get("NCCL_HOST_IP") or socket.gethostname()
