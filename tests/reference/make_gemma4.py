"""Record what transformers makes of Gemma 4's shapes and of their assistants: `gemma4.json` beside this file.

python tests/gemma4.py FOLDER                       in the project's environment
python tests/reference/make_gemma4.py FOLDER        in one with torch and transformers 5.23

Of each shape: the logits after 64 tokens, 32 greedy tokens after these, config.json as transformers writes it, and
what `SinglePositionMultiTokenCandidateGenerator` drafts after 10 prompts and the trunk's own token. transformers 5.23
refuses every assistant, for it looks for the layers whose keys it reads in the assistant itself, and gives it no keys
of a target whose layers share none: `mend` says whose keys are stored and read.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

K = 5
LENGTHS = (1, 2, 5, 8, 9, 10, 17, 24, 33, 50)  # of the prompts; windows are 8


def mend(kind: Any) -> None:
    def modes(self: Any) -> list[str | None]:
        layers, kinds = self.num_hidden_layers, self.layer_types
        own = layers - self.num_kv_shared_layers
        stores = {max(layer for layer in range(own) if kinds[layer] == each) for each in {*kinds[:own]}}
        return ["store" if layer in stores else None if layer < own else "reuse" for layer in range(layers)]

    kind.kv_sharing_modes = property(modes)


for text_config in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
    mend(text_config)


def prompt_of(length: int) -> list[int]:
    return [(37 * length + 59 * place + place * place) % 256 for place in range(length)]


def drafts(model: Any, folder: Path, prompt: list[int]) -> dict[str, Any]:
    """Return the trunk's token after a prompt, and what the assistant drafts after that."""
    unified = model.config.model_type.startswith("gemma4_unified")
    kind = Gemma4UnifiedAssistantForCausalLM if unified else Gemma4AssistantForCausalLM
    assistant = kind.from_pretrained(folder, dtype=torch.float32)
    assistant.generation_config.num_assistant_tokens = K
    settings = SimpleNamespace(max_length=1000)
    drafter = SinglePositionMultiTokenCandidateGenerator(assistant, model.get_input_embeddings(), settings)
    with torch.no_grad():
        made = model(torch.tensor([prompt]), output_hidden_states=True, return_shared_kv_states=True)
        token = int(made.logits[0, -1].argmax())
        text = torch.tensor([[*prompt, token]])
        found, logits = drafter.get_candidates(text, {"attention_mask": torch.ones_like(text)}, made, False, 0)
    lowest = logits[0, -1].min()
    best = [round(x, 5) for x in logits[0, -1][:32].tolist()]
    return {"token": token, "drafts": found[0, len(prompt) + 1 :].tolist(), "logits": best, "lowest": float(lowest)}


def record(folder: Path) -> dict[str, Any]:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"], report
    text = prompt_of(64)
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, -1]
        greedy = list(text)
        for _ in range(32):
            greedy.append(int(model(torch.tensor([greedy])).logits[0, -1].argmax()))
    with TemporaryDirectory() as written:
        model.config.save_pretrained(written)
        config = json.loads(Path(written, "config.json").read_text())
    assistant = folder.with_name(f"{folder.name}-assistant")
    return {
        "config": config,
        "logits": [round(x, 5) for x in logits.tolist()],
        "greedy": greedy[64:],
        "drafts": [drafts(model, assistant, prompt_of(length)) for length in LENGTHS],
    }


def main(releases: Path) -> None:
    shapes = [folder for folder in sorted(releases.iterdir()) if not folder.name.endswith("-assistant")]
    recorded = {"transformers": transformers.__version__, "lengths": LENGTHS, "k": K}
    recorded |= {"shapes": {folder.name: record(folder) for folder in shapes}}
    Path(__file__).with_name("gemma4.json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
