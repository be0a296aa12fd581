"""MiMo-7B: its head is given the hidden first, before the trunk's final norm, as in the vendor's code for vLLM."""

from mlx_lm.models import mimo

from .base import HeadNames, HeadSpec, plain_family

FAMILY = plain_family(
    "mimo",
    mimo,
    head_layer=lambda lm: mimo.TransformerBlock(lm.args),
    head=HeadSpec(
        embedding_first=False,
        fed_after_norm=False,
        first_embedding_is_zero=True,
        in_layer=True,
        names=HeadNames("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
        released_as="mtp_layers.{module}.",
    ),
)
