"""Record what mlx-vlm makes of the tiny Nemotron release of `families.py`: `mlx-vlm-heads.json` beside this file.

python tests/families.py FOLDER                       in the project's environment
python tests/reference/make_mlx_vlm.py FOLDER         in one with mlx-vlm 0.7.10

It has no model for the head of GLM-4.7-Flash, only a tool that splits it off.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.models.nemotron_h.config import ModelConfig
from mlx_vlm.models.nemotron_h.language import Model
from mlx_vlm.speculative.drafters.nemotron_h_mtp import ModelConfig as DrafterConfig
from mlx_vlm.speculative.drafters.nemotron_h_mtp import NemotronHMTPDraftModel

PROMPT = [5, 17, 130, 44, 201, 9, 77, 250, 3, 88, 120, 61]


def record(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= mx.load(str(file))
    model = Model(ModelConfig.from_dict(config))
    trunk = {name: array for name, array in weights.items() if not name.startswith("mtp.")}
    model.load_weights(list(model.sanitize(trunk).items()))
    drafter = NemotronHMTPDraftModel(DrafterConfig(text_config=config))
    head = {name.removeprefix("mtp."): array for name, array in weights.items() if name.startswith("mtp.")}
    drafter.load_weights(list(drafter.sanitize(head).items()))
    tokens = mx.array([PROMPT])
    hidden = model.backbone(tokens[:, :-1])
    _, made = drafter._forward_hidden(model.backbone.embeddings(tokens[:, 1:]), hidden, tokens, drafter.make_cache())
    scores = model.lm_head(made[0, -1])
    logits = model.lm_head(hidden[0, -1])
    return {"logits": logits.tolist(), "draft": int(mx.argmax(scores)), "draft_logits": scores.tolist()}


def main(releases: Path) -> None:
    found = record(releases / "nemotron_h")
    rounded = {k: [round(x, 6) for x in v] if isinstance(v, list) else v for k, v in found.items()}
    recorded = {"mlx-vlm": version("mlx-vlm"), "prompt": PROMPT, "nemotron_h": rounded}
    Path(__file__).with_name("mlx-vlm-heads.json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
