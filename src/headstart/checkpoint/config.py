"""Read config.json and the other JSON files of a checkpoint, and check them before anything else uses them.

Anybody may have written a downloaded file. A damaged or malicious one is a CheckpointError that names the file, never
a traceback, and never leads out of the model's folder.
"""

import json
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from reprlib import repr as shortened
from typing import Any

from .. import models
from ..errors import CheckpointError
from ..models.wrapped import context_length
from .transformers5 import missing_names

MAX_JSON = 100_000_000  # bytes; the safetensors library refuses longer headers too
MAX_DEPTH = 32  # real configs nest four levels deep
MAX_NAME = 1024  # characters of a tensor's or file's name

REMEDY = "Download it again, or take it from the original model."
MAX_SIZE = 2**31 - 1  # mlx's longest axis
MAX_LAYERS = 4096
# Fields that are sizes or counts, in every family; null or zero where a model has none of the kind.
SIZE = re.compile(r"(?:\w{1,32}_)?num_\w{1,64}|\w{1,64}_(?:size|dim|interval|step|position_embeddings)", re.ASCII)
POSITIVE = (
    "vocab_size", "hidden_size", "head_dim", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
OBJECTS = ("text_config", "quantization", "quantization_config", "mlx_lm_extra_tensors", "rope_parameters")
MULTIPLES = (("num_attention_heads", "num_key_value_heads"), ("linear_num_value_heads", "linear_num_key_heads"))
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # drafters with a text_config of a Gemma 4
DRAFTERS = ("qwen3_5_mtp",)  # model types of folders that hold a head alone, as mlx-vlm's `split_mtp` writes them
ROPE_NUMBERS = ("rope_theta", "partial_rotary_factor")
# What the layers compute, whatever config.json says; nemotron_h has the second field in place of the first.
ACTIVATIONS = {
    "hidden_act": ("silu", "swish"), "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu", "swish"),
    "hidden_activation": ("gelu_pytorch_tanh",),
}  # fmt: skip


class Malformed(Exception):
    """Content that a file must not have."""


