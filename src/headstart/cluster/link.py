"""Sockets between rank 0 and the other ranks: for the leader's decisions, and to notice ranks that are gone.

`mx.distributed` cannot do the latter: on some backends a collective waits for ever for a machine that died, and none
tells which one it was. A socket tells at once, and a missing heartbeat tells of a machine that hangs.

Only rank 0's messages are pickled. What the others send is JSON.
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
from .communicator import Communicator

HEARTBEAT = 1.0  # seconds between two heartbeats
SILENCE = 8.0  # seconds without a message after which a rank is lost
STUCK = 120.0  # seconds that an iteration may take
CONNECT = 60.0  # seconds for all ranks to connect
GRACE = 2.0  # seconds before a failed rank reports itself: the cause may be the loss of another
ADDRESS_BYTES = 1024

HEADER = struct.Struct("!cI")  # kind of message, bytes that follow
HEARTBEAT_KIND, DECISION, CHECKSUM, ABORT, CLOSE = b"h", b"d", b"s", b"a", b"c"
HELLO = struct.Struct("!16sI")  # shared secret, rank


class Link:
    """One rank's end of the sockets. `on_abort` is called with the reason before the process ends."""

    def __init__(self, rank: int, ranks: int, sockets: dict[int, socket.socket]):
        self.rank, self.ranks = rank, ranks
        self.on_abort: Callable[[str], None] = lambda reason: None
        self.iterations = dict.fromkeys(range(ranks), 0)  # finished, by rank
        self._started: float | None = None  # when the current iteration began
        self._sockets = sockets
        self._sending = {peer: Lock() for peer in sockets}
        self._decisions: SimpleQueue[Any] = SimpleQueue()
        self._checksums: dict[int, dict[int, int]] = {}  # by step, then rank
        self._checking = Lock()
        self._ending = Lock()
        self._closing = False
        for peer, connection in sockets.items():
            connection.settimeout(SILENCE)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A thread each: a rank that reads nothing must not delay the heartbeats of others.
            Thread(target=self._listen, args=(peer,), name=f"rank {peer}", daemon=True).start()
            Thread(target=self._send_heartbeats, args=(peer,), name=f"heartbeat {peer}", daemon=True).start()

    def broadcast(self, decision: object) -> None:
        """Send a decision of rank 0 to all others."""
        body = pickle.dumps(decision)
        for peer in self._sockets:
            self._send(peer, DECISION, body)

    def receive(self) -> Any:
        """Return rank 0's next decision; None when it has closed."""
        return self._decisions.get()

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Mark work that all ranks do at the same time. The cluster ends if it takes longer than STUCK."""
        self._started = time.monotonic()
        yield
        self.iterations[self.rank] += 1
        self._started = None

    def check(self, step: int, checksum: int) -> None:
        """Compare a step's output with that of the other ranks. The cluster ends if they differ."""
        if self.rank:
            self._send(0, CHECKSUM, json.dumps([step, checksum]).encode())
        else:
            self._compare(0, step, checksum)

    def abort(self, rank: int, reason: str) -> NoReturn:
        """End the cluster because of `rank`, and this process: its engine may be in a collective that never ends."""
        message = f"rank {rank} of {self.ranks} {reason}"
        with self._ending:
            try:
                for peer in sorted(self._sockets, key=lambda peer: peer == rank):  # last the one that may not read
                    self._send(peer, ABORT, json.dumps([rank, reason]).encode())
                with suppress(OSError, ValueError):  # standard error may be closed
                    os.write(sys.stderr.fileno(), f"error: {message}\n".encode())
                self.on_abort(message)
            finally:
                os._exit(1)

    def fail(self, error: Exception) -> NoReturn:
        """End the cluster because this rank failed, unless a listener finds within GRACE that another is lost."""
        time.sleep(GRACE)
        cause = f", because of {error.__cause__!r}" if error.__cause__ is not None else ""
        self.abort(self.rank, f"failed: {type(error).__name__}: {error}{cause}")

    def close(self, error: BaseException | None = None) -> None:
        """Leave the cluster, or end it if there was an error."""
        with self._ending:  # if another thread is ending the process, do not exit before it
            self._closing = True
        kind, body = CLOSE, b""
        if error is not None:
            reason = f"failed: {error}" if isinstance(error, Exception) else "was stopped"
            kind, body = ABORT, json.dumps([self.rank, reason]).encode()
        for peer, connection in self._sockets.items():
            self._send(peer, kind, body)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def _send(self, peer: int, kind: bytes, body: bytes) -> None:
        # An error means that the peer is gone: the thread that listens to it reports that.
        with suppress(OSError), self._sending[peer]:
            self._sockets[peer].sendall(HEADER.pack(kind, len(body)) + body)

    def _send_heartbeats(self, peer: int) -> None:
        while not self._closing:
            self._send(peer, HEARTBEAT_KIND, json.dumps(self.iterations[self.rank]).encode())
            started = self._started
            if self.rank == 0 and started is not None and time.monotonic() - started > STUCK:
                # Rank 0 is nearly always among those behind, since it waits for the others, so it is named last.
                behind = min(self.iterations, key=lambda rank: (self.iterations[rank], rank == 0))
                self.abort(behind, f"has not finished an iteration for {STUCK:.0f} s")
            time.sleep(HEARTBEAT)

    def _listen(self, peer: int) -> None:
        try:
            while True:
                kind, size = HEADER.unpack(_read(self._sockets[peer], HEADER.size))
                body = _read(self._sockets[peer], size)
                if kind == HEARTBEAT_KIND:
                    self.iterations[peer] = int(json.loads(body))
                elif kind == CHECKSUM:
                    self._compare(peer, *json.loads(body))
                elif kind == ABORT and not self._closing:  # a closing rank reports its own reason
                    self.abort(*json.loads(body))
                elif kind == DECISION and peer == 0:
                    self._decisions.put(pickle.loads(body))
                elif kind == CLOSE:
                    self._decisions.put(None)
                    return
        except TimeoutError:
            reason = f"has been silent for {SILENCE:.0f} s"
        except (OSError, EOFError):
            reason = "is gone: its process ended, or its machine or the connection to it"
        except Exception as error:  # a message of another version
            reason = f"sent an invalid message ({type(error).__name__}: {error}): use the same version everywhere"
        if not self._closing:
            self.abort(peer, reason)

    def _compare(self, rank: int, step: int, checksum: int) -> None:
        with self._checking:
            known = self._checksums.setdefault(step, {})
            known[rank] = checksum
            different = [other for other in known if 0 in known and known[other] != known[0]]
            if len(known) == self.ranks:
                del self._checksums[step]
        if different:
            self.abort(different[0], f"generated other tokens than rank 0 in step {step}: use machines of one kind")


