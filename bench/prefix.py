"""Measure the time to the first token of a prompt that is computed, and of the same prompt from the prefix cache.

    python bench/prefix.py [--model FOLDER] [--tokens 4096 4160] [--repeats 3] [--hidden 64] [--layers 4]
                           [--eight-bits]

By default a random checkpoint with a long context. Cold and warm runs alternate, so that a noisy machine shifts both;
medians are taken, and the ratio within each repeat. `store` is what a first prefill costs more with the cache than
without one. Every answer is checked: the tokens must be those of an engine without a cache.
"""

from harness import Answer, answers, line, made_up, medians, options, random_hybrid, ratio, table, turns

from headstart.checkpoint import load_model
from headstart.engine import Engine
from headstart.state import CHUNK, PrefixCache


def main() -> None:
    given = options(
        __doc__, model=None, tokens=[8 * CHUNK, 8 * CHUNK + 64], repeats=3, hidden=64, layers=4, eight_bits=False
    )
    sizes = {"hidden_size": given.hidden, "num_hidden_layers": given.layers}
    context = 2 * max(given.tokens)
    model = load_model(given.model) if given.model else random_hybrid(max_position_embeddings=context, **sizes)
    table("tokens", "remembered", "without ms", "first ms", "repeated ms", "store", "faster", "MB kept")
    for length in given.tokens:
        prompt, prefix = made_up(length, model.vocabulary), PrefixCache(1 << 30, eight_bits=given.eight_bits)
        engine, plain = Engine(model, prefix=prefix), Engine(model, prefix=PrefixCache(0))

        def answer(engine: Engine, prompt: list[int] = prompt) -> Answer:
            return answers(engine, [prompt], max_tokens=4, k=2)[0]

        def cold(answer=answer, engine=engine, prefix=prefix) -> Answer:
            prefix.clear()
            return answer(engine)

        runs = {"without": lambda: answer(plain), "first": cold, "repeated": lambda: answer(engine)}  # noqa: B023
        found = turns(runs, given.repeats)
        compared = ("without", "first") if given.eight_bits else tuple(runs)
        if len({tuple(each.tokens) for name in compared for each in found[name]}) > 1:
            raise SystemExit("the tokens differ: this is a bug")
        first = {name: [each.times[0] for each in several] for name, several in found.items()}
        hit = found["repeated"][-1].stats.prefix_cache_hit
        times = [1e3 * each for each in medians(list(zip(*first.values(), strict=True)))]
        gains = ratio(first["first"], first["without"]), ratio(first["first"], first["repeated"])
        line(length, hit, *times, *gains, prefix.stats().bytes / 1e6)


if __name__ == "__main__":
    main()
