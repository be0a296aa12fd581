"""Record what transformers makes of pictures and of the tiny models of `towers.py`: `towers.json` beside this file.

python tests/towers.py FOLDER                    in the project's environment
python tests/reference/make_towers.py FOLDER     in one with torch, torchvision, Pillow and transformers 5.23

Of each shape and prompt: the pixels, what stands for the pictures in it, embeddings, logits and greedy tokens. Where
transformers has only a processor of torchvision's, which rounds otherwise than Pillow, `differences` are its
pixels less those of `headstart/images.py`, and the embeddings those of its own pixels.
"""

import json
import re
import sys
from hashlib import sha256
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import cpu_operators  # noqa: F401 - before what imports torchvision
import numpy as np
import torch
import transformers
from pictures import END, IMAGE, MODES, START, TOWER_CASES, picture
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4_unified.image_processing_gemma4_unified import Gemma4UnifiedImageProcessor
from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor
from transformers.models.step3p7.processing_step3p7 import Step3p7Processor

GREEDY = 24
TOP = 8
PROCESSORS = {"gemma4_unified": Gemma4UnifiedImageProcessor, "step3p7": Step3p7ImageProcessor}
OURS = run_path(str(Path(__file__).parents[2] / "src/headstart/images.py"))
TOKENS = {"<im_patch>": IMAGE, "<im_start>": START, "<im_end>": END, "<patch_start>": 8195, "<patch_end>": 8196,
          "<patch_newline>": 8197}  # fmt: skip


def rounded(values: torch.Tensor) -> list[float]:
    return [round(x, 6) for x in values.flatten().tolist()]


def digest(values: np.ndarray) -> str:
    return sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def as_bytes(values: np.ndarray, mean: Any = 0.0, std: Any = 1.0) -> np.ndarray:
    """Return the levels of normalised pixels, which must be whole."""
    levels = (values * std + mean) * 255
    assert np.abs(levels - np.rint(levels)).max() < 1e-3
    return np.rint(levels).astype(np.uint8)


def gemma_pixels(made: Any, index: int, side: int) -> np.ndarray:
    """Return an image of which patches of `side` pixels are given, [H, W, 3]."""
    places, patches = made["image_position_ids"][index].numpy(), made["pixel_values"][index].numpy()
    seen = places[:, 0] >= 0
    columns, rows = places[seen].max(axis=0) + 1
    grid = as_bytes(patches[seen]).reshape(rows, columns, side, side, 3)
    return grid.swapaxes(1, 2).reshape(rows * side, columns * side, 3)


def step_pixels(made: Any, index: int, rules: Any) -> np.ndarray:
    """Return what `StepRules.show` would."""

    def levels(view: Any) -> np.ndarray:
        return as_bytes(view.numpy().transpose(1, 2, 0), np.array(rules.mean), np.array(rules.std))

    whole, counts = levels(made["pixel_values"][index]), made["num_local_patches"].tolist()
    if not counts[index]:
        return whole
    first = sum(counts[:index])
    parts = [levels(view) for view in made["pixel_values_local"][first : first + counts[index]]]
    ends = made["patch_newline_masks"][index][: counts[index]]
    rows = sum(ends) + 1
    columns, part = counts[index] // rows, rules.part
    shown = np.zeros((rows * part + rules.whole, max(columns * part, rules.whole), 3), np.uint8)
    for at, view in enumerate(parts):
        row, column = divmod(at, columns)
        shown[row * part : (row + 1) * part, column * part : (column + 1) * part] = view
    shown[rows * part :, : rules.whole] = whole
    return shown


def spell(shape: str, made: Any, index: int, processor: Any) -> list[int]:
    if shape != "step3p7":
        return [START, *[IMAGE] * int(made["num_soft_tokens_per_image"][index]), END]
    stride, token = processor.vision_patch_size * processor.downsampler_stride, "<im_patch>"
    whole, part = processor.size["height"] // stride, processor.patch_size // stride
    given = SimpleNamespace(image_feature_placeholder=token * whole**2, patch_feature_placeholder=token * part**2)
    text = Step3p7Processor.replace_image_token(given, made, index)
    return [TOKENS[each] for each in re.findall(r"<\w+>", text)]


def compared(theirs: np.ndarray, ours: np.ndarray) -> dict[str, Any]:
    assert theirs.shape == ours.shape, (theirs.shape, ours.shape)
    found = theirs.astype(int) - ours.astype(int)
    at = np.flatnonzero(found)
    return {"digest": digest(theirs), "at": at.tolist(), "differences": found.reshape(-1)[at].tolist()}


