"""config.json: the fields that Headstart and mlx-lm use, checked before any of them sizes an array or a loop."""

import math
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from .. import models
from ..errors import CheckpointError
from .untrusted import Malformed, checked_file, read_object

REMEDY = "Download it again, or take it from the original model."
LARGEST = 2**31 - 1  # mlx's longest axis
LARGEST_VALUES = {  # what is built once for each, and not as one array
    "num_hidden_layers": 4096,
    "mtp_num_hidden_layers": 64,
    "num_nextn_predict_layers": 64,
}
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "full_attention_interval", "linear_conv_kernel_dim",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
# Zero or null where a model has none of it.
COUNTS = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "decoder_sparse_step", "mtp_num_hidden_layers", "num_nextn_predict_layers",
)  # fmt: skip
OBJECTS = ("text_config", "quantization", "quantization_config", "mlx_lm_extra_tensors", "rope_parameters")
MULTIPLES = (
    ("num_attention_heads", "num_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
)


def read_config(path: Path) -> dict[str, Any]:
    """Return the config.json of the folder `path` with its fields checked and its RoPE fields under both names."""
    file = path / "config.json"
    try:
        config = read_object(file)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no config.json, so this is not a model folder.") from None
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in models.FAMILIES:
        raise CheckpointError(
            f"{file}: model_type {shortened(model_type)} is unknown. Headstart runs {', '.join(models.FAMILIES)}."
        )
    try:
        _check(config)
    except Malformed as error:
        raise CheckpointError(f"{file}: {error}. {REMEDY}") from error
    return config


def _check(config: dict[str, Any]) -> None:
    for field in OBJECTS:
        if config.get(field) is not None or field == "text_config":
            _require(isinstance(config.get(field, {}), dict), field, config.get(field), "a JSON object")
    if named := (config.get("mlx_lm_extra_tensors") or {}).get("mtp_file"):
        checked_file(named, "mlx_lm_extra_tensors.mtp_file")
    text = models.text_config(config)
    for field in SIZES:
        if field in text and (field != "head_dim" or text[field] is not None):
            _integer(text, field, 1)
    for field in COUNTS:
        if text.get(field) is not None:
            _integer(text, field, 0)
    for field in ("rms_norm_eps", "rope_theta", "partial_rotary_factor"):
        if text.get(field) is not None:
            _positive(text, field, field)
    for many, few in MULTIPLES:
        if many in text and few in text and text[many] % text[few]:
            raise Malformed(f"{many} is {text[many]}, not a multiple of {few}, which is {text[few]}")
    if (text.get("num_experts_per_tok") or 0) > (text.get("num_experts") or 0):
        raise Malformed(f"num_experts_per_tok is {text['num_experts_per_tok']}, more than there are experts")
    for field in ("rope_parameters", "rope_scaling"):
        if text.get(field) is not None:
            _require(isinstance(text[field], dict), field, text[field], "a JSON object")
            for name in ("rope_theta", "partial_rotary_factor"):
                if name in text[field]:
                    _positive(text[field], name, f"{field}.{name}")
    _name_rope_both_ways(text, config["model_type"])


def _name_rope_both_ways(text: dict[str, Any], model_type: str) -> None:
    """Add what mlx-lm reads: `rope_theta` for Qwen3-Next, `rope_parameters` for Qwen3.5.

    transformers 5 writes `rope_parameters` for every family, transformers 4 `rope_theta` and `rope_scaling`. Without
    its own name mlx-lm refuses a Qwen3-Next and runs a Qwen3.5 with a default that may not be the model's.
    """
    scaling = text.get("rope_parameters")
    if models.FAMILIES[model_type].name == "qwen3_next":
        if scaling and "rope_theta" not in text:
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            text["rope_theta"] = scaling.get("rope_theta", 10000.0)
            text.setdefault("partial_rotary_factor", scaling.get("partial_rotary_factor", 0.25))
            text.setdefault("rope_scaling", None if kind == "default" else scaling)
    elif not scaling and "rope_theta" in text:
        parameters = {"rope_type": "default", **(text.get("rope_scaling") or {})}
        parameters["rope_theta"] = text["rope_theta"]
        parameters["partial_rotary_factor"] = text.get("partial_rotary_factor", 0.25)
        text["rope_parameters"] = parameters


def _integer(config: dict[str, Any], field: str, least: int) -> None:
    value, most = config[field], LARGEST_VALUES.get(field, LARGEST)
    wanted = f"a whole number from {least} to {most:,}"
    _require(type(value) is int and least <= value <= most, field, value, wanted)


def _positive(config: dict[str, Any], name: str, field: str) -> None:
    value = config[name]
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    _require(number and value > 0, field, value, "a number above 0")


def _require(holds: bool, field: str, value: object, wanted: str) -> None:
    if not holds:
        raise Malformed(f"{field} is {shortened(value)}; it must be {wanted}")
