"""Replay conversations of agents, and report how many tokens of their prompts are read again.

    python bench/agent_turns.py [--time] [--conversations 4] [--hidden 64] [--layers 4] [--repeats 3]

Every conversation is a list of requests, as an agent sends them: all messages so far, tools included. The template
keeps the reasoning of the running tool loop and drops it once the user speaks again (the built-in model's
keeps all of it, another is like Qwen3.5's). The second conversation has another system prompt from its
middle on. What could be reused of a prompt is the longest prefix that it has in common with an earlier one.

With --time also the time to the first token, against a prompt of which everything but what is new was read before.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))  # for bench.*, whether this is run or imported

from bench.harness import answers, line, medians, options, random_hybrid, ratio, table
from headstart.checkpoint.hub import resolve
from headstart.engine import Engine, Request
from headstart.engine.turns import TurnMarker
from headstart.models import Model
from headstart.sampling import SamplingParams
from headstart.state import PrefixCache

Message = dict[str, Any]

# Reasoning only after the last message of the user's own, as Qwen3 and Qwen3.5 write it.
DROPPING = """{%- macro turn(role, text) %}{{ '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' }}{% endmacro %}
{%- set asked = namespace(at=0) %}
{%- for m in messages if m.role == 'user' %}{% set asked.at = messages.index(m) %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ turn('user', '<tool_response>\\n' + m.content + '\\n</tool_response>') }}
{%- elif m.role == 'assistant' %}
{%- set thought = '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' %}
{%- set calls = namespace(text='') %}
{%- for c in m.tool_calls or [] %}
{%- set calls.text = calls.text + '<tool_call>\\n' + (c.function | tojson) + '\\n</tool_call>' %}{% endfor %}
{{- turn('assistant', (thought if loop.index0 > asked.at else '') + m.content + calls.text) }}
{%- else %}{{ turn(m.role, m.content) }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{% endif %}"""
TEMPLATES = {"built-in": None, "dropping": DROPPING}


def agent_tokenizer(template: str) -> TokenizerWrapper:
    tokenizer = load_tokenizer(resolve("tiny-qwen3.5"))
    if TEMPLATES[template] is not None:
        tokenizer._tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def words(rng: random.Random, count: int) -> str:
    text = "the file line error return value test import class def read write path list number result of in".split()  # noqa: SIM905
    return " ".join(rng.choice(text) for _ in range(count))


def conversation(seed: int, system: str, *, tasks: int = 3, scale: float = 1.0) -> Iterator[list[Message]]:
    """Yield the messages of each request of an agent: `tasks` of a user, some tool calls for each."""
    rng = random.Random(seed)

    def text(least: int, most: int) -> str:
        return words(rng, int(scale * rng.randint(least, most)))

    messages: list[Message] = [{"role": "system", "content": system}]
    for _ in range(tasks):
        messages.append({"role": "user", "content": text(10, 120)})
        for step in range(rng.randint(3, 8)):
            yield list(messages)
            call = {"type": "function", "function": {"name": "run", "arguments": {"command": text(5, 60), "n": step}}}
            said = {"role": "assistant", "content": text(1, 40), "reasoning_content": text(20, 200)}
            messages.append({**said, "tool_calls": [call]})
            messages.append({"role": "tool", "content": text(5, 700)})
        yield list(messages)
        messages.append({"role": "assistant", "content": text(20, 200), "reasoning_content": text(20, 200)})


def requests(count: int, *, scale: float = 1.0) -> Iterator[list[Message]]:
    """Yield the requests of several conversations. Every second one has the system prompt edited in its middle."""
    rng = random.Random(0)
    first, second, edited = (words(rng, int(scale * length)) for length in (900, 900, 40))
    for seed in range(count):
        yield from conversation(seed, f"{first} {edited} {second}" if seed % 2 else f"{first} {second}", scale=scale)


def tokens_of(tokenizer: TokenizerWrapper, messages: list[Message]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=True))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass
class Replay:
    """Tokens of all prompts, those that an earlier prompt had begun with, and those that were not read again."""

    prompts: int = 0
    total: int = 0
    reusable: int = 0
    reused: int = 0

    @property
    def share(self) -> float:
        return self.reused / self.reusable


def replay(engine: Engine, prompts: Sequence[list[int]]) -> Replay:
    result = Replay()
    for n, prompt in enumerate(prompts):
        (*_, last) = engine.submit(Request(prompt, SamplingParams(max_tokens=1, k=0)))
        assert last.stats is not None
        result.prompts += 1
        result.total += len(prompt)
        # The last token is never reused: it opens the first window.
        result.reusable += min(max((common(prompt, other) for other in prompts[:n]), default=0), len(prompt) - 1)
        result.reused += last.stats.prefix_cache_hit
    return result


class CutAt(TurnMarker):
    """Also cut prompts at one position, whatever their tokens are."""

    position = 0

    def find(self, tokens: Sequence[int]) -> Iterator[int]:
        yield from [self.position] if self.position < len(tokens) else []
        yield from (turn for turn in super().find(tokens) if turn > self.position)


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token, and the tokens of the prompt that were read."""
    (answer,) = answers(engine, [prompt], max_tokens=1, k=0)
    return answer.times[0], len(prompt) - answer.stats.prefix_cache_hit


def time_turns(model: Model, tokenizer: TokenizerWrapper, prompts: list[list[int]], repeats: int) -> None:
    table("history", "new tokens", "read", "first token ms", "only new tokens ms", "ratio")
    for n in range(2, len(prompts), max(1, len(prompts) // 5)):
        shared = max(common(prompts[n], other) for other in prompts[:n])
        prefix, ideal = PrefixCache(1 << 31), PrefixCache(1 << 31)
        engine, control = Engine(model, tokenizer, prefix=prefix), Engine(model, tokenizer, prefix=ideal)
        assert engine.turn_marker is not None
        control.reader.marker = marker = CutAt(*engine.turn_marker)
        marker.position = shared
        runs, read = [], 0
        for _ in range(repeats):
            prefix.clear()
            ideal.clear()
            for other in prompts[:n]:
                if common(prompts[n], other) == shared:
                    first_token(engine, other)
            first_token(control, [*prompts[n][:shared], 1])
            seconds, read = first_token(engine, prompts[n])
            runs.append((seconds, first_token(control, prompts[n])[0]))
        mine, theirs = zip(*runs, strict=True)
        line(shared, len(prompts[n]) - shared, read, *[1e3 * each for each in medians(runs)], ratio(mine, theirs))
    cold, whole = (Engine(model, tokenizer, prefix=PrefixCache(0)) for _ in range(2))
    whole.reader.marker = None
    pairs = [(first_token(cold, prompts[-1])[0], first_token(whole, prompts[-1])[0]) for _ in range(repeats)]
    share = ratio(*zip(*pairs, strict=True))
    print(f"\nA miss of {len(prompts[-1])} tokens takes {share:.2f} of its time without cuts at turns.")


def main() -> None:
    given = options(__doc__, time=False, conversations=4, hidden=64, layers=4, repeats=3)
    sizes = {"hidden_size": given.hidden, "num_hidden_layers": given.layers, "vocab_size": 8192}
    model = random_hybrid(max_position_embeddings=65536, **sizes)
    table("template", "prompts", "tokens", "could be reused", "reused", "share", "with multiples of 512 alone")
    for name in TEMPLATES:
        tokenizer = agent_tokenizer(name)
        prompts = [tokens_of(tokenizer, messages) for messages in requests(given.conversations)]
        engines = [Engine(model, tokenizer, prefix=PrefixCache(1 << 31)) for _ in range(2)]
        engines[1].reader.marker = None
        result, before = (replay(engine, prompts) for engine in engines)
        counts = (result.prompts, result.total, result.reusable, result.reused)
        line(name, *counts, f"{result.share:.1%}", f"{before.share:.1%}")
    if given.time:
        time_turns(model, tokenizer, [tokens_of(tokenizer, each) for each in requests(1)], given.repeats)


if __name__ == "__main__":
    main()
