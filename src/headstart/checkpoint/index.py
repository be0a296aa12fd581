"""model.safetensors.index.json: which file holds which tensor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .untrusted import Malformed, checked_file, checked_name, read_object

INDEX = "model.safetensors.index.json"
REMEDY = "Download it again; in a cache, delete it first."


def read_index(folder: Path) -> dict[str, Any] | None:
    """Return the index with its names checked: every file is in the folder or below it. None without an index."""
    file = folder / INDEX
    try:
        index = read_object(file, REMEDY)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise Malformed("not an index of tensors: weight_map is not a JSON object")
        metadata = index.get("metadata") or {}
        if not isinstance(metadata, dict) or type(metadata.get("total_size", 0)) not in (int, float):
            raise Malformed("metadata is not a JSON object with a number as its total_size")
        index["weight_map"] = {
            checked_name(name, "a tensor"): checked_file(place, f"weight_map.{checked_name(name, 'a tensor')}")
            for name, place in weight_map.items()
        }
    except FileNotFoundError:
        return None
    except Malformed as error:
        raise CheckpointError(f"{file}: {error}. {REMEDY}") from error
    return index


def shards(folder: Path, holds: Callable[[str], bool]) -> list[str]:
    """Return the files that hold tensors of a kind, as the index has it."""
    index = read_index(folder)
    if index is None:
        return ["model.safetensors"]
    return sorted({file for name, file in index["weight_map"].items() if holds(name)})
