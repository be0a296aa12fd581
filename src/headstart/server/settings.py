"""What a server is set to."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .record import Recorder


@dataclass
class Limits:
    """What a client may send, and how long it may take. One object for the whole server, which a reload changes."""

    body_bytes: int = 16 * 2**20  # a context of 262,144 tokens is a megabyte or two
    image_bytes: int = 48 * 2**20  # that a body may have beyond that where the model sees images
    image_urls: bool = False  # fetch images from public addresses
    prompt_tokens: int | None = None  # None: what the model's context holds
    requests_per_client: int | None = None  # waiting or running at a time; a client is a key, or an address without
    request_seconds: float = 600.0  # from arrival to the last token
    stall_seconds: float = 60.0  # that a client may leave a response unread
    body_seconds: float = 60.0  # that a client may take to send its body
    prepare_seconds: float = 60.0  # that rendering, tokenising and compiling grammars may take
    grammar_seconds: float = 3.0  # of CPU time that the trial of a new grammar may take
    idle_seconds: float = 60.0  # that a connection may be without a request, or with incomplete headers
    recorder: "Recorder | None" = None  # keeps conversations
    connections: int | None = None  # None: 2,048, or as many as the limit on open files allows
