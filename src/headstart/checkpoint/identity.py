"""Which model is this? Its files do not say; where they lie, what their README says and the cards may."""

import re
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from huggingface_hub import metadata_load

from .. import cards

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def hub_id(path: Path) -> str | None:
    """org/name of a model that lies in the Hugging Face cache."""
    snapshots = path.absolute().parent
    repo = snapshots.parent.name
    if snapshots.name != "snapshots" or not repo.startswith("models--"):
        return None
    return repo.removeprefix("models--").replace("--", "/", 1)


def base_model(path: Path) -> str | None:
    """The id of the model that this one was made from, as its README says."""
    try:
        found = (metadata_load(path / "README.md") or {}).get("base_model")
    except (OSError, ValueError, yaml.YAMLError, RecursionError):  # nobody else's README need be in order
        return None
    first = found[0] if isinstance(found, list) and found else found
    # It is shown as part of a command: nothing that a shell or a terminal would act on.
    return first if isinstance(first, str) and HUB_ID.fullmatch(first) else None


def card(path: Path, family: str) -> cards.Card | None:
    return cards.match_card((hub_id(path), base_model(path)), path.absolute().name, family)


def release(path: Path, family: str) -> str | None:
    """The id of a model as released: the cache's, or that of the card with exactly its folder's name. A longer name
    may be a fine-tune's."""
    named = cards.find_card(path.absolute().name)
    return hub_id(path) or (named.hub_id if named and named.family == family else None)


def original(path: Path, family: str) -> str | None:
    """The id of the release that a conversion was made from."""
    found = base_model(path)
    if found is None and (known := card(path, family)):
        found = known.original
    return found
