"""Does the head draft, and how far?

It does by default when the card or config.json declares a head, the local weights hold a usable one, and nobody
opted out: not the command line (`--no-mtp`), not the environment (`HEADSTART_MTP=0`). A request may opt out for
itself, or ask for less: that is the engine's to heed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..limits import DEFAULT_K, MAX_K
from .card import Card

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
    mtp: bool | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Dispatch:
    """`promised`: modules of a head in config.json. `unusable`: why the local weights have no usable head, or None.
    `mtp`: what the user says; None leaves it to the environment."""
    declared = card.native_mtp if card else None
    reason = None
    if not declared and not promised:
        reason = "neither the model card nor config.json declares an MTP head"
    elif mtp is False:
        reason = "loaded without the head"
    elif mtp is None and environment.get("HEADSTART_MTP", "").strip().lower() in OFF:
        reason = "switched off by HEADSTART_MTP"
    elif unusable:
        reason = unusable
    if reason:
        return Dispatch(0, 0, reason)
    return Dispatch(declared.default_k, declared.max_k) if declared else Dispatch(DEFAULT_K, MAX_K)
