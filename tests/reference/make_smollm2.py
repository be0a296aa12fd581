"""Record what transformers and mlx-lm say of SmolLM2-135M-Instruct: `smollm2.json` beside this file.

python tests/reference/make_smollm2.py FOLDER       the unquantised one that `make real-model` writes; needs torch

Everything is computed in float32. mlx-lm gives the greedy answers, transformers the loss over two texts.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from training.held_out import held_out

ANSWER, LONGEST = 24, 384  # tokens of an answer, and of a text
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Explain in two sentences why the sky is blue.",
    "Translate into German: The train leaves at eight.",
    "List three uses of a hammer.",
    "Was ist der Unterschied zwischen einem Fluss und einem See?",
    "Rewrite politely: Send me the file now.",
    "¿Cuántos días tiene un año bisiesto?",
    "Give me a JSON object with a name and an age.",
    "Complete the story: The door opened, and",
)


def texts() -> list[str]:
    found = held_out()
    return [found.code[0], found.chats[0].answer + "\n" + found.chats[1].answer]


def mlx_lm_answers(folder: str) -> list[list[int]]:
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    model, tokenizer = load(folder)
    model.set_dtype(mx.float32)
    answers = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        made: list[int] = []
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=ANSWER):
            made.append(int(token))
            if made[-1] in tokenizer.eos_token_ids:
                break
        answers.append(made)
    return answers


def transformers_losses(folder: str) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    losses = []
    for text in texts():
        ids = torch.tensor([tokenizer.encode(text)[:LONGEST]])
        with torch.no_grad():
            losses.append(float(model(ids, labels=ids).loss))
    return losses


def main() -> None:
    folder, file = sys.argv[1], Path(__file__).with_name("smollm2.json")
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    try:  # mlx and torch need not be in one environment
        found |= {"transformers": version("transformers"), "losses": transformers_losses(folder)}
    except ImportError:
        found |= {"mlx_lm": version("mlx-lm"), "answers": mlx_lm_answers(folder)}
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
