"""A long run: many requests, many tokens, no growth."""

import random
import resource
import time
from pathlib import Path

import mlx.core as mx
import pytest

from fixtures import random_model, random_prompt, submit
from headstart.engine import Engine, Handle

TOKENS = 1_000_000
ROWS = 16
VERY_SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def resident() -> int:
    """Bytes of this process in memory now; where /proc is missing, the most there ever were."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


@pytest.mark.slow
def test_memory_is_flat_over_a_million_tokens() -> None:
    model, rng = random_model("dense", **VERY_SMALL), random.Random(0)
    engine = Engine(model, max_sequences=ROWS)
    running: list[Handle] = []
    said = requests = rounds = proposed = accepted = 0
    marks: list[tuple[int, int, int]] = []  # tokens, active, resident
    start = time.perf_counter()
    print(f"\n{'tokens':>9} {'requests':>9} {'active MB':>10} {'resident MB':>12} {'tokens/s':>9}")
    while said < TOKENS:
        while len(running) < ROWS + 4:  # some always wait
            prompt = random_prompt(model, rng.randint(2, 60), rng.randrange(10**6))
            running.append(submit(engine, prompt, max_tokens=rng.randint(1, 400), k=3))
            requests += 1
        engine.run_once()
        if rng.random() < 0.01:
            rng.choice(running).cancel()
        still = []
        for handle in running:
            ended = False
            while not handle._events.empty():
                event = handle._events.get()
                said += len(event.tokens)
                assert event.error is None
                if event.finish_reason is not None:
                    ended = True
                    rounds += event.stats.rounds
                    proposed += event.stats.proposed_draft_tokens
                    accepted += event.stats.accepted_draft_tokens
            if not ended:
                still.append(handle)
        running = still
        if said // (TOKENS // 20) > len(marks):
            marks.append((said, mx.get_active_memory(), resident()))
            active, size, rate = marks[-1][1] / 1e6, marks[-1][2] / 1e6, said / (time.perf_counter() - start)
            print(f"{said:>9} {requests:>9} {active:>10.2f} {size:>12.1f} {rate:>9.0f}", flush=True)
    print(f"{rounds} rounds, {accepted} of {proposed} drafts accepted, {time.perf_counter() - start:.0f} s")
    assert accepted > proposed // 10  # it did speculate
    warm, late = marks[4:8], marks[-4:]  # after a fifth of the way, and at the end
    assert max(active for _, active, _ in late) <= max(active for _, active, _ in warm) * 1.25 + 1e6
    assert max(size for *_, size in late) <= max(size for *_, size in warm) * 1.02 + 4e6
