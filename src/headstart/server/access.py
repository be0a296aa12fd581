"""Who may call the server: API keys and host names.

A web page can give its own host name the address 127.0.0.1 (DNS rebinding); to the browser this server is then part
of that page's origin, and the page may read its responses. The Host header gives such requests away.
"""

import ipaddress
from collections.abc import Collection
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import RequestError
from .errors import Refusal

NO_KEY_PATHS = ("/", "/health", "/metrics")  # the dashboard's page asks for the key
NO_KEY_PREFIX = "/assets/"
PROBE_PATHS = ("/health", "/metrics")  # probes use any host name, and learn only the model's name and its load
ANY_HOST = "*"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Keys:
    """The valid API keys, kept as digests. Each one is compared, in constant time."""

    def __init__(self, keys: Collection[str] = ()):
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in keys):
            raise RequestError("api_key: a key is printable ASCII without spaces around it, and not empty")
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def allows(self, headers: Headers) -> bool:
        """Return whether the headers hold a valid key. Without keys, every request is allowed."""
        given = _digest(_key(headers))
        return any([compare_digest(given, digest) for digest in self._digests]) or not self._digests  # noqa: C419


class KeyRequired:
    """Refuse requests without a valid key, before a byte of the body is read."""

    def __init__(self, app: ASGIApp, keys: Keys):
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self.keys.allows(Headers(scope=scope)):
            path = scope["path"]
            if path not in NO_KEY_PATHS and not path.startswith(NO_KEY_PREFIX):
                message = "no valid API key: send one as `Authorization: Bearer …` or `x-api-key`"
                raise Refusal(401, message, code="invalid_api_key")
        await self.app(scope, receive, send)


class HostRequired:
    """Refuse requests to another host: not a loopback name, the address they arrived at, nor one of `names`.

    HTTP/1.0 requests need not have a Host header. Those without one are accepted: browsers always send it.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] = ()):
        self.app = app
        self.any_host = ANY_HOST in names
        self.names = {host_name(name) for name in names}
        self.accepts = lru_cache(256)(self._accepts)  # clients use few names, and many times

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = next((value[:300] for name, value in scope.get("headers", ()) if name == b"host"), None)
        arrived_at, _ = scope.get("server") or ("", None)
        if host is None or self.any_host or scope["path"] in PROBE_PATHS or self.accepts(host, arrived_at):
            await self.app(scope, receive, send)
            return
        name = host_name(host.decode("latin-1"))[:100]
        remedy = "start the server with --allowed-host and that name, or use localhost"
        raise Refusal(421, f"host {name!r} is not allowed: {remedy}", code="host_not_allowed")

    def _accepts(self, host: bytes, arrived_at: str) -> bool:
        name = host_name(host.decode("latin-1"))
        address = _address(name)
        return name in self.names or is_loopback(name) or (address is not None and address == _address(arrived_at))


def check_reach(host: str, keys: Keys, *, no_key: bool) -> None:
    """Refuse to listen where other machines can connect without a key."""
    if not keys and not no_key and not is_loopback(host):
        raise RequestError(
            f"host {host} can be reached from other machines, and there is no key: set --api-key or "
            "HEADSTART_API_KEY, or pass --no-key if everyone there may use this server"
        )


def hosts_for(bound: str, named: Collection[str], *, key: bool) -> Collection[str]:
    """Return the host names to accept for a server that listens on `bound`, where the user allowed those in `named`.

    Beyond this machine a server with keys accepts any name unless `named` says otherwise: clients use names that it
    cannot know, and a page without the key gets nothing from it.
    """
    if key and not named and not is_loopback(bound):
        return (ANY_HOST,)
    return (bound, *named)


def client_of(scope: Scope, keys: Keys) -> str:
    """Return the client for fair scheduling: the owner of a key, or the address where no key is needed."""
    if keys:
        return _digest(_key(Headers(scope=scope))).hex()
    client: tuple[str, int] | None = scope.get("client")
    return client[0] if client else ""


def is_loopback(name: str) -> bool:
    address = _address(name)
    return name == "localhost" if address is None else address.is_loopback


def host_name(host: str) -> str:
    """Return the name in a Host header, without the port and in lower case."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
    elif host.count(":") == 1:
        name, _, port = host.partition(":")
    else:  # an IPv6 address without brackets, as users write it
        name, port = host, ""
    return name.lower().removesuffix(".") if port.removeprefix(":").isdecimal() or port in ("", ":") else host


def _address(name: str) -> Address | None:
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _key(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
