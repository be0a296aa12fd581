"""Gemma 4's assistants on disk: a folder with a config.json of their own, around the text part of a small Gemma 4."""

from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from .. import models
from ..errors import DrafterError, printable_error
from ..kernels.norms import use_float32_norms
from ..models.assistant import Assistant, AssistantSpec, AssistantWeights
from .config import ASSISTANTS, MAX_SIZE, REMEDY

RELEASED = "model."  # prefix of the small Gemma's own tensors
OWN = ("embed_tokens.", "layers.", "norm.")
KINDS = {"full_attention", "sliding_attention"}


def is_assistant(config: dict[str, Any]) -> bool:
    """Return whether a config.json, as `read_config` returns it, is an assistant's."""
    return config.get("drafter") in ASSISTANTS


def released_name(name: str) -> str:
    return f"{RELEASED}{name}" if name.startswith(OWN) else name


def expected_assistant(path: Path, config: dict[str, Any]) -> Assistant:
    """Return the assistant that config.json describes, not computed."""
    file = path / "config.json"
    if problem := _config_problem(config):
        raise DrafterError(f"{file}: {problem}. Download the assistant again.")
    try:
        spec = AssistantSpec.of(config)
        weights = AssistantWeights(config["text_config"], spec)
    except Exception as error:  # whatever mlx-lm raises, only the config can be its cause
        raise DrafterError(f"{file}: a field is missing or wrong ({printable_error(error)}). {REMEDY}") from error
    use_float32_norms(weights)
    return Assistant(spec, weights)


def check_assistant(folder: Path, own: dict[str, Any], path: Path, config: dict[str, Any]) -> None:
    """Refuse an assistant that was made for another model than the one at `path`."""
    if models.FAMILIES[config["model_type"]].name != "gemma4":
        raise DrafterError(f"{folder}: drafts for a Gemma 4, and {path} is none. Name a drafter made for this model.")
    ours, theirs = models.text_config(config), own["text_config"]
    pairs = {"backbone_hidden_size": (own["backbone_hidden_size"], ours["hidden_size"])}
    pairs["vocab_size"] = theirs["vocab_size"], ours["vocab_size"]
    for name in ("head_dim", "global_head_dim"):
        pairs[name] = theirs[name], ours[name]
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            raise DrafterError(
                f"{folder}: a drafter for another model: its {name} is {found}, and {path} needs {wanted}. "
                "Name the assistant that was released for this model."
            )
    heads = {_key_heads(ours, kind) for kind in theirs["layer_types"]}
    if odd := next((each for each in heads if theirs["num_attention_heads"] % each), None):
        raise DrafterError(
            f"{folder}: a drafter for another model: its {theirs['num_attention_heads']} heads cannot share "
            f"the {odd} of keys that {path} has. Name the assistant that was released for this model."
        )


def _key_heads(text: dict[str, Any], kind: str) -> int:
    full = text.get("num_global_key_value_heads") if kind == "full_attention" and text["attention_k_eq_v"] else None
    return int(full or text["num_key_value_heads"])


def _config_problem(config: dict[str, Any]) -> str | None:
    """Return what is wrong with the fields that are an assistant's own."""
    text, kinds = config["text_config"], config["text_config"].get("layer_types")
    limits = {"backbone_hidden_size": MAX_SIZE}
    if config.get("use_ordered_embeddings"):
        limits |= {"num_centroids": text["vocab_size"], "centroid_intermediate_top_k": config.get("num_centroids", 0)}
    for name, most in limits.items():
        if type(value := config.get(name)) is not int or not 1 <= value <= most:
            return f"{name} is {shortened(value)}; it must be a whole number from 1 to {most:,}"
    if config.get("use_ordered_embeddings") and text["vocab_size"] % config["num_centroids"]:
        return f"num_centroids is {config['num_centroids']}, and vocab_size, {text['vocab_size']}, no multiple of it"
    if not isinstance(kinds, list) or len(kinds) != text["num_hidden_layers"] or not {*map(str, kinds)} <= KINDS:
        return f"layer_types is {shortened(kinds)}; it must name {' or '.join(sorted(KINDS))} for every layer"
    return None
