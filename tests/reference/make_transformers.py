"""Record what transformers makes of the tiny releases of `families.py`: `transformers-heads.json` beside this file.

python tests/families.py FOLDER                           in the project's environment
python tests/reference/make_transformers.py FOLDER        in one with torch and transformers 5.17
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

FAMILIES = ("glm4_moe", "deepseek_v3")  # 5.17 has no head for glm4_moe_lite
PROMPT = [5, 17, 130, 44, 201, 9, 77, 250, 3, 88, 120, 61]


def record(folder: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]  # known for the released sizes alone
    mtp = MtpModel.from_pretrained(model)
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        hidden = model.model(tokens[:, :-1]).last_hidden_state
        logits = model.lm_head(hidden)[0, -1]
        positions = torch.arange(1, len(PROMPT))[None]
        # The token after each hidden state, at its own position.
        drafts, scores, _ = mtp(
            tokens[:, 1:], hidden, torch.ones_like(positions), positions, MtpCache(config=mtp.config)
        )
    return {"logits": logits.tolist(), "draft": int(drafts[0, 0]), "draft_logits": scores[0, 0].tolist()}


def main(releases: Path) -> None:
    recorded: dict[str, Any] = {"transformers": transformers.__version__, "prompt": PROMPT}
    for family in FAMILIES:
        found = record(releases / family)
        recorded[family] = {k: [round(x, 6) for x in v] if isinstance(v, list) else v for k, v in found.items()}
    Path(__file__).with_name("transformers-heads.json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
