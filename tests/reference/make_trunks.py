"""Record what transformers makes of the trunks of `families.py`, and how it writes their configs: `trunks.json`.

python tests/families.py FOLDER                     in the project's environment
python tests/reference/make_trunks.py FOLDER        in one with torch and transformers 5.23
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

PROMPT = [5, 17, 130, 44, 201, 9, 77, 250, 3, 88, 120, 61, 14, 99, 230, 7, 68, 181, 33, 2, 157, 90, 45, 211]


def record(folder: Path) -> dict[str, Any]:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"], report
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    with TemporaryDirectory() as written:
        model.config.save_pretrained(written)
        config = json.loads(Path(written, "config.json").read_text())
    return {"config": config, "logits": [round(x, 6) for x in logits.tolist()]}


def main(releases: Path) -> None:
    trunks = {folder.name: record(folder) for folder in sorted(releases.iterdir())}
    recorded = {"transformers": transformers.__version__, "prompt": PROMPT, "trunks": trunks}
    Path(__file__).with_name("trunks.json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1], "trunks"))
