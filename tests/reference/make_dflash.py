"""Record what transformers and mlx-vlm draft with tiny DFlash drafters: `dflash.json` beside this file.

python tests/reference/make_dflash.py        in an environment with torch, transformers 5.17 and mlx-vlm 0.7.10

Two rounds over one text: the prompt is the context, then three tokens of the verified block are accepted.
transformers runs its candidate generator, and its only DFlash architecture, which has the same layers under other
names. mlx-vlm also runs a DFlash2.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_vlm.speculative.drafters.dflash2 import DFlash2DraftModel
from mlx_vlm.speculative.drafters.dflash2.config import DFlash2Config
from mlx_vlm.speculative.drafters.qwen3_dflash import DFlashDraftModel
from mlx_vlm.speculative.drafters.qwen3_dflash.config import DFlashConfig
from mlx_vlm.utils import load_model
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, Qwen3_5ForConditionalGeneration
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

sys.path.insert(0, str(Path(__file__).parents[1]))
from checkpoints import write, write_drafter

PROMPT = [5, 17, 130, 44, 201, 9, 77, 250, 3, 88, 120, 61]
ACCEPTED = 2  # drafts of the first block
NAMES = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}


def with_transformers(target: Path, folder: Path, window: list[int], config: dict[str, Any]) -> list[Any]:
    """Return the drafts and the logits [15, V] of both rounds."""
    model = Qwen3_5ForConditionalGeneration.from_pretrained(target, dtype=torch.float32)
    layers = config["dflash_config"]["target_layer_ids"]
    shared = {name: config[name] for name in MuseGlimmerAssistantConfig().to_dict().keys() & config.keys()}
    shared |= {"layer_types": config["layer_types"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    shared |= {**config["dflash_config"], "architectures": None, "model_type": "muse_glimmer_assistant"}
    shared |= {"sliding_window": config["sliding_window"] or 2048}
    assistant = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**shared)).eval()
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    renamed = {}
    for name, array in arrays.items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs) if name.startswith(ours) else name
        renamed[name] = torch.from_numpy(np.array(array))
    assistant.load_state_dict(renamed)
    settings = SimpleNamespace(max_length=1000, do_sample=False)
    drafter = DFlashTokenCandidateGenerator(
        assistant, model.get_input_embeddings(), model.get_output_embeddings(), settings
    )
    logits: list[Any] = []
    model.get_output_embeddings().register_forward_hook(lambda module, given, made: logits.append(made[0]))

    def outputs(tokens: list[int]) -> Any:
        with torch.no_grad():
            found = model.model.language_model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return {layer: found[layer + 1] for layer in layers}

    def candidates(tokens: list[int], hidden: Any, accepted: int) -> None:
        positions = torch.arange(len(tokens))[None]
        given = {"position_ids": positions, "attention_mask": torch.ones_like(positions)}
        with torch.no_grad():
            drafter.get_candidates(
                torch.tensor([tokens]), given, SimpleNamespace(hidden_states=hidden), False, accepted
            )

    candidates(PROMPT, outputs(PROMPT[:-1]), 0)
    text = [*PROMPT, *window]
    last = len(PROMPT) - 1  # the window begins with it
    hidden = {layer: each[:, last:] for layer, each in outputs(text).items()}
    candidates(text[: last + ACCEPTED + 2], hidden, ACCEPTED)
    return [(each.argmax(-1).tolist(), each.numpy()) for each in logits]


def with_mlx_vlm(target: Path, folder: Path, window: list[int], config: dict[str, Any]) -> list[Any]:
    model = load_model(target)
    second = config["architectures"] == ["DFlash2DraftModel"]
    kinds = (DFlash2DraftModel, DFlash2Config) if second else (DFlashDraftModel, DFlashConfig)
    drafter = kinds[0](kinds[1].from_dict(config))
    drafter.load_weights(list(drafter.sanitize(dict(mx.load(str(folder / "model.safetensors")))).items()))
    cache = drafter.reset(model)
    layers = config["dflash_config"]["target_layer_ids"]

    def outputs(tokens: list[int]) -> mx.array:
        made = model.language_model(mx.array([tokens]), capture_layer_ids=layers)
        return mx.concatenate(made.hidden_states, axis=-1)

    def logits(last: int, hidden: mx.array) -> Any:
        block = mx.array([[last, *[config["dflash_config"]["mask_token_id"]] * (config["block_size"] - 1)]])
        made = drafter._hidden(block, hidden, cache)[:, 1:]
        scores = drafter._logits(made)
        drafts = mx.argmax(scores, axis=-1)
        if second:
            drafts = drafter.candidate_selector.select(made, scores, mx.array([last]), None)
        return drafts[0].tolist(), np.array(scores[0])

    text, last = [*PROMPT, *window], len(PROMPT) - 1
    first = logits(PROMPT[-1], outputs(PROMPT[:-1]))
    end = last + ACCEPTED + 1
    return [first, logits(text[end], outputs(text[:end])[:, last:])]


def main() -> None:
    with TemporaryDirectory() as place:
        target = write(Path(place, "target"), dtype=mx.float32)
        folder = write_drafter(Path(place, "drafter"), target, dtype=mx.float32)
        config = json.loads((folder / "config.json").read_text())
        window = [(7 * n + 3) % config["vocab_size"] for n in range(config["block_size"] - 1)]
        found = {
            "transformers": with_transformers(target, folder, window, config),
            "mlx-vlm": with_mlx_vlm(target, folder, window, config),
        }
        folder = write_drafter(Path(place, "second"), target, dtype=mx.float32, second=True)
        config = json.loads((folder / "config.json").read_text())
        found["mlx-vlm, DFlash2"] = with_mlx_vlm(target, folder, window, config)
    recorded: dict[str, Any] = {"versions": {"transformers": transformers.__version__, "mlx-vlm": version("mlx-vlm")}}
    recorded |= {"prompt": PROMPT, "window": window, "accepted": ACCEPTED}
    for name, rounds in found.items():
        # All drafts, and the logits of the first and the last.
        recorded[name] = [
            {
                "drafts": drafts,
                "logits": [[round(float(x), 5) for x in logits[at]] for at in (0, -1)],
            }
            for drafts, logits in rounds
        ]
    Path(__file__).with_name("dflash.json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main()
