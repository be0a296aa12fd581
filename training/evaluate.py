"""`python -m training.evaluate [MODEL …]`: how good the models and their heads are, as a table, by headstart itself.

Without PyTorch and without a download: the held-out texts are beside this file. Both built-in models, on a CPU, in
a few minutes.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from headstart import Engine, Request, SamplingParams, load
from headstart.engine import Stats
from headstart.models import Model

from .held_out import Chat, HeldOut, held_out

K = 6  # drafts a round
MODELS = ("tiny-qwen3.5", "tiny-qwen3.5-moe")
TEXTS = 6  # files that are read and gone on from, and twice as many conversations
LONGEST = 512  # tokens of a text that are read
PROMPT = 128  # tokens of a file that are given
ANSWER = 128  # tokens that are generated
LOOP, DISTINCT, SETTLED = 32, 12, 64  # a text loops that has so many tokens, of so few kinds, after so many others
CHAIN_EVERY = 8  # tokens of real text between two chains of drafts


@dataclass(frozen=True)
class RealText:
    """Over positions of real text. Entry 0 is the trunk's, entry j draft j's, fed with the true tokens."""

    loss: list[float]  # nats per token
    agreement: list[float]  # the trunk with the text, draft j with the trunk
    tokens: int
    chains: int


@dataclass(frozen=True)
class Greedy:
    """Greedy decoding with K drafts a round."""

    texts: int
    stats: Stats | None  # None where there is no text


@dataclass(frozen=True)
class Evaluation:
    real: RealText
    straight: Greedy  # texts that do not loop
    looping: Greedy


def evaluate(model: Model, tokenizer: TokenizerWrapper, texts: HeldOut, k: int = K) -> dict[str, Evaluation]:
    """By kind of text."""
    code = [tokenizer.encode(text)[:LONGEST] for text in texts.code]
    chats = [_rendered(tokenizer, chat)[:LONGEST] for chat in texts.chats]
    asked = [_rendered(tokenizer, chat, answered=False) for chat in texts.chats]
    kinds = {"code": (code, [ids[:PROMPT] for ids in code]), "chat": (chats, asked)}
    found = {}
    for kind, (real, prompts) in kinds.items():
        straight, looping = decode(model, tokenizer, prompts, k)
        found[kind] = Evaluation(read(model, real, k, _thoughts(tokenizer)), straight, looping)
    return found


def read(model: Model, texts: Iterable[Sequence[int]], k: int, thoughts: tuple[int, int] | None = None) -> RealText:
    """Losses and agreement, the trunk's at every position and the drafts' along chains.

    `thoughts`: the tokens that open and close thinking. What stands in an empty block of it is no loss: the chat
    template writes it, and whether a model would have is the recipe's choice."""
    loss, right, counted = [0.0] * (k + 1), [0] * (k + 1), [0] * (k + 1)
    tokens = chains = 0
    for text in texts:
        ids = mx.array([list(text)])
        length = ids.shape[1]
        starts = mx.arange(4, length - k - 2, CHAIN_EVERY)
        if not starts.size:
            continue
        hidden = model.trunk(ids, model.make_state(1), certain=length)
        logits = model.logits(hidden)[0].astype(mx.float32)  # [T, V]
        says = mx.argmax(logits, axis=-1)
        counts = mx.array(_counts(text, thoughts))  # [T]
        loss[0] += _loss(logits[:-1], ids[0, 1:], counts[1:])
        counted[0] += int(counts[1:].sum())
        right[0] += int((says[:-1] == ids[0, 1:]).sum())
        for j, drafted in enumerate(_chains(model, hidden, ids, starts, k), 1):
            loss[j] += _loss(drafted, ids[0][starts + j + 1], counts[starts + j + 1])
            counted[j] += int(counts[starts + j + 1].sum())
            right[j] += int((mx.argmax(drafted, axis=-1) == says[starts + j]).sum())
        tokens, chains = tokens + length - 1, chains + starts.size
    return RealText(
        [a / n for a, n in zip(loss, counted, strict=True)],
        [a / n for a, n in zip(right, [tokens] + [chains] * k, strict=True)],
        tokens,
        chains,
    )


def _counts(text: Sequence[int], thoughts: tuple[int, int] | None) -> list[bool]:
    """Whether each token counts in the loss."""
    around = zip([None, *text[:-1]], [*text[1:], None], strict=True)
    return [pair != thoughts for pair in around]


