"""Record what transformers makes of pictures and of the tiny models with a tower: `vision.json` beside this file.

python tests/vision_models.py FOLDER                    in the project's environment
python tests/reference/make_vision.py FOLDER            in one with torch, Pillow and transformers 5.23
"""

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from pictures import CASES, IMAGE, MODES, picture, prompt_of
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

GREEDY = 24
TOP = 8


def rounded(values: torch.Tensor) -> list[float]:
    return [round(x, 5) for x in values.flatten().tolist()]


def digest(values: torch.Tensor) -> str:
    return sha256(values.contiguous().numpy().tobytes()).hexdigest()


def record(folder: Path, processor: Any) -> dict[str, Any]:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    recorded = {}
    for case, (sizes, _) in CASES.items():
        images = [Image.fromarray(picture(*size, seed)) for seed, size in enumerate(sizes)]
        made = processor(images=images, return_tensors="pt")
        pixels, grids = made["pixel_values"], made["image_grid_thw"]
        counts = (grids.prod(dim=1) // 4).tolist()
        tokens = torch.tensor([prompt_of(case, counts)])
        types = (tokens == IMAGE).int()
        given = {"input_ids": tokens, "pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": types}
        with torch.no_grad():
            features = model.model.visual(pixels, grid_thw=grids).pooler_output
            positions, delta = model.model.get_rope_index(tokens, types, image_grid_thw=grids)
            logits = model(**given).logits[0, -1]
            text = model.generate(**given, max_new_tokens=GREEDY, do_sample=False, eos_token_id=None)
        best = logits.topk(TOP)
        recorded[case] = {
            "pixels": [digest(part) for part in pixels.split(grids.prod(dim=1).tolist())],
            "grids": grids[:, 1:].tolist(),
            "tower": [rounded(features[0]), rounded(features[-1]), round(features.double().sum().item(), 3)],
            "positions": positions[:, 0].tolist(),
            "delta": int(delta),
            "top": best.indices.tolist(),
            "logits": rounded(best.values),
            "greedy": text[0, tokens.shape[1] :].tolist(),
        }
    return recorded


def main(folder: Path) -> None:
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder / "dense")
    recorded: dict[str, Any] = {"transformers": transformers.__version__, "modes": {}}
    for mode in MODES:
        image = Image.fromarray(picture(37, 50)).convert(mode)
        recorded["modes"][mode] = digest(processor(images=image, return_tensors="pt")["pixel_values"])
    for family in ("dense", "moe"):
        recorded[family] = record(folder / family, processor)
    Path(__file__).with_name("vision.json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
