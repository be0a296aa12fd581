"""A family of one's own: mlx-lm's modules, and where in them things are. The loop, the server and the tools stay.

    python examples/custom_family.py

This one is Qwen3.5 once more, under a name of its own, so that the built-in weights fit it.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.models import qwen3_5

from headstart import generate
from headstart.checkpoint import load_model, load_tokenizer, resolve
from headstart.models import FAMILIES, Family, HeadSpec


def build(config: dict[str, Any]) -> nn.Module:
    return qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))


FAMILIES["my_family"] = Family(  # by the `model_type` of config.json
    "my_family",
    build,
    text=lambda lm: lm.language_model.model,  # has `embed_tokens`, `layers` and `norm`
    lm_head=lambda lm: None if lm.language_model.args.tie_word_embeddings else lm.language_model.lm_head,
    head_layer=lambda lm: qwen3_5.DecoderLayer(lm.language_model.args, layer_idx=3),  # one with full attention
    norm_offset=1.0,  # released norms are stored as w of 1 + w
    # How the head is wired. A wrong word here changes no text, only the acceptance: try one.
    head=HeadSpec(embedding_first=True, fed_after_norm=True, chains_after_norm=True, own_lm_head=False),
)


def main() -> list[str]:
    source = resolve("tiny-qwen3.5")
    tokenizer = load_tokenizer(source)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in source.glob("model*"):
            (folder / file.name).symlink_to(file)
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "my_family"}))
        model = load_model(folder)
    messages = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)
    return [generate(model, tokenizer, prompt, max_tokens=40, k=k, verbose=True) for k in (0, 3)]


if __name__ == "__main__":
    plain, drafted = main()
    assert plain == drafted
