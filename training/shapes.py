"""The sizes of the models, in the words of config.json. Whatever is not said is as Qwen3.5 has it."""

from dataclasses import dataclass
from typing import Any

from .vocabulary import SIZE, added


@dataclass(frozen=True)
class Shape:
    name: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    intermediate_size: int = 0  # of the MLP, where there are no experts
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # of one expert, and of the one that all tokens share
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_head_dim: int = 64
    full_attention_interval: int = 4
    conv_kernel: int = 4
    rotary_dim: int = 16
    rope_theta: float = 10_000.0  # 8 frequencies are to cover a context of 4096
    rms_norm_eps: float = 1e-6
    context_length: int = 4096
    vocab_size: int = SIZE

    @property
    def layer_types(self) -> list[str]:
        return [
            "full_attention" if (i + 1) % self.full_attention_interval == 0 else "linear_attention"
            for i in range(self.num_hidden_layers)
        ]

    def config(self) -> dict[str, Any]:
        """config.json of the exported folder."""
        family = "qwen3_5_moe" if self.num_experts else "qwen3_5"
        architecture = f"Qwen3_5{'Moe' if self.num_experts else ''}ForConditionalGeneration"
        rotary = self.rotary_dim / self.head_dim
        third = -(-self.rotary_dim // 6)
        sections = [third, third, self.rotary_dim // 2 - 2 * third]  # for images; text has one axis only
        rope = {"rope_type": "default", "rope_theta": self.rope_theta, "partial_rotary_factor": rotary}
        text: dict[str, Any] = {
            "model_type": f"{family}_text",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.context_length,
            "initializer_range": 0.02,
            "rms_norm_eps": self.rms_norm_eps,
            "use_cache": True,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "full_attention_interval": self.full_attention_interval,
            "layer_types": self.layer_types,
            "linear_conv_kernel_dim": self.conv_kernel,
            "linear_key_head_dim": self.linear_head_dim,
            "linear_value_head_dim": self.linear_head_dim,
            "linear_num_key_heads": self.linear_num_key_heads,
            "linear_num_value_heads": self.linear_num_value_heads,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "partial_rotary_factor": rotary,
            "rope_parameters": {**rope, "mrope_interleaved": True, "mrope_section": sections},
            "bos_token_id": None,
            "eos_token_id": added(self.vocab_size).im_end,
            "pad_token_id": added(self.vocab_size).end_of_text,
        }
        if self.num_experts:
            text |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.num_experts_per_tok,
                "moe_intermediate_size": self.moe_intermediate_size,
                "shared_expert_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": True,
                "router_aux_loss_coef": 0.005,
                "output_router_logits": False,
                "mlp_only_layers": [],
            }
        else:
            text["intermediate_size"] = self.intermediate_size
        return {
            "architectures": [architecture],
            "model_type": family,
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "text_config": text,
        }


DENSE = Shape(
    "tiny-qwen3.5",
    hidden_size=384,
    num_hidden_layers=8,
    num_attention_heads=6,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    intermediate_size=1024,
)
MOE = Shape(
    "tiny-qwen3.5-moe",
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=64,
)
SHAPES = {shape.name: shape for shape in (DENSE, MOE)}