def _chains(model: Model, hidden: mx.array, ids: mx.array, starts: mx.array, k: int) -> Iterable[mx.array]:
    """What drafts 1 .. k of the chains from `starts` [n] say when the true tokens are fed: [n, V] each."""
    rows = model.make_head_state(1)
    made = model.head(hidden[:, :-1], ids[:, 1:], rows)
    rows.commit(mx.zeros((1,), mx.int32), most=hidden.shape[1])  # none of them yet, but all of the room is needed
    rows.keep([0] * starts.size)  # every chain has a row of its own over the same pairs
    rows.commit(starts + 1, most=0)
    state = made[0][starts][:, None]  # [n, 1, H]
    for j in range(1, k + 1):
        drafted = model.draft_logits(state)[:, 0].astype(mx.float32)
        mx.eval(drafted)
        yield drafted
        if j < k:
            state = model.head(state, ids[0][starts + j + 1][:, None], rows.ahead(j - 1))


def decode(
    model: Model, tokenizer: TokenizerWrapper, prompts: Sequence[Sequence[int]], k: int
) -> tuple[Greedy, Greedy]:
    """Texts that go straight on, and texts that loop."""
    engine = Engine(model, tokenizer)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, k=k)
    handles = [engine.submit(Request(prompt, params)) for prompt in prompts]
    straight: list[Stats] = []
    looping: list[Stats] = []
    for handle in handles:
        said: list[int] = []
        for event in handle:
            said += event.tokens
            if event.error is not None:
                raise event.error
            stats = event.stats
        assert stats is not None
        (looping if loops(said) else straight).append(stats)
    return _together(straight), _together(looping)


def loops(tokens: Sequence[int]) -> bool:
    spans = range(SETTLED, len(tokens) - LOOP + 1)
    return any(len(set(tokens[i : i + LOOP])) <= DISTINCT for i in spans)


def table(name: str, found: dict[str, Evaluation]) -> str:
    """Markdown, as in the pages of the models."""
    steps = len(found["code"].real.loss) - 1
    head = ["", "", "trunk", *(f"draft {j}" for j in range(1, steps + 1))]
    lines = [f"### {name}", "", _line(head), _line(["---"] * len(head))]
    for kind, each in found.items():
        real = each.real
        lines.append(_line([kind, "loss, nats per token", *(f"{x:.3f}" for x in real.loss)]))
        lines.append(_line([kind, "agreement on real text", *(f"{x:.1%}" for x in real.agreement)]))
        for what, greedy in (("does not loop", each.straight), ("loops", each.looping)):
            if greedy.stats is not None:
                share = [f"{x:.1%}" for x in greedy.stats.acceptance_by_position]
                lines.append(_line([kind, f"accepted, text {what}", "", *share]))
    lines += ["", _line(["", "texts", "that loop", f"tokens per round, k = {steps}", "real tokens", "chains"])]
    lines.append(_line(["---"] * 6))
    for kind, each in found.items():
        texts, looping = each.straight.texts + each.looping.texts, each.looping.texts
        straight = each.straight.stats
        pace = f"{straight.tokens_per_round:.2f}" if straight is not None else ""
        lines.append(_line([kind, texts, looping, pace, each.real.tokens, each.real.chains]))
    return "\n".join(lines)


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _loss(logits: mx.array, targets: mx.array, counts: mx.array) -> float:
    """The sum over the positions that count, in nats."""
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return float(((mx.logsumexp(logits, axis=-1) - chosen) * counts).sum())


def _together(answers: list[Stats]) -> Greedy:
    return Greedy(len(answers), Stats.of(answers) if answers else None)


def _thoughts(tokenizer: TokenizerWrapper) -> tuple[int, int]:
    opened, closed = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    return opened, closed


def _rendered(tokenizer: TokenizerWrapper, chat: Chat, answered: bool = True) -> list[int]:
    messages = [{"role": "user", "content": chat.asked}]
    if answered:
        messages.append({"role": "assistant", "content": chat.answer})
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=not answered, enable_thinking=False)
    return list(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, help="names of built-in models, or folders")
    parser.add_argument("--texts", type=int, default=TEXTS, help="files, and half the conversations")
    arguments = parser.parse_args()
    texts = held_out()
    few = HeldOut(texts.code[: arguments.texts], texts.chats[: 2 * arguments.texts])
    for name in arguments.models:
        model, tokenizer = load(name)
        print(table(Path(name).name, evaluate(model, tokenizer, few)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