@contextmanager
def file_errors(file: Path, remedy: str = "Download it again.", what: str = "") -> Iterator[None]:
    """Turn what is wrong with `file`, described by `what`, into a CheckpointError that names it and the remedy."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{file}: the file is missing. Download the model again.") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror or error}).") from error
    except Malformed as error:
        raise CheckpointError(f"{file}: {what}{error}. {remedy}") from error


def read_object(file: Path, remedy: str = "Download it again.") -> dict[str, Any]:
    """Return the JSON object in `file`, or raise a CheckpointError."""
    with file_errors(file, remedy):
        require_regular(file)
        with file.open("rb") as opened:
            return parse_object(opened.read(MAX_JSON + 1))


def check_regular(folder: Path) -> None:
    """Raise a CheckpointError if a library that reads small files of `folder` may open what is not a file."""
    for file in (*folder.glob("*"), *folder.glob("additional_chat_templates/*")):
        if file.exists() and not file.is_file() and not file.is_dir():
            raise CheckpointError(f"{file}: not a regular file. {REMEDY}")


def require_regular(file: Path) -> None:
    """Refuse what is not a file or a link to one: opening a pipe would block forever."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise Malformed("not a regular file")


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object in which no key is repeated and nothing is nested too deeply to copy or print."""
    if len(text) > MAX_JSON:
        raise Malformed(f"more than {MAX_JSON:,} bytes of JSON")
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise Malformed("JSON nested too deeply") from error
    except ValueError as error:  # also for text that is not UTF-8
        raise Malformed(f"not JSON ({error})") from error
    if not isinstance(found, dict):
        raise Malformed(f"not a JSON object but {_kind(found)}")
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return found
    raise Malformed(f"JSON nested more than {MAX_DEPTH} levels deep")


def checked_name(name: object, what: str) -> str:
    """Return `name` if it is safe to print: control characters could rewrite a terminal."""
    if not isinstance(name, str):
        raise Malformed(f"{what} is {_kind(name)}, not a name")
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise Malformed(f"{what} {shortened(name)} is empty, too long or not printable")
    return name


def checked_file(name: object, what: str) -> str:
    """Return the path of a file in the model's folder or below it, as a downloaded file gives it.

    Links are followed: the Hugging Face cache is made of them, and no downloaded JSON can create one.
    """
    path = PurePosixPath(checked_name(name, what))
    if path.is_absolute() or ".." in path.parts or "\\" in str(path):
        raise Malformed(f"{what} names {shortened(str(name))}, which is outside the model's folder")
    return str(path)


def models_below(folder: Path) -> list[Path]:
    """Return the folders of models in `folder`, and in the folders of it: LM Studio's are `publisher/model`."""
    return sorted(path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/config.json"))


def read_config(path: Path, *, drafter: bool = False) -> dict[str, Any]:
    """Return the checked config.json of the folder `path`, with its RoPE fields under the names mlx-lm reads.

    `drafter`: the folder may hold nothing but a head. Its config then has the model's `model_type`, and its own as
    `drafter`; so has an assistant's.
    """
    file = path / "config.json"
    if not file.exists():
        inner = models_below(path)
        remedy = f" It holds models: name them, for example {inner[0]}." if inner else ""
        raise CheckpointError(f"{path}: no config.json, so this is not a model folder.{remedy}")
    config = read_object(file)
    model_type = config.get("model_type")
    held = (*ASSISTANTS, *DRAFTERS) if drafter else ASSISTANTS
    if model_type in held and isinstance(config.get("text_config"), dict):
        config["drafter"], model_type = model_type, config["text_config"].get("model_type")
        config["model_type"] = model_type
    if not isinstance(model_type, str) or not (model_type in models.FAMILIES or models.has_mlx_lm(config)):
        raise CheckpointError(
            f"{file}: model_type {shortened(model_type)} is unknown. Headstart runs {', '.join(models.FAMILIES)}, "
            "and what mlx-lm runs."
        )
    if not models.is_ours(config):
        with file_errors(file, REMEDY):
            _check_wrapped(config)
        text = models.text_config(config)
        text["max_position_embeddings"] = context_length(text)
        return config
    with file_errors(file, REMEDY):
        _check(config)
        text, family = models.text_config(config), models.FAMILIES[model_type].name
        text.update(missing_names(text, family))
        _check(config)
    _add_rope_names(text, family)
    return config


def _check_wrapped(config: dict[str, Any]) -> None:
    """Check what is ours to read, and that no size is absurd; the rest is mlx-lm's to check."""
    for field in ("text_config", "quantization", "quantization_config"):
        _require_object(field, config.get(field, {}), nullable=field != "text_config")
    if "model_file" in config:
        raise Malformed("model_file names code that comes with the model, which is never run")
    for field, value in (*config.items(), *models.text_config(config).items()):
        most = MAX_LAYERS if field.endswith("_layers") else MAX_SIZE
        if SIZE.fullmatch(field) and type(value) is int and not 0 <= value <= most:
            raise _wrong(field, value, f"a whole number from 0 to {most:,}")


def _check(config: dict[str, Any]) -> None:
    for field in OBJECTS:
        _require_object(field, config.get(field, {}), nullable=field != "text_config")
    if named := (config.get("mlx_lm_extra_tensors") or {}).get("mtp_file"):
        checked_file(named, "mlx_lm_extra_tensors.mtp_file")
    text = models.text_config(config)
    for field, value in text.items():
        if value is None or not SIZE.fullmatch(field):
            continue
        least = int(field in POSITIVE and not (field == "head_dim" and text.get("qk_rope_head_dim") == 0))
        most = MAX_LAYERS if field.endswith("_layers") else MAX_SIZE
        if type(value) is not int or not least <= value <= most:
            raise _wrong(field, value, f"a whole number from {least} to {most:,}")
    for many, few in MULTIPLES:
        if text.get(many) and text.get(few) and text[many] % text[few]:
            raise Malformed(f"{many} is {text[many]}, not a multiple of {few}, which is {text[few]}")
    named = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
    field = next((name for name in named if name in text), named[0])
    experts, chosen = text.get("num_experts"), text.get(field) or 0
    if experts and not (type(chosen) is int and 1 <= chosen <= experts):
        raise Malformed(f"{field} is {shortened(chosen)}; it must be from 1 to {experts}, the number of experts")
    for field, computed in ACTIVATIONS.items():
        if (value := text.get(field)) is not None and value not in computed:
            raise _wrong(field, value, f"{computed[0]}, the only one that is supported")
    if type(normed := text.get("norm_topk_prob", True)) is not bool:
        raise _wrong("norm_topk_prob", normed, "true or false")
    numbers = {field: text[field] for field in ("rms_norm_eps", *ROPE_NUMBERS) if text.get(field) is not None}
    for field in ("rope_parameters", "rope_scaling"):
        _require_object(field, text.get(field), nullable=True)
        rope = text.get(field) or {}
        numbers |= {f"{field}.{name}": rope[name] for name in ROPE_NUMBERS if name in rope}
    per_layer = config["model_type"] in ("step3p5", "step3p7")
    for field, value in numbers.items():
        for number in value if isinstance(value, list) and field == "rope_theta" and per_layer else [value]:
            share = field.endswith("partial_rotary_factor")  # of a head's numbers
            if type(number) not in (int, float) or not 0 < number <= (1 if share else sys.float_info.max):
                raise _wrong(field, value, "a number above 0" + ", at most 1" * share)


def _require_object(field: str, value: object, *, nullable: bool) -> None:
    if not isinstance(value, dict) and not (nullable and value is None):
        raise _wrong(field, value, "a JSON object")


def _wrong(field: str, value: object, wanted: str) -> Malformed:
    return Malformed(f"{field} is {shortened(value)}; it must be {wanted}")


def _add_rope_names(text: dict[str, Any], family: str) -> None:
    """Add what mlx-lm reads: `rope_parameters` for Qwen3.5, `rope_theta` for others.

    transformers 5 writes `rope_parameters` for every family, transformers 4 `rope_theta` and `rope_scaling`. Without
    its own name mlx-lm refuses a Qwen3-Next and runs a Qwen3.5 with a default that may not be the model's.
    """
    scaling = text.get("rope_parameters")
    if family not in ("qwen3_5", "qwen3_5_moe", "qwen4_exp"):
        if scaling and "rope_theta" not in text:
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            text.update({name: scaling[name] for name in ROPE_NUMBERS if name in scaling and name not in text})
            text.setdefault("rope_scaling", None if kind == "default" else scaling)
    elif not scaling and "rope_theta" in text:
        numbers = {"rope_theta": text["rope_theta"], "partial_rotary_factor": text.get("partial_rotary_factor", 0.25)}
        text["rope_parameters"] = {"rope_type": "default", **(text.get("rope_scaling") or {}), **numbers}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Any:
    """Return a JSON object; as a float where transformers 5 writes one for a number that JSON lacks."""
    found = dict(pairs)
    if list(found) == ["__float__"] and found["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(found["__float__"])
    if len(found) < len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise Malformed(f"{shortened(repeated)} comes twice in one JSON object")
    return found


def _children(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
