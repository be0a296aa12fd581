"""A card and where cards are found."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import CheckpointError
from ..limits import MAX_K

OURS = Path(__file__).parent
Capability = Literal["text", "vision", "thinking", "tools"]
Positive = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NativeMtp(Strict):
    """The model's own multi-token-prediction head."""

    num_layers: Positive
    default_k: Positive
    max_k: Annotated[int, Field(ge=1, le=MAX_K)]

    @model_validator(mode="after")
    def _in_order(self) -> "NativeMtp":
        if self.default_k > self.max_k:
            raise ValueError(f"default_k {self.default_k} is above max_k {self.max_k}")
        return self


class Sampling(Strict):
    """What the makers recommend, by the names of SamplingParams; what they do not name is left out."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None


class SamplingDefaults(Strict):
    thinking: Sampling | None = None
    not_thinking: Sampling | None = None


class Card(Strict):
    name: str
    hub_id: str | None = None
    also: tuple[str, ...] = ()  # other ids of the same model: other precisions, conversions
    original: str | None = None  # the id of the release that still has the head
    family: Literal["qwen3_5", "qwen3_5_moe", "qwen3_next"]
    parameters: str | None = None  # as the makers round them, e.g. "35B"
    active_parameters: str | None = None
    context_length: Positive | None = None
    capabilities: tuple[Capability, ...] = ()
    native_mtp: NativeMtp | None = None
    sampling_defaults: SamplingDefaults = SamplingDefaults()

    @property
    def names(self) -> set[str]:
        return {name.lower() for name in (self.name, self.hub_id, *self.also) if name}


def folder_of_the_user() -> Path:
    """~/.config/headstart/cards, or where the platform keeps such things."""
    return Path(typer.get_app_dir("headstart")) / "cards"


def known() -> list[Card]:
    """All cards; one of the user's takes the place of ours with the same name."""
    by_name = {card.name.lower(): card for card in _in_folder(OURS) + _in_folder(folder_of_the_user())}
    return list(by_name.values())


def named(name: str) -> Card | None:
    """The card of that name or hub id."""
    return next((card for card in known() if name.lower() in card.names), None)


def matching(ids: Iterable[str | None], folder: str, family: str) -> Card | None:
    """The card of a model on disk: by the hub ids that are known of it, else by the name of its folder."""
    cards = [card for card in known() if card.family == family]
    for name in ids:
        if found := next((card for card in cards if name and name.lower() in card.names), None):
            return found
    # Qwen3.6-27B-4bit is a Qwen3.6-27B, Qwen3.5-27B-4bit is no Qwen3.5-2B.
    begins = [card for card in cards if re.match(rf"{re.escape(card.name)}(?![^\W_])", folder, re.IGNORECASE)]
    return max(begins, key=lambda card: len(card.name), default=None)


def _in_folder(folder: Path) -> list[Card]:
    return [_read(path) for path in sorted(folder.glob("*.toml"))]


def _read(path: Path) -> Card:
    try:
        return Card.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a model card ({error}). Mend or delete it.") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the card"
        raise CheckpointError(f"{path}: {field}: {first['msg']}. Mend or delete the card.") from error