def connect(comm: Communicator) -> Link:
    """Connect all ranks to rank 0. Its address and a shared secret are sent through `comm`."""
    if comm.rank == 0:
        return _accept_all(comm)
    address = _broadcast_json(comm, {})
    if "problem" in address:
        raise ClusterError(address["problem"])
    host, port = address["host"], address["port"]
    try:
        leader = socket.create_connection((host, port), timeout=CONNECT)
        leader.sendall(HELLO.pack(bytes.fromhex(address["secret"]), comm.rank))
    except OSError as error:
        raise ClusterError(
            f"rank {comm.rank} cannot reach rank 0 at {host}, port {port} ({error}): the hostfile must name an "
            "address of the first machine that the others can reach"
        ) from error
    return Link(comm.rank, comm.ranks, {0: leader})


def _accept_all(comm: Communicator) -> Link:
    host, secret = _own_host(), secrets.token_bytes(16)
    sockets: dict[int, socket.socket] = {}
    try:
        server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        problem = f"rank 0 cannot listen at {host} ({error}): the hostfile must name an address of its own"
        _broadcast_json(comm, {"problem": problem})
        raise ClusterError(problem) from error
    with server:
        server.settimeout(CONNECT)
        _broadcast_json(comm, {"host": host, "port": server.getsockname()[1], "secret": secret.hex()})
        while missing := [rank for rank in range(1, comm.ranks) if rank not in sockets]:
            try:
                connection, _ = server.accept()
            except TimeoutError as error:
                raise ClusterError(f"rank {missing[0]} did not connect to {host} within {CONNECT:.0f} s") from error
            with suppress(OSError, EOFError):  # a stranger may send anything, or nothing
                connection.settimeout(SILENCE)
                received, rank = HELLO.unpack(_read(connection, HELLO.size))
                if hmac.compare_digest(received, secret):
                    sockets[rank] = connection
    return Link(0, comm.ranks, sockets)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _broadcast_json(comm: Communicator, value: dict[str, Any]) -> dict[str, Any]:
    """Return rank 0's value on every rank."""
    padded = mx.array(list(json.dumps(value).encode().ljust(ADDRESS_BYTES)), mx.uint8)
    received: Any = comm.gather(padded)[0].tolist()
    return dict(json.loads(bytes(received)))


def _own_host() -> str:
    """Return rank 0's address as `mlx.launch` has given it to the others. IPv6 may be in brackets."""
    if hostfile := os.environ.get("MLX_HOSTFILE"):
        address = str(json.loads(Path(hostfile).read_text())[0][0])
    else:
        address = os.environ.get("MLX_JACCL_COORDINATOR", "")
    host = address.rpartition(":")[0].strip("[]")  # without the port
    return host or os.environ.get("NCCL_HOST_IP") or socket.gethostname()
