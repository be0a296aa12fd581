"""Record what transformers makes of the releases in REFERENCES of `families.py`: `families.json` beside this file.

python tests/families.py FOLDER                      in the project's environment
python tests/reference/make_families.py FOLDER       in one with torch and transformers 5.23

Recorded are the config as transformers writes it, logits of a prompt at some of its positions, the greedy text after
it, and what `MtpModel`, with which `generate(use_mtp=True)` drafts, makes of 50 other prompts; for GLM-5.3-Flash
what `glm5_next_head.py` makes of them.
"""

import json
import random
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from glm5_next_head import drafts, load_head
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

VOCABULARY = 256
LENGTH, EVERY, NEW = 64, 9, 24
SEQUENCES = 50
FORMAT = {"format": "pt"}
TRUNKS = ("step3p7",)  # whose heads transformers cannot read


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def load(folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text())
    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    options = {"dtype": torch.float32, "experts_implementation": "eager", "attn_implementation": "eager"}
    model, report = kind.from_pretrained(folder, output_loading_info=True, **options)
    missing = [name for name in report["missing_keys"] if not re.search("vis|multi_modal", name)]
    assert not missing, missing
    return model.eval()


def rename(folder: Path, released: str, theirs: str) -> None:
    """Rename a part of a release's tensors as `MtpModel` knows it."""
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(released, theirs))
    for file in folder.glob("*.safetensors"):
        save_file({name.replace(released, theirs): array for name, array in load_file(file).items()}, file, FORMAT)


def causal_mask(_: int, embeddings: torch.Tensor, *__: Any) -> dict[str, torch.Tensor]:
    size = embeddings.shape[1]
    return {"attention_mask": torch.full((size, size), torch.finfo(torch.float32).min).triu(1)[None, None]}


def drafts_of(model: Any, tokens: list[int], mtp: Any) -> list[int]:
    """The token after each hidden state, at its own position."""
    both = torch.tensor([tokens])
    hidden = model.get_decoder()(both[:, :-1]).last_hidden_state
    positions = torch.arange(1, len(tokens))[None]
    made, _, _ = mtp(both[:, 1:], hidden, None, positions, MtpCache(config=mtp.config))
    return made[0].tolist()


def record(folder: Path) -> dict[str, Any]:
    model = load(folder)
    tokens = prompt(LENGTH, 0)
    logits = model(torch.tensor([tokens])).logits[0]
    with TemporaryDirectory() as written:
        model.config.save_pretrained(written)
        config = json.loads(Path(written, "config.json").read_text())
    config.pop("vision_config", None)
    found: dict[str, Any] = {
        "config": config,
        "logits": [[round(x, 5) for x in row] for row in logits[EVERY - 1 :: EVERY].tolist()],
    }
    text = list(tokens)
    for _ in range(NEW):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    found["text"] = text[LENGTH:]
    selects = hasattr(model.config, "index_topk")
    if selects:  # its class knows no head, whose layer is one like the last
        count = model.config.num_nextn_predict_layers
        model.config.num_mtp_layers, model.config.mtp_mlp_layer_types = count, ["sparse"] * count
        model.config.mtp_layer_types = ["indexed_attention"] * count
    if getattr(model.config.get_text_config(), "num_mtp_layers", 0) and folder.name not in TRUNKS:
        first = model.config.get_text_config().num_hidden_layers  # classes know those of released sizes
        modules = range(first, first + model.config.get_text_config().num_mtp_layers)
        model._keys_to_ignore_on_load_unexpected = [rf"(^|\.)layers\.{number}\." for number in modules]
        mtp = MtpModel.from_pretrained(model).eval()
        if selects:
            mtp.create_masks_for_mtp_layer = causal_mask
            for layer in mtp.layers:
                layer.mtp_block.register_forward_hook(lambda _, __, out: out[0] if isinstance(out, tuple) else out)
        found["drafts"] = [drafts_of(model, prompt(3 + n, n), mtp) for n in range(SEQUENCES)]
    if model.config.model_type == "glm5_next":
        head = load_head(folder, model.config.text_config)
        found["drafts"] = [drafts(model, head, prompt(3 + n, n)) for n in range(SEQUENCES)]
    return found


def main(releases: Path, names: list[str]) -> None:
    file = Path(__file__).with_name("families.json")
    recorded = json.loads(file.read_text()) if file.exists() else {}
    recorded |= {"transformers": transformers.__version__, "every": EVERY, "length": LENGTH}
    for folder in sorted(releases.iterdir()):
        if not names or folder.name in names:
            rename(folder, ".final_layernorm.", ".shared_head.norm.")
            with torch.no_grad():
                recorded[folder.name] = record(folder)
    file.write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1], "references"), sys.argv[2:])
