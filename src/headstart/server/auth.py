"""Who may come in. Without keys the door is open, and the server should not be seen from outside."""

from collections.abc import Collection
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import RequestError
from .errors import Refusal
from .hosts import is_loopback

OPEN = ("/", "/health", "/metrics")  # the dashboard's page asks for the key
OPEN_BELOW = "/assets/"


class Keys:
    """The keys that open the door, kept as digests. Every one is compared, in constant time."""

    def __init__(self, keys: Collection[str] = ()):
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in keys):
            raise RequestError("api_key: a key is printable ASCII without spaces around it, and not empty")
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def open_to(self, headers: Headers) -> bool:
        given = _digest(_key(headers))
        return any([compare_digest(given, digest) for digest in self._digests]) or not self._digests  # noqa: C419


class KeyRequired:
    """Turns away who brings no key, before a byte of the body is read."""

    def __init__(self, app: ASGIApp, keys: Keys):
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]) and not self.keys.open_to(Headers(scope=scope)):
            way_out = "send one as `Authorization: Bearer …` or `x-api-key`"
            refusal = Refusal(401, f"no valid API key: {way_out}", code="invalid_api_key")
            await refusal.response(scope["path"])(scope, receive, send)
            return
        await self.app(scope, receive, send)


def check_reach(host: str, keys: Keys, *, no_key: bool) -> None:
    """Refuse to be seen by others without a key."""
    if not keys and not no_key and not is_loopback(host):
        raise RequestError(
            f"host {host} can be reached from other machines, and there is no key: set --api-key or "
            "HEADSTART_API_KEY, or say --no-key if everyone there may use this server"
        )


def client_of(scope: Scope, keys: Keys) -> str:
    """Who is to be treated fairly: the owner of a key, or a machine where none is needed and any would do."""
    if keys:
        return _digest(_key(Headers(scope=scope))).hex()
    client: tuple[str, int] | None = scope.get("client")
    return client[0] if client else ""


def _is_open(path: str) -> bool:
    return path in OPEN or path.startswith(OPEN_BELOW)


def _key(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
