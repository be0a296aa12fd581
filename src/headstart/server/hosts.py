"""The names a server may be called by.

A web page can give its own host name the address 127.0.0.1 (DNS rebinding); to the browser this server is then part
of that page's origin, and its answers may be read. What gives such a request away is its Host header.
"""

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self.any or scope["path"] in EXEMPT or self._accepts(scope):
            await self.app(scope, receive, send)
            return
        name = name_of(Headers(scope=scope)["host"])[:100]
        message = (
            f"host {name!r} is not allowed: start the server with --allowed-host and that name, or use localhost"
        )
        await Refusal(421, message, code="host_not_allowed").response(scope["path"])(scope, receive, send)

    def _accepts(self, scope: Scope) -> bool:
        host, arrived_at = Headers(scope=scope).get("host"), scope.get("server")
        if host is None or (name := name_of(host)) in self.names or is_loopback(name):
            return True
        address = _address(name)
        return address is not None and arrived_at is not None and address == _address(arrived_at[0])


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
