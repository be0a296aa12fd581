"""The head of GLM-5.3-Flash of transformers' own layers, which leaves it out: wired as in SGLang's
`glm5_next_nextn.py`, llama.cpp's `glm5next.cpp` and mlx-vlm's `glm5_next/mtp.py`.

It is given the trunk's hidden state after the final norm, and adds to one residual stream. Its layer attends to what
its own index selects.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.models.glm5_next import modeling_glm5_next as theirs

DRAFTS = 3


class Head(torch.nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        hidden, layer = config.hidden_size, config.layer_types.index("indexed_attention")
        names = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "norm")
        for name in names:
            setattr(self, name, theirs.Glm5NextTextRMSNorm(hidden, config.rms_norm_eps))
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.self_attn = theirs.Glm5NextTextAttention(config, layer)
        self.mlp = theirs.Glm5NextTextMoE(config)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """[1, T, H] of a hidden state and the token after it → [1, T, H]."""
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))
        all_tokens = torch.ones(x.shape[:2], dtype=torch.bool)
        x = x + self.self_attn(self.input_layernorm(x), all_tokens)[0]
        return self.norm(x + self.mlp(self.post_attention_layernorm(x)))


def load_head(folder: Path, config: Any) -> Head:
    prefix = f"model.language_model.layers.{config.num_hidden_layers}."
    found: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if name.startswith(prefix):
                found[name.removeprefix(prefix).replace("shared_head.norm", "norm")] = tensor
    experts = range(config.n_routed_experts)
    gate, up, down = (
        torch.stack([found.pop(f"mlp.experts.{n}.{part}_proj.weight") for n in experts])
        for part in ("gate", "up", "down")
    )
    found |= {"mlp.experts.gate_up_proj": torch.cat([gate, up], dim=1), "mlp.experts.down_proj": down}
    head = Head(config).float().eval()
    head.load_state_dict(found)
    return head


def drafts(model: Any, head: Head, tokens: list[int]) -> list[int]:
    text = model.get_decoder()
    hidden, tokens, found = text(torch.tensor([tokens[:-1]])).last_hidden_state, tokens[1:], list[int]()
    for _ in range(DRAFTS):
        made = head(hidden, text.embed_tokens(torch.tensor([tokens])))[:, -1:]
        found.append(int(model.lm_head(made).argmax()))
        hidden, tokens = torch.cat([hidden, made], dim=1), [*tokens, found[-1]]
    return found
