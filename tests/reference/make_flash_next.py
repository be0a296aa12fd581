"""Record what transformers makes of a tiny Qwen3.8-Flash-Next: `flash-next.json` beside this file.

transformers leaves the head out. Here it is made of transformers' own layers, wired as in vLLM's
`qwen4_exp/nvidia/mtp.py`: it is given the streams before the trunk's last mean, norms all of them together, and adds
the projected embedding to each; the streams before its own last mean are what the next draft is given.

python tests/flash_next.py FOLDER                       in the project's environment
python tests/reference/make_flash_next.py FOLDER        in one with torch, Pillow and transformers 5.23
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from pictures import CASES, IMAGE, picture, prompt_of
from PIL import Image
from safetensors.torch import load_file
from transformers import Qwen4ExpConfig, Qwen4ExpForCausalLM, Qwen4ExpForConditionalGeneration, Qwen4ExpTextConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

LENGTH = 64
NEW = 24
SEQUENCES = 50  # for drafts
DRAFTS = 3


class Head(torch.nn.Module):
    def __init__(self, config: Qwen4ExpTextConfig):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc_embedding, self.fc_hidden = (torch.nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.pre_fc_norm_embedding = theirs.Qwen4ExpTextRMSNorm(hidden, eps=eps)
        self.pre_fc_norm_hidden = theirs.Qwen4ExpTextRMSNorm(hidden * config.hc_count, eps=eps)
        layer = config.layer_types.index("indexed_attention")
        self.layers = torch.nn.ModuleList([theirs.Qwen4ExpTextDecoderLayer(config, layer)])
        self.hyper_connection_mixer = theirs.Qwen4ExpTextGatedResidual(config, use_combine=False)
        self.rotary = theirs.Qwen4ExpTextRotaryEmbedding(config=config)
        self.count = config.hc_count

    def forward(self, streams: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """[1, T, S·H] and [1, T, H] → [1, T, S·H]."""
        length = streams.shape[1]
        given = self.fc_embedding(self.pre_fc_norm_embedding(embedding))
        each = self.fc_hidden(self.pre_fc_norm_hidden(streams).unflatten(-1, (self.count, -1)))
        x = (each + given.unsqueeze(-2)).flatten(-2)
        turns = self.rotary(x, torch.arange(length).view(1, 1, -1).expand(3, 1, -1))
        causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        return self.layers[0](x, position_embeddings=turns, attention_mask=causal)


def drafts(model: Qwen4ExpForCausalLM, head: Head, prompt: list[int]) -> list[int]:
    last: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, given, made: last.append(made))
    model(torch.tensor([prompt[:-1]]))
    hook.remove()
    streams, tokens, found = last[0], prompt[1:], list[int]()
    for _ in range(DRAFTS):
        made = head(streams, model.model.embed_tokens(torch.tensor([tokens])))
        found.append(int(model.lm_head(head.hyper_connection_mixer(made[:, -1:])).argmax()))
        streams, tokens = torch.cat([streams, made[:, -1:]], dim=1), [*tokens, found[-1]]
    return found


def read(folder: Path, trunk: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a model's tensors, the tables whole and the trunk's names with this prefix; and the head's."""
    tensors = {name: a for file in sorted(folder.glob("*.safetensors")) for name, a in load_file(file).items()}
    parts: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", trunk)
        if ".shard_" in name:
            table, _, part = name.partition("shard_")
            parts.setdefault(table + "weight", {})[int(part.partition(".")[0])] = tensor
        elif not name.startswith("mtp."):
            state[name] = tensor
    state |= {name: torch.cat([some[n] for n in sorted(some)]) for name, some in parts.items()}
    return state, {name.removeprefix("mtp."): a for name, a in tensors.items() if name.startswith("mtp.")}


def load(folder: Path) -> tuple[Qwen4ExpForCausalLM, Head]:
    config = Qwen4ExpTextConfig(**json.loads((folder / "config.json").read_text())["text_config"])
    config._attn_implementation = "eager"
    state, own = read(folder, "model.")
    model = Qwen4ExpForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not [*missing, *unexpected], (missing, unexpected)
    head = Head(config).float().eval()
    head.load_state_dict(own)
    return model, head


def pictures(folder: Path) -> dict[str, Any]:
    """Record answers about pictures."""
    config = Qwen4ExpConfig(**json.loads((folder / "config.json").read_text()))
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    config.vision_config._attn_implementation = "eager"
    model = Qwen4ExpForConditionalGeneration(config).float().eval()
    missing, unexpected = model.load_state_dict(read(folder, "model.language_model.")[0], strict=False)
    assert not [*missing, *unexpected], (missing, unexpected)
    processor, recorded = Qwen2VLImageProcessorPil.from_pretrained(folder), {}
    for case in ("one", "in the middle"):
        images = [Image.fromarray(picture(*size, seed)) for seed, size in enumerate(CASES[case][0])]
        made = processor(images=images, return_tensors="pt")
        counts = (made["image_grid_thw"].prod(dim=1) // 4).tolist()
        tokens = torch.tensor([prompt_of(case, counts)])
        given = {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE).int(), **made}
        logits = model(**given).logits[0, -1]
        text = model.generate(**given, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        best = logits.topk(8)
        recorded[case] = {
            "tokens": tokens[0].tolist(),
            "top": best.indices.tolist(),
            "logits": [round(x, 5) for x in best.values.tolist()],
            "text": text[0, tokens.shape[1] :].tolist(),
        }
    return recorded


def main(folder: Path) -> None:
    model, head = load(folder / "text")
    prompts = [random.Random(seed).choices(range(256), k=LENGTH) for seed in range(2)]
    recorded = []
    with torch.no_grad():
        for prompt in prompts:
            logits = model(torch.tensor([prompt])).logits[0]
            at = list(range(3, LENGTH, 12))  # before the budget is used up and after
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
        seen = pictures(folder / "pictures")
    made = {"transformers": transformers.__version__, "texts": recorded, "heads": drafted, "pictures": seen}
    Path(__file__).with_name("flash-next.json").write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
