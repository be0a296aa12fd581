"""Read model cards, find the one of a model, and decide whether and how far its head drafts."""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import CheckpointError
from ..limits import DEFAULT_K, MAX_HEAD_K

BUILTIN_CARDS = Path(__file__).parent
Made = TypeVar("Made", bound=BaseModel)
OFF = ("0", "false", "no", "off")  # values of HEADSTART_MTP
FamilyName = Literal[
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "mimo", "mimo_v2_flash",
    "deepseek_v32", "glm_moe_dsa", "glm5_next", "bailing_hybrid", "step3p5", "step3p7", "exaone_moe", "nemotron_h",
    "ernie4_5_moe", "longcat_flash", "llama", "mistral3", "ministral3", "qwen2", "qwen3", "qwen3_moe", "gemma4",
    "qwen4_exp", "deepseek_v4",
]  # fmt: skip
Capability = Literal["text", "vision", "thinking", "tools"]
Positive = Annotated[int, Field(ge=1)]


class StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NativeMtp(StrictModel):
    """The model's own multi-token-prediction head."""

    num_layers: Positive
    default_k: Positive
    max_k: Annotated[int, Field(ge=1, le=MAX_HEAD_K)]
    acceptance: tuple[float, ...] = ()  # share of rounds that accept so many drafts, where it was measured
    trained_on: str | None = None

    @model_validator(mode="after")
    def _in_order(self) -> "NativeMtp":
        if self.default_k > self.max_k:
            raise ValueError(f"default_k {self.default_k} is above max_k {self.max_k}")
        return self


class Sampling(StrictModel):
    """Sampling parameters that the makers recommend, by the names of SamplingParams; None where they name none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None


class SamplingDefaults(StrictModel):
    thinking: Sampling | None = None
    not_thinking: Sampling | None = None

    def params(self, *, thinking: bool) -> dict[str, Any]:
        """Return one recommendation as fields of SamplingParams, or the other where there is only that."""
        first, second = self.thinking, self.not_thinking
        chosen = (first or second) if thinking else (second or first)
        return chosen.model_dump(exclude_none=True) if chosen else {}


class Gain(StrictModel):
    """How much faster drafts make decoding."""

    speed: Annotated[float, Field(gt=0)]  # relative to k = 0
    kind: Literal["measured", "expected"]
    basis: str  # what was run


class Card(StrictModel):
    name: str
    hub_id: str | None = None
    also: tuple[str, ...] = ()  # other ids of the same model: other precisions, conversions
    original: str | None = None  # id of the release that has the head
    family: FamilyName
    parameters: str | None = None  # as the makers round them, e.g. "35B"
    active_parameters: str | None = None
    context_length: Positive | None = None
    capabilities: tuple[Capability, ...] = ()
    native_mtp: NativeMtp | None = None
    drafter: str | None = None  # hub id of a block drafter that was made for it
    gain: Gain | None = None
    sampling_defaults: SamplingDefaults = SamplingDefaults()

    @property
    def names(self) -> set[str]:
        return {name.lower() for name in (self.name, self.hub_id, *self.also) if name}


def all_cards() -> list[Card]:
    """Return all cards. A card in the user's folder (~/.config/headstart/cards, or where the platform keeps
    configuration) replaces the built-in one of the same name."""
    user_cards = Path(typer.get_app_dir("headstart")) / "cards"
    paths = [*sorted(BUILTIN_CARDS.glob("*.toml")), *sorted(user_cards.glob("*.toml"))]
    return list({card.name.lower(): card for card in (_read(path, Card) for path in paths)}.values())


def find_card(name: str) -> Card | None:
    """Return the card of that name or hub id."""
    return next((card for card in all_cards() if name.lower() in card.names), None)


def match_card(ids: Iterable[str | None], folder: str, family: str) -> Card | None:
    """Return the card of a model on disk: by the hub ids known of it, else by the name of its folder."""
    cards = [card for card in all_cards() if card.family == family]
    for name in ids:
        if found := next((card for card in cards if name and name.lower() in card.names), None):
            return found
    # Qwen3.6-27B-4bit is a Qwen3.6-27B, but Qwen3.5-27B-4bit is not a Qwen3.5-2B.
    begins = [card for card in cards if re.match(rf"{re.escape(card.name)}(?![^\W_])", folder, re.IGNORECASE)]
    return max(begins, key=lambda card: len(card.name), default=None)


@dataclass(frozen=True)
class Dispatch:
    """Drafts per step by default and at most; both are 0 if the head does not draft, and `reason` says why."""

    k: int
    max_k: int
    reason: str | None = None
    copies: bool = True  # drafts may be copied from the context, also without a head; not if the user wants none

    @property
    def drafts(self) -> bool:
        return self.reason is None


def dispatch(
    card: Card | None,
    *,
    own: NativeMtp | None = None,
    promised: int,
    unusable: str | None,
    mtp: bool | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Dispatch:
    """Decide whether the head drafts, and how far. A request may ask for less: the engine honours that.

    Args:
        own: The card that came with the head itself, before the model's.
        promised: Number of head modules that config.json declares.
        unusable: Why the local weights have no usable head, or None.
        mtp: What the user asked for; None leaves it to the environment (`HEADSTART_MTP=0`).
    """
    declared = own or (card.native_mtp if card else None)
    if not declared and not promised:
        return Dispatch(0, 0, "neither the model card nor config.json declares an MTP head")
    if mtp is False:
        return Dispatch(0, 0, "loaded without the head", copies=False)
    if mtp is None and environment.get("HEADSTART_MTP", "").strip().lower() in OFF:
        return Dispatch(0, 0, "switched off by HEADSTART_MTP", copies=False)
    if unusable:
        return Dispatch(0, 0, unusable)
    return Dispatch(declared.default_k, declared.max_k) if declared else Dispatch(DEFAULT_K, MAX_HEAD_K)


def read_head_card(path: Path) -> NativeMtp:
    """Return the card of a head that `train-head` has written."""
    return _read(path, NativeMtp)


def _read(path: Path, kind: type[Made]) -> Made:
    try:
        return kind.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a model card ({error}). Fix or delete it.") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the card"
        raise CheckpointError(f"{path}: {field}: {first['msg']}. Fix or delete the card.") from error
