"""Count what a tree of drafts would accept beside a chain of as many, from the head's ranks of generated texts.

    python bench/trees.py [MODEL] [--tokens 256] [--texts 4] [--rows 3 7 15] [--temperature 0]

At every position of a text the head is chained over the true tokens, so the rank that it gives each of them says
which path of a tree would have been right. The tree of n drafts has the n paths that were right most often in *other*
kinds of text: a fixed shape, as a kernel would have it, that looks at no probability. A chain takes the likeliest
token at every depth, as many as earn most. Sampled, it is verified by the ratio rule, and a tree by whether the token
that was drawn is one of its own. `copy`: half of the drafts are what followed the last three tokens the time before.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from headstart import load
from headstart.bench.local import decode_batch
from headstart.bench.prompts import KINDS, builtin_prompts
from headstart.engine.copies import MATCH
from headstart.models import Model
from headstart.sampling import SamplingParams
from headstart.training.chains import chains
from headstart.training.loss import trunk_hidden

DEPTH, WIDTH = 8, 4  # of the trees that are considered
Path = tuple[int, ...]  # ranks of the head's tokens, from the first draft on


class Text:
    """One generated text: at every position the ranks of the next tokens, what the ratio rule would accept of a
    chain, and how many tokens of a copy are right."""

    def __init__(self, model: Model, prompt: list[int], answer: list[int], temperature: float):
        tokens = prompt + answer
        rows = mx.array([tokens])
        hidden = trunk_hidden(model.reading, rows)
        length = len(tokens) - DEPTH - 1
        chained = replace(model, backend=model.backend.stock())  # chains have caches of their own
        made = chains(chained, hidden[:, :length], rows[:, : length + DEPTH], DEPTH)
        first = len(prompt) - 1  # the pair whose token is the answer's first
        ranks, ratios = [], []
        for j, each in enumerate(made):
            drafts = model.draft_logits(each).astype(mx.float32)[0]
            true = rows[0, j + 2 : j + 2 + length]
            own = mx.take_along_axis(drafts, true[:, None], axis=-1)
            ranks.append(np.array((drafts > own).sum(axis=-1)))
            target = model.logits(hidden[:, j + 1 : j + 1 + length])[0].astype(mx.float32)
            by = temperature or 1.0
            both = mx.minimum(mx.softmax(drafts / by, axis=-1), mx.softmax(target / by, axis=-1))
            ratios.append(np.array(both.sum(axis=-1)))
        self.ranks = np.stack(ranks, axis=1)[first:]  # [T, DEPTH]
        self.ratios = np.stack(ratios, axis=1)[first:]
        self.copies = [copied(tokens, first + 2 + t) for t in range(len(self.ranks))]

    def chain(self, k: int, temperature: float) -> float:
        """Return the mean number of drafts accepted of a chain."""
        right = self.ratios if temperature else self.ranks == 0
        return float(np.cumprod(right[:, :k], axis=1).sum(axis=1).mean())

    def tree(self, paths: set[Path], copy: int = 0) -> float:
        total = 0.0
        for ranks, right in zip(self.ranks.tolist(), self.copies, strict=True):
            depth = next((d for d in range(DEPTH) if tuple(ranks[: d + 1]) not in paths), DEPTH)
            total += max(depth, min(right or 0, copy))
        return total / len(self.ranks)

    def counts(self) -> Counter[Path]:
        return Counter(
            tuple(ranks[: d + 1])
            for ranks in self.ranks.tolist()
            for d in range(DEPTH)
            if max(ranks[: d + 1]) < WIDTH
        )


def copied(tokens: list[int], at: int) -> int | None:
    """Return how many of the tokens at `at` followed the three before the last time; None without a last time."""
    end = tokens[at - MATCH : at]
    for start in range(at - 1, MATCH - 1, -1):
        if tokens[start - MATCH : start] == end:
            return next(
                (d for d in range(DEPTH) if at + d >= len(tokens) or tokens[start + d] != tokens[at + d]), DEPTH
            )
    return None


def best_paths(texts: Sequence[Text], rows: int) -> set[Path]:
    counts = sum((text.counts() for text in texts), Counter[Path]())
    return {path for path, _ in counts.most_common(rows)}  # a path is never more frequent than its beginning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[3, 7, 15])
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    model, tokenizer = load(given.model)
    params = SamplingParams(temperature=given.temperature)
    texts: dict[str, list[Text]] = {}
    for kind in KINDS:
        for prompt in builtin_prompts([kind])[: given.texts]:
            ids = prompt.tokens(tokenizer)
            (answer,) = decode_batch(model, [ids], 0, given.tokens, params).sequences
            texts.setdefault(kind, []).append(Text(model, ids, answer, given.temperature))
    print("| text | drafts | chain, tokens a round | tree | tree and copy | tree to chain | with copy |")
    print("| --- |" + " ---: |" * 6)
    for kind, own in texts.items():
        others = [text for other, each in texts.items() if other != kind for text in each]
        for rows in given.rows:
            paths, fewer = best_paths(others, rows), best_paths(others, rows - rows // 2)
            chain = max(
                1 + statistics.mean(text.chain(k, given.temperature) for text in own)
                for k in range(1, min(rows, DEPTH) + 1)
            )
            tree = 1 + statistics.mean(text.tree(paths) for text in own)
            both = 1 + statistics.mean(text.tree(fewer, rows // 2) for text in own)
            figures = (chain, tree, both, tree / chain, both / chain)
            print(f"| {kind} | {rows} | " + " | ".join(f"{each:.2f}" for each in figures) + " |")


if __name__ == "__main__":
    main()
