"""The names a server may be called by.

A web page can give its own host name the address 127.0.0.1 (DNS rebinding); to the browser this server is then part
of that page's origin, and its answers may be read. What gives such a request away is its Host header.
"""

import ipaddress
from collections.abc import Collection
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import Refusal

ANY = "*"
EXEMPT = ("/health", "/metrics")  # probes call by any name, and learn only the model's name and its load
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class HostRequired:
    """Refuse requests to another host: not a loopback name, the address they arrived at, nor one of `names`.

    HTTP/1.0 requests need not have a Host header. Those without one are accepted: browsers always send it.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] = ()):
        self.app = app
        self.any, self.names = ANY in names, {name_of(name) for name in names}
        self.accepts = lru_cache(256)(self._accepts)  # clients use few names, and many times

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = next((value[:300] for name, value in scope.get("headers", ()) if name == b"host"), None)
        arrived_at, _ = scope.get("server") or ("", None)
        if host is None or self.any or scope["path"] in EXEMPT or self.accepts(host, arrived_at):
            await self.app(scope, receive, send)
            return
        name = name_of(host.decode("latin-1"))[:100]
        message = (
            f"host {name!r} is not allowed: start the server with --allowed-host and that name, or use localhost"
        )
        await Refusal(421, message, code="host_not_allowed").response(scope["path"])(scope, receive, send)

    def _accepts(self, host: bytes, arrived_at: str) -> bool:
        name = name_of(host.decode("latin-1"))
        address = _address(name)
        return name in self.names or is_loopback(name) or (address is not None and address == _address(arrived_at))


def hosts_for(bound: str, named: Collection[str], *, key: bool) -> Collection[str]:
    """Return the names to accept for a server that listens on `bound`, where the user allowed those in `named`.

    Beyond this machine a server with keys accepts any name unless told otherwise: people call it by names that it
    cannot know, and a page without the key gets nothing from it.
    """
    if key and not named and not is_loopback(bound):
        return (ANY,)
    return (bound, *named)


def is_loopback(name: str) -> bool:
    address = _address(name)
    return name == "localhost" if address is None else address.is_loopback


def name_of(host: str) -> str:
    """Return the name in a Host header, without the port and in lower case."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
    elif host.count(":") == 1:
        name, _, port = host.partition(":")
    else:  # an IPv6 address that a user named without brackets
        name, port = host, ""
    return name.lower().removesuffix(".") if port.removeprefix(":").isdecimal() or port in ("", ":") else host


def _address(name: str) -> Address | None:
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
