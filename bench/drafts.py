"""Compare the sources of drafts: automatic depth with all of them, with the head alone, and plain decoding.

    python bench/drafts.py [MODEL] [--kinds edit json prose code …] [--texts 6] [--repeats 3]

`edit`, `json` and `release` are recorded texts (edits.py; pip downloads the releases) that are imposed on the model:
a small model copies badly, so the trunk's logits are replaced by the text's own tokens at their full cost. The head
drafts from the trunk's real hidden states, and accepts fewer drafts than on a text of the model's own. All other
kinds are those of `headstart bench`, generated freely. Everything is interleaved, one sequence at a time, and ratios
are taken within a repeat.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, field, replace

import mlx.core as mx
from edits import edits, records, release_edits

from headstart import load
from headstart.bench.prompts import builtin_prompts
from headstart.engine import DepthController, Engine, Request
from headstart.engine.step_time import time_steps
from headstart.models import Model
from headstart.sampling import SamplingParams
from headstart.state import BatchState

TOKENS = 96  # generated freely per prompt
LONGEST = 160  # tokens of a text that are imposed


@dataclass(frozen=True, eq=False)
class Imposed(Model):
    """A model whose greedy text is given. For one sequence."""

    text: list[int] = field(default_factory=list)  # prompt and answer
    at: list[mx.array] = field(default_factory=list)  # where the last window begins

    def trunk(
        self, tokens: mx.array, state: BatchState, certain: int, embeddings: mx.array | None = None
    ) -> mx.array:
        self.at[:] = [state.lengths]
        return super().trunk(tokens, state, certain, embeddings)

    def logits(self, hidden: mx.array) -> mx.array:
        logits = super().logits(hidden)
        positions = self.at[0][:, None] + 1 + mx.arange(hidden.shape[1])  # [1, W]
        text = mx.array(self.text + [0] * 16)
        right = text[mx.minimum(positions, len(self.text) + 15)]
        # The real logits stay part of the computation, and of its cost.
        return mx.where(mx.arange(logits.shape[-1]) == right[..., None], logits + 1e4, logits)


@dataclass(frozen=True)
class Text:
    prompt: list[int]
    answer: list[int] | None  # imposed, or None


def decode(
    model: Model, text: Text, controller: DepthController | None, k: int | str
) -> tuple[float, list[int], dict]:
    """Return seconds per token after the first step, the tokens, and the stats."""
    tokens = TOKENS
    if text.answer is not None:
        fields = {name: getattr(model, name) for name in Model.__dataclass_fields__}
        model, tokens = Imposed(**fields, text=[*text.prompt, *text.answer]), len(text.answer)
    engine = Engine(model, max_sequences=1, depth=controller)
    events = []
    engine.submit(Request(text.prompt, SamplingParams(max_tokens=tokens, k=k)), listener=events.append)
    engine.prefill_all()
    started, first = 0.0, 0
    while engine.run_once():
        if not started and any(event.tokens for event in events):
            started, first = time.perf_counter(), sum(len(event.tokens) for event in events)
    seconds = time.perf_counter() - started
    said = [token for event in events for token in event.tokens]
    if events[-1].error:
        raise events[-1].error
    if text.answer is not None and said != text.answer:
        raise SystemExit("the imposed text did not come out")
    return seconds / (len(said) - first), said, events[-1].stats.as_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--kinds", nargs="+", default=["edit", "json", "prose", "code", "chat"])
    parser.add_argument("--texts", type=int, default=6, help="of each kind")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tuned", action="store_true", help="the texts that constants were chosen on")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model)
    texts: dict[str, list[Text]] = {kind: [] for kind in arguments.kinds}
    for each in [*edits(), *records(), *(release_edits() if "release" in texts else [])]:
        if each.kind in texts and each.tuned == arguments.tuned:
            chat = [{"role": "user", "content": each.question}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, enable_thinking=False)
            texts[each.kind].append(Text(list(prompt), list(tokenizer.encode(each.answer))[:LONGEST]))
    for each in builtin_prompts():
        if each.kind in texts:
            texts[each.kind].append(Text(each.tokens(tokenizer), None))

    alone = replace(model, copies=False)
    times = time_steps(model, model.max_k, 1, budget=4.0)
    controllers = [DepthController(model.max_k, model.default_k) for _ in range(2)]
    for controller in controllers:
        controller.step_time.calibrate(times)
    variants = {
        "all": (model, controllers[0], "auto"),
        "head": (alone, controllers[1], "auto"),
        "plain": (alone, None, 0),
    }
    titles = ["kind", "tokens", "all ÷ head", "head ÷ plain", "all ÷ plain", "per round (all, head)", "copied"]
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}", flush=True)
    for kind, several in texts.items():
        ratios, found = [], {name: [] for name in variants}
        for repeat in range(arguments.repeats + 1):
            spent = dict.fromkeys(variants, 0.0)
            for number, text in enumerate(several[: arguments.texts]):
                names = list(variants)
                said = []
                for name in names[(repeat + number) % 3 :] + names[: (repeat + number) % 3]:
                    which, controller, k = variants[name]
                    seconds, tokens, stats = decode(which, text, controller, k)
                    spent[name] += seconds * len(tokens)
                    said.append(tokens)
                    if repeat:  # the first warms up
                        found[name].append((len(tokens), stats))
                assert said == [said[0]] * len(said)
            if repeat:
                every, head, plain = spent["all"], spent["head"], spent["plain"]
                ratios.append((head / every, plain / head, plain / every))
        columns = zip(*ratios, strict=True)
        middle = [f"{statistics.median(column):.2f} ({min(column):.2f}–{max(column):.2f})" for column in columns]
        rounds = [
            sum(tokens for tokens, _ in found[name]) / sum(stats["rounds"] for _, stats in found[name])
            for name in ("all", "head")
        ]
        copied = [
            sum(stats[f"{how}_by_source"]["copy"] for _, stats in found["all"]) for how in ("accepted", "proposed")
        ]
        generated = sum(tokens for tokens, _ in found["all"]) // arguments.repeats
        print(
            f"| {kind} | {generated} | {' | '.join(middle)} | {rounds[0]:.2f}, {rounds[1]:.2f} | "
            f"{copied[0] / arguments.repeats:.0f} of {copied[1] / arguments.repeats:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