def pixels_of(shape: str, made: Any, index: int, rules: Any) -> np.ndarray:
    if shape == "step3p7":
        return step_pixels(made, index, rules)
    return gemma_pixels(made, index, 12 if shape == "gemma4_unified" else 4)


def masks(model: Any, tokens: torch.Tensor) -> dict[str, Any]:
    """Return the masks that Gemma 4's unified class makes for `generate` with a cache of a fixed size.

    What it makes otherwise lets images see all of themselves in every layer, and beyond the window. Gemma 4's other
    class, vLLM and llama.cpp do as these masks.
    """
    if model.config.model_type != "gemma4_unified":
        return {}
    given = model.get_input_embeddings()(tokens), None, None, torch.arange(tokens.shape[1])[None]
    made = model.create_masks_for_generate(model.config, *given, mm_token_type_ids=(tokens == IMAGE).int())
    return {"attention_mask": made}


def continue_text(model: Any, given: dict[str, Any]) -> list[int]:
    """Return greedy tokens, each of a pass over the whole text."""
    tokens, length = given["input_ids"], given["input_ids"].shape[1]
    for _ in range(GREEDY):
        types = {"mm_token_type_ids": (tokens == IMAGE).int()} if "mm_token_type_ids" in given else {}
        logits = model(**{**given, "input_ids": tokens, **types}, **masks(model, tokens)).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(dim=-1)], dim=1)
    return tokens[0, length:].tolist()


def record(folder: Path) -> dict[str, Any]:
    shape = folder.name
    processor = PROCESSORS.get(shape, Gemma4ImageProcessorPil).from_pretrained(folder)
    config = json.loads((folder / "preprocessor_config.json").read_text())
    rules = OURS["StepRules" if shape == "step3p7" else "GemmaRules"].of(config, 2**24)
    options = {"dtype": torch.float32, "experts_implementation": "eager", "attn_implementation": "eager"}
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True, **options)
    assert not report["missing_keys"], report
    recorded: dict[str, Any] = {"modes": {}, "cases": {}}
    for mode in MODES if shape not in PROCESSORS else ():
        image = Image.fromarray(picture(37, 50)).convert(mode)
        theirs = pixels_of(shape, processor(images=[image], return_tensors="pt"), 0, rules)
        recorded["modes"][mode] = compared(theirs, OURS["read_image"](image, rules))
    for case, (sizes, text) in TOWER_CASES.items():
        images = [Image.fromarray(picture(*size, seed)) for seed, size in enumerate(sizes)]
        made = processor(images=images, return_tensors="pt")
        spelt = [spell(shape, made, index, processor) for index in range(len(images))]
        prompt: list[int] = []
        left = iter(spelt)
        for token in text:
            prompt += next(left) if token < 0 else [token]
        tokens = torch.tensor([prompt])
        given = {"input_ids": tokens, "pixel_values": made["pixel_values"]}
        if shape == "step3p7":
            given |= {name: made[name] for name in ("pixel_values_local", "num_local_patches") if name in made}
            features = {name: each for name, each in given.items() if name != "input_ids"}
        else:
            given |= {"image_position_ids": made["image_position_ids"], "mm_token_type_ids": (tokens == IMAGE).int()}
            features = {name: given[name] for name in ("pixel_values", "image_position_ids")}
        with torch.no_grad():
            embeddings = model.get_image_features(**features).pooler_output
            parts = embeddings if isinstance(embeddings, (list, tuple)) else list(embeddings)
            logits = model(**given, **masks(model, tokens)).logits[0, -1]
            greedy = continue_text(model, given)
        if shape == "gemma4_unified":
            parts = (
                parts if len(parts) == len(images) else torch.cat(list(parts)).split([s.count(IMAGE) for s in spelt])
            )
        best = logits.topk(TOP)
        recorded["cases"][case] = {
            "pixels": [
                compared(pixels_of(shape, made, index, rules), OURS["read_image"](image, rules))
                for index, image in enumerate(images)
            ],
            "spelt": [digest(np.array(each, np.int32)) for each in spelt],
            "length": len(prompt),
            "embeddings": [
                {
                    "first": rounded(part[0]),
                    "last": rounded(part[-1]),
                    "sum": round(part.double().sum().item(), 5),
                    "spread": float(part.max() - part.min()),
                }
                for part in parts
            ],
            "top": best.indices.tolist(),
            "logits": rounded(best.values),
            "spread": float(logits.max() - logits.min()),
            "greedy": greedy,
        }
    return recorded


def main(releases: Path) -> None:
    recorded: dict[str, Any] = {"transformers": transformers.__version__}
    recorded |= {folder.name: record(folder) for folder in sorted(releases.iterdir())}
    Path(__file__).with_name("towers.json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
