"""Net ↔ the raw Hugging Face layout: bfloat16 shards with an index, config.json, and the tokenizer's files.

`python -m training.export TRAINED TOKENIZER FOLDER` puts a trained model's files beside a tokenizer's.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .model import Net
from .shapes import Shape

SHARD = 15 * 2**20  # bytes
TRUNK, RAW_TRUNK = "model.", "model.language_model."
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
INDEX = "model.safetensors.index.json"


def raw_weights(net: Net) -> dict[str, Tensor]:
    """By their raw names. The trunk's experts stay fused, the head's are one by one, as upstream's are."""
    raw: dict[str, Tensor] = {}
    for name, weight in net.state_dict().items():
        weight = weight.detach().to(torch.bfloat16).cpu().contiguous()
        if name.startswith(TRUNK):
            raw[RAW_TRUNK + name.removeprefix(TRUNK)] = weight
        elif name.endswith("experts.gate_up_proj"):
            for e, expert in enumerate(weight):
                gate, up = expert.chunk(2)
                prefix = f"{name.removesuffix('gate_up_proj')}{e}"
                raw[f"{prefix}.gate_proj.weight"], raw[f"{prefix}.up_proj.weight"] = gate.clone(), up.clone()
        elif name.endswith("experts.down_proj"):
            for e, expert in enumerate(weight):
                raw[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = expert.clone()
        else:
            raw[name] = weight
    return dict(sorted(raw.items()))


def save(net: Net, folder: Path) -> None:
    """Shards, index and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    raw, size = raw_weights(net), 0
    for name, weight in raw.items():
        if size + weight.nbytes > SHARD and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = weight
        size += weight.nbytes
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(weight.nbytes for weight in raw.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(net.shape.config(), indent=2))


def load(folder: Path, shape: Shape) -> Net:
    """The exported weights in a Net, in float32."""
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    raw = {name: weight for file in sorted(set(where.values())) for name, weight in load_file(folder / file).items()}
    net = Net(shape)
    state: dict[str, Tensor] = {}
    for name in net.state_dict():
        if name.startswith(TRUNK):
            state[name] = raw[RAW_TRUNK + name.removeprefix(TRUNK)]
        elif name.endswith("experts.gate_up_proj"):
            prefixes = [f"{name.removesuffix('gate_up_proj')}{e}" for e in range(shape.num_experts)]
            state[name] = torch.stack(
                [torch.cat([raw[f"{p}.gate_proj.weight"], raw[f"{p}.up_proj.weight"]]) for p in prefixes]
            )
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            state[name] = torch.stack([raw[f"{prefix}{e}.down_proj.weight"] for e in range(shape.num_experts)])
        else:
            state[name] = raw[name]
    net.load_state_dict({name: weight.float() for name, weight in state.items()})
    return net.eval()


def add_tokenizer(folder: Path, tokenizer: Path) -> None:
    for file in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / file, folder / file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trained", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for file in (*arguments.trained.glob("model*"), arguments.trained / "config.json"):
        shutil.copyfile(file, arguments.folder / file.name)
    add_tokenizer(arguments.folder, arguments.tokenizer)


if __name__ == "__main__":
    main()
