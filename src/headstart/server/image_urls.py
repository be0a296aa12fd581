"""Fetch images from the network for clients, where `--allow-image-urls` lets them: bounded in size and time, and from
public addresses only, so that no client can reach what only this machine can.

A name is resolved once, and the connection goes to the address that was checked. Every redirect is checked anew.
"""

import asyncio
import socket
import ssl
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

import h11

MAX_BYTES = 20 * 2**20
SECONDS = 10.0  # for an image, with its redirects
MAX_REDIRECTS = 3
NAT64 = IPv6Network("64:ff9b::/96")  # carries IPv4 addresses of any kind


class Fetched(NamedTuple):
    data: bytes
    media_type: str | None


async def fetch_image(url: str) -> Fetched:
    """Return the file at a URL. Raises ValueError with what is wrong."""
    try:
        async with asyncio.timeout(SECONDS):
            for _ in range(1 + MAX_REDIRECTS):
                found = await _get(url)
                if isinstance(found, Fetched):
                    return found
                url = urljoin(url, found)
    except TimeoutError:
        raise ValueError(f"could not be fetched within {SECONDS:g} s: send it as a data URL") from None
    except (OSError, h11.ProtocolError) as error:
        raise ValueError(f"could not be fetched ({type(error).__name__}): send it as a data URL") from error
    raise ValueError(f"could not be fetched: more than {MAX_REDIRECTS} redirects")


async def _get(url: str) -> Fetched | str:
    """Return the file, or where the server redirects to."""
    parts = urlsplit(url)
    host, secure = parts.hostname, parts.scheme == "https"
    if parts.scheme not in ("http", "https") or not host or parts.username is not None or not url.isascii():
        raise ValueError("is not at an http or https URL of a plain host")
    port = parts.port or (443 if secure else 80)
    address = await _public_address(host, port)
    reader, writer = await asyncio.open_connection(
        address, port, ssl=ssl.create_default_context() if secure else None, server_hostname=host if secure else None
    )
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = [
            ("Host", parts.netloc),
            ("User-Agent", "headstart"),
            ("Accept", "image/*"),
            ("Connection", "close"),
        ]
        connection = h11.Connection(h11.CLIENT)
        request = h11.Request(method="GET", target=target, headers=headers)
        writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        return await _read_response(reader, connection)
    finally:
        writer.close()


async def _read_response(reader: asyncio.StreamReader, connection: h11.Connection) -> Fetched | str:
    data, media_type = bytearray(), None
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(2**16))
        elif isinstance(event, h11.Response):
            headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
            if event.status_code in (301, 302, 303, 307, 308) and "location" in headers:
                return headers["location"]
            if event.status_code != 200:
                raise ValueError(f"could not be fetched: the server answers {event.status_code}")
            media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        elif isinstance(event, h11.Data):
            data += event.data
            if len(data) > MAX_BYTES:
                raise ValueError(f"has more than {MAX_BYTES:,} bytes: scale it down")
        elif isinstance(event, h11.EndOfMessage):
            return Fetched(bytes(data), media_type if media_type and media_type.startswith("image/") else None)
        elif not isinstance(event, h11.InformationalResponse):
            raise ValueError("could not be fetched: the server ends the connection")


async def _public_address(host: str, port: int) -> str:
    """Return an address of a host; refuse one that has any address which is not public."""
    addresses = await resolve_host(host, port)
    if not addresses or not all(map(is_public, addresses)):
        raise ValueError("is at an address that is not public, which this server does not connect to")
    return addresses[0]


async def resolve_host(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Return whether an address is neither of this machine nor of a private or special network."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    found = getattr(found, "ipv4_mapped", None) or found
    if isinstance(found, IPv6Address) and (found in NAT64 or found.sixtofour or found.teredo):
        return False
    return found.is_global and not found.is_multicast
