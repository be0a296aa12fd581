"""Record what transformers makes of a tiny DeepSeek-V4: `deepseek-v4.json` beside this file.

transformers leaves the head out. Here it is made of transformers' own layers, wired as in vLLM's `deepseek_v4_mtp.py`
(but for the embedding of the first pair, which vLLM alone sets to zero): it is given the streams before the trunk's
last mean, norms each by itself, and adds the projected embedding to each; the streams before its own last mean are
what the next draft is given.

python tests/deepseek_v4.py FOLDER                       in the project's environment
python tests/reference/make_deepseek_v4.py FOLDER        in one with torch and transformers 5.23
"""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

LENGTH = 64
NEW = 24
SEQUENCES = 50  # for drafts
DRAFTS = 3
# Names of the release, and transformers' (`conversion_mapping.py`).
NAMES = (
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^(norm|layers)\.", r"model.\1."),
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"^(mtp\.\d+\.)hc_head_", r"\1hc_head.hc_"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn_sink", ".sinks"),
    (r"\.indexer\.weights_proj\.", ".compressor.indexer.scorer.weights_proj."),
    (r"\.indexer\.wq_b\.", ".compressor.indexer.q_b_proj."),
    (r"(\.compressor(?:\.indexer)?)\.norm\.", r"\1.kv_norm."),
    (r"\.ape", ".position_bias"),
    (r"\.w(q_a|q_b|kv|o_a|o_b)\.", r".\1_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.gate\.bias", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
)


class Head(torch.nn.Module):
    def __init__(self, config: DeepseekV4Config):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        own = DeepseekV4Config(**(config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
                                  | {"mlp_layer_types": ["moe"]}))  # fmt: skip
        own._attn_implementation = "eager"
        self.config = own
        self.e_proj, self.h_proj = (torch.nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.enorm, self.hnorm, self.norm = (theirs.DeepseekV4RMSNorm(hidden, eps=eps) for _ in range(3))
        self.layer = theirs.DeepseekV4DecoderLayer(own, 0)
        self.hc_head = theirs.DeepseekV4HyperHead(own)
        self.rotary = theirs.DeepseekV4RotaryEmbedding(own)

    def forward(self, streams: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """[1, T, S, H] and [1, T, H] → [1, T, S, H]."""
        x = self.h_proj(self.hnorm(streams)) + self.e_proj(self.enorm(embedding)).unsqueeze(-2)
        at = torch.arange(x.shape[1])[None]
        turns = {name: self.rotary(embedding, at, name) for name in ("main", "compress")}
        mask = create_sliding_window_causal_mask(
            config=self.config, inputs_embeds=embedding, attention_mask=None, past_key_values=None, position_ids=at
        )
        return self.layer(x, position_embeddings=turns, position_ids=at, attention_mask=mask)


def drafts(model: DeepseekV4ForCausalLM, head: Head, prompt: list[int]) -> list[int]:
    last: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, given, made: last.append(made))
    model(torch.tensor([prompt[:-1]]))
    hook.remove()
    streams, tokens, found = last[0], prompt[1:], list[int]()
    for _ in range(DRAFTS):
        made = head(streams, model.model.embed_tokens(torch.tensor([tokens])))
        found.append(int(model.lm_head(head.norm(head.hc_head(made[:, -1:]))).argmax()))
        streams, tokens = torch.cat([streams, made[:, -1:]], dim=1), [*tokens, found[-1]]
    return found


def renamed(name: str) -> str:
    for released, ours in NAMES:
        name = re.sub(released, ours, name)
    return name


def stacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with experts in one."""
    experts = sorted({name.partition(".experts.")[0] for name in state if ".experts." in name})
    for mlp in experts:
        count = len({name for name in state if name.startswith(f"{mlp}.experts.") and name.endswith("w1.weight")})
        w1, w2, w3 = (
            torch.stack([state.pop(f"{mlp}.experts.{n}.{part}.weight") for n in range(count)])
            for part in ("w1", "w2", "w3")
        )
        state[f"{mlp}.experts.gate_up_proj"] = torch.cat([w1, w3], dim=1)
        state[f"{mlp}.experts.down_proj"] = w2
    return state


def load(folder: Path) -> tuple[DeepseekV4ForCausalLM, Head]:
    raw = json.loads((folder / "config.json").read_text())
    raw["compress_ratios"] = raw["compress_ratios"][: raw["num_hidden_layers"]]
    raw["rope_parameters"] = raw.pop("rope_scaling")
    config = DeepseekV4Config(**raw)
    config._attn_implementation = "eager"
    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {renamed(name): a for name, a in load_file(file).items()}
    trunk = stacked({name: a for name, a in tensors.items() if not name.startswith("mtp.")})
    own = stacked({name.removeprefix("mtp.0."): a for name, a in tensors.items() if name.startswith("mtp.0.")})
    model, head = DeepseekV4ForCausalLM(config).float().eval(), Head(config).float().eval()
    parts = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "attn_hc", "ffn_hc")
    own = {f"layer.{name}" if name.startswith(parts) else name: a for name, a in own.items()}
    for module, state in ((model, trunk), (head, own)):
        missing, unexpected = module.load_state_dict(state, strict=False)
        assert not [*missing, *unexpected], (missing, unexpected)
    return model, head


def main(folder: Path) -> None:
    model, head = load(folder)
    prompts = [random.Random(seed).choices(range(256), k=LENGTH) for seed in range(2)]
    recorded = []
    with torch.no_grad():
        for prompt in prompts:
            logits = model(torch.tensor([prompt])).logits[0]
            at = [3, 8, 15, 22, 31, 41, 52, 63]  # before the window, the budget and the first blocks, and after
            text = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, use_cache=True
            )[0, LENGTH:]
            rows = {str(t): [round(x, 6) for x in logits[t].tolist()] for t in at}
            recorded.append({"prompt": prompt, "logits": rows, "text": text.tolist()})
        drafted = []
        for seed in range(SEQUENCES):
            rng = random.Random(seed)
            prompt = rng.choices(range(256), k=rng.randrange(2, 48))
            drafted.append({"prompt": prompt, "drafts": drafts(model, head, prompt)})
    made = {"transformers": transformers.__version__, "texts": recorded, "heads": drafted}
    Path(__file__).with_name("deepseek-v4.json").write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
