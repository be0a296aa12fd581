"""`python -m training.reference NAME FOLDER OUT`: what PyTorch says of an exported model, in float32.

Greedy tokens, the first logits, chains of drafts and, of the first prompt, the experts chosen. headstart's tests are
held against the file. Prompts are picked for large margins between the best and the second-best token, so that no
order of summation can change one: they do not measure acceptance.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .export import load
from .model import Net, SparseMLP
from .shapes import SHAPES

TOKENS = 48  # greedy, whatever ends an answer
CHAINS = 16
DRAFTS = 3
CHATS, CODES = 4, 2  # prompts that are picked
DISTINCT = 18  # tokens of a greedy text, so that none is a short loop

ASKED = {
    "is_prime": "Return True if n is a prime number.",
    "read_json": "Read a JSON file and return its contents as a dictionary.",
    "flatten": "Flatten a nested list into a single list.",
    "moving_average": "Compute the moving average of a sequence of numbers.",
    "factorial": "Return the factorial of n.",
    "get_user": "Return the user with the given id.",
    "is_empty": "Return True if the stack is empty.",
    "remove_duplicates": "Remove duplicates from a list.",
    "count_words": "Count the words in a string.",
    "parse_date": "Parse a date string and return a datetime object.",
    "load_config": "Load the configuration from a YAML file.",
    "to_dict": "Return the properties of the model as a dictionary.",
    "sigmoid": "Compute the sigmoid function.",
    "close": "Close the connection.",
    "write_file": "Write the content to a file.",
    "gcd": "Return the greatest common divisor of two integers.",
}
CODE = (
    'import os\nimport re\n\n\ndef list_files(path, pattern=None):\n    """Return the files under path."""\n',
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n        self._items = []\n\n',
    "import unittest\n\n\nclass TestMath(unittest.TestCase):\n    def test_add(self):\n",
    'import numpy as np\n\n\ndef normalize(x, axis=-1):\n    """Normalize x to unit length along axis."""\n',
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
    "from django.db import models\n\n\nclass Author(models.Model):\n",
)
MEANING = {
    "greedy": f"{TOKENS} argmax tokens after prompt_ids, not stopped at end tokens; margins are differences of the "
    "two largest logits",
    "mtp": "mtp_drafts[d]: with prompt_ids + greedy_ids[:d+1] committed, the drafts for what follows, each draft fed "
    "to the next step at the next position; compare draft 1 with greedy_ids[d+1]",
    "prompts": "picked for large margins; not a measure of acceptance",
    "router_topk": "of the first prompt: [layer][prompt token][chosen experts], most probable first; router_margins: "
    "[layer][prompt token] the last chosen probability less the next",
}


def prompts() -> tuple[list[str], list[str]]:
    """Candidates: chats and beginnings of files."""
    asked = (f"Write a Python function `{name}`: {purpose}" for name, purpose in ASKED.items())
    opening = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    return [opening.format(text) for text in asked], list(CODE)


@torch.no_grad()
def greedy(net: Net, prompt: list[int]) -> tuple[list[int], list[float], Tensor]:
    """Tokens, their margins, and the logits of the first."""
    ids, first = list(prompt), torch.empty(0)
    margins: list[float] = []
    for _ in range(TOKENS):
        logits = net.logits(net.model(net.embed(torch.tensor([ids])), []))[0, -1]
        best, which = logits.topk(2)
        first = logits if not margins else first
        ids.append(int(which[0]))
        margins.append(float(best[0] - best[1]))
    return ids[len(prompt) :], margins, first


@torch.no_grad()
def drafts(net: Net, ids: list[int], hidden: Tensor, at: int, count: int) -> tuple[list[int], list[float]]:
    """A chain from position `at`, with token at+1 committed: the drafts for at+2 .., and their margins.

    Each draft is fed back: the chain is unrolled once more from its start, one token longer.
    """
    said, margins = list(ids[: at + 2]), []
    for j in range(1, count + 1):
        embedded = net.embed(torch.tensor([said]))
        made = net.mtp.unroll(embedded, hidden[:, : at + 1], torch.tensor([at]), j, [])[-1]
        best, which = net.logits(made)[0, -1].topk(2)
        said.append(int(which[0]))
        margins.append(float(best[0] - best[1]))
    return said[at + 2 :], margins


@torch.no_grad()
def routed(net: Net, prompt: list[int]) -> dict[str, Any]:
    """The experts that each layer of the trunk chose."""
    seen: list[Tensor] = []
    blocks = [layer.mlp for layer in net.model.layers if isinstance(layer.mlp, SparseMLP)]
    hooks = [
        block.register_forward_pre_hook(lambda block, inputs: seen.append(block.gate(inputs[0]).softmax(-1)[0]))
        for block in blocks
    ]
    net.model(net.embed(torch.tensor([prompt])), [])
    for hook in hooks:
        hook.remove()
    chosen = net.shape.num_experts_per_tok
    ranked = [probabilities.sort(-1, descending=True) for probabilities in seen]
    return {
        "router_topk": [indices[:, :chosen].tolist() for _, indices in ranked],
        "router_margins": [_rounded(values[:, chosen - 1] - values[:, chosen], 6) for values, _ in ranked],
    }


@torch.no_grad()
def record(net: Net, tokenizer: Tokenizer, text: str, found: tuple[list[int], list[float], Tensor]) -> dict[str, Any]:
    prompt = tokenizer.encode(text, add_special_tokens=False).ids
    said, margins, first = found
    best, which = first.topk(5)
    ids = prompt + said
    hidden = net.model(net.embed(torch.tensor([ids])), [])
    chains = [drafts(net, ids, hidden, len(prompt) - 1 + d, DRAFTS) for d in range(CHAINS)]
    return {
        "text": text,
        "prompt_ids": prompt,
        "greedy_ids": said,
        "greedy_margins": [round(margin, 4) for margin in margins],
        "greedy_text": tokenizer.decode(said),
        "first_step_top5": {"ids": which.tolist(), "logits": _rounded(best, 5)},
        "mtp_drafts": [chain for chain, _ in chains],
        "mtp_margins": [[round(margin, 4) for margin in margins] for _, margins in chains],
    }


def reference(net: Net, tokenizer: Tokenizer) -> dict[str, Any]:
    records = []
    for candidates, wanted in zip(prompts(), (CHATS, CODES), strict=True):
        found = {text: greedy(net, tokenizer.encode(text, add_special_tokens=False).ids) for text in candidates}

        def surest(text: str, found: dict[str, Any] = found) -> float:
            said, margins, _ = found[text]
            return min(margins) if len(set(said)) >= DISTINCT else 0.0

        for text in sorted(candidates, key=surest, reverse=True)[:wanted]:
            records.append(record(net, tokenizer, text, found[text]))
    if net.shape.num_experts:
        records[0] |= routed(net, records[0]["prompt_ids"])
    return {
        "model": net.shape.name,
        "dtype": "float32 compute on the bfloat16 weights as exported",
        "definition": MEANING,
        "prompts": records,
    }


def _rounded(values: Tensor, digits: int) -> list[float]:
    return [round(value, digits) for value in values.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    net = load(arguments.folder, SHAPES[arguments.name])
    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    arguments.out.write_text(json.dumps(reference(net, tokenizer), indent=1))


if __name__ == "__main__":
    main()
