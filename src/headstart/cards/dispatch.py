"""Does the head draft? `headstart models` asks here; the engine does not yet.

It does by default when the card or config.json declares a head, the local weights hold a usable one, and nobody
opted out: not the command line (`--no-mtp`), not the environment (`HEADSTART_MTP=0`), not the request.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import RequestError
from .card import Card

DEFAULT_K, MAX_K = 2, 8  # where no card says better
OFF = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Dispatch:
    """`k` drafts a round by default and at most `max_k`; both 0 when the head does not draft, and then why."""

    k: int
    max_k: int
    reason: str | None = None

    @property
    def drafts(self) -> bool:
        return self.reason is None


def dispatch(
    card: Card | None,
    *,
    promised: int,
    unusable: str | None,
    no_mtp: bool = False,
    request_k: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Dispatch:
    """`promised`: modules of a head in config.json. `unusable`: why the local weights have no usable head, or None.
    `request_k`: what a request asks for; 0 opts out, None leaves it to us, more than `max_k` is a RequestError."""
    declared = card.native_mtp if card else None
    reason = None
    if not declared and not promised:
        reason = "neither the model card nor config.json declares an MTP head"
    elif unusable:
        reason = unusable
    elif no_mtp:
        reason = "switched off by --no-mtp"
    elif environment.get("HEADSTART_MTP", "").strip().lower() in OFF:
        reason = "switched off by HEADSTART_MTP"
    elif request_k == 0:
        reason = "the request asks for k = 0"
    if reason:
        return Dispatch(0, 0, reason)
    default_k, max_k = (declared.default_k, declared.max_k) if declared else (DEFAULT_K, MAX_K)
    if request_k is not None and request_k > max_k:
        raise RequestError(f"k is {request_k}: {card.name if card else 'this model'} drafts at most {max_k} a round")
    return Dispatch(request_k or default_k, max_k)
