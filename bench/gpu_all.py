"""Everything that is asked of a card, in one run: `python bench/gpu_all.py [--minutes 9] [--tiny] [PART ...]`

    report    `headstart report`, written to $OUT/report.md
    answer    seconds to a server's first answer, built-in model and 27b, with no compiled kernels and with kept ones
    27b, 35b  `gpu.py paths`: k = 0, 2, 3 at the imposed acceptance; drafts with and without the reduced head
    exact     side by side, as programs that share the card: greedy text of the built-in model, both paths, bfloat16
              and 4 bits, k = 0..8, batches of 1 to 16; 10,000 short requests; two engines in one process

A part is a process of its own with a limit, so that one that hangs or fails takes no other along. Compiled kernels
are kept for the parts after `answer`, as they are on a user's machine. --tiny: small shapes on the CPU, to try the
script.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any

BEGUN = time.perf_counter()
OUT = Path(os.environ.get("OUT") or tempfile.gettempdir())
LIMITS = {"report": 70, "answer": 100, "27b": 150, "35b": 100, "exact": 230}
TINY = os.environ.get("HEADSTART_BENCH_TINY") == "1"
REQUESTS = 50 if TINY else 2_500  # of each of four processes
BATCHES = {"a": [16, 1, 4, 2], "b": [8, 3, 5, 12]}
SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
SMALL_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGUN:.1f} s] {text}", flush=True)


def prepare() -> Any:
    """Return gpu.py, on the card, or with small shapes on the CPU."""
    import gpu
    import mlx.core as mx

    mx.set_default_device(mx.cpu if TINY else mx.gpu)
    if TINY:
        gpu.TURNS = 2
        gpu.prompts = lambda count, length=9: [[7 * row + 3 * i + 1 for i in range(length)] for row in range(count)]
        for name, shape in gpu.SHAPES.items():
            gpu.SHAPES[name] = shape | SMALL | (SMALL_EXPERTS if name == "35b" else {})
    return gpu


def built_in(bits: int | None = None) -> tuple[Any, Any]:
    """Return the built-in model, quantised where asked for, and its tokenizer."""
    import mlx.nn as nn

    from headstart import load

    gpu = prepare()
    model, tokenizer = load()
    if bits is not None:
        nn.quantize(model.weights, group_size=64, bits=bits, class_predicate=gpu.quantises)
    return model, tokenizer


def report() -> None:
    from headstart.bench.machine_report import MachineReport, report_machine
    from headstart.checkpoint import resolve

    prepare()
    found = MachineReport(say)
    try:
        folder = resolve(None)
        report_machine(found, [(folder.name, folder)])
    finally:
        (OUT / "report.md").write_text(found.markdown())
        print(found.markdown(), flush=True)


def answer() -> None:
    """Each case in a process of its own, after which it lists the kernels that were compiled."""
    listed: set[Path] = set()
    for name in ("built-in", "27b"):
        for kernels in ("compiled", "kept"):
            say(f"first answer, {name}, kernels {kernels}")
            subprocess.run([sys.executable, __file__, f"answer-{name}"], check=False)
            new = set(Path(os.environ["MLX_PTX_CACHE_DIR"]).glob("**/*.ptx")) - listed
            listed |= new
            theirs = [path.name[:40] for path in new if not path.name.startswith("custom_kernel_")]
            say(f"new: {len(new) - len(theirs)} kernels of ours, {len(theirs)} of MLX's: {', '.join(theirs)}")


def first_answer(name: str) -> None:
    """What `headstart serve` does before it listens, then one request."""
    import mlx.core as mx

    from headstart.engine import Engine, EngineThread, Request
    from headstart.kernels.cuda.persistent import PERSISTENT
    from headstart.sampling import SamplingParams

    gpu = prepare()
    model, tokenizer = built_in() if name == "built-in" else (gpu.random_model(gpu.SHAPES[name])[0], None)
    mx.eval(model.weights.parameters())
    begun = time.perf_counter()
    say("model loaded")
    with EngineThread(Engine(model, tokenizer)) as engine:
        engine.warm_up()
        say(f"warmed up, {time.perf_counter() - begun:.1f} s after the model was loaded")
        prompt = [token % model.vocabulary for token in gpu.prompts(1, 20)[0]]
        handle = engine.submit(Request(prompt, SamplingParams(max_tokens=100)))
        stream = iter(handle)
        next(stream)
        say(f"**first token {time.perf_counter() - begun:.1f} s after the model was loaded**")
        count = 1 + sum(len(event.tokens) for event in stream)
        owner = PERSISTENT._owner.name if PERSISTENT._owner else "nobody"  # must be the engine's thread
        say(
            f"{count} tokens {time.perf_counter() - begun:.1f} s after it; persistent kernels are launched by {owner}"
        )


def large(name: str) -> None:
    from draft_vocabulary import compare_heads, compare_rates, with_reduced_head
    from imposed_acceptance import Recording

    gpu = prepare()
    gpu.TURNS = min(gpu.TURNS, 3)
    model, theirs = gpu.warm_model(gpu.SHAPES[name])
    say(f"{name} is built")
    gpu.paths(name, model, theirs)
    recording = Recording(gpu.prompts(1), [gpu.greedy(model, 60 if TINY else 280)])
    say("drafts with the full and the reduced head")
    model = with_reduced_head(model, 32768)
    compare_heads(model, [2, 3], 8 if TINY else 24, 2 if TINY else 3)
    compare_rates(model, recording, gpu.ACCEPTANCE[name], [2, 3], 2 if TINY else 3)


def exact() -> None:
    """All that is not timed, side by side."""
    parts = [f"identity-{bits}-{name}" for bits in (16, 4) for name in BATCHES] + ["requests"] * 4 + ["engines"]
    processes = [subprocess.Popen([sys.executable, __file__, part]) for part in parts]
    ended = {f"{part} ({i})": process.wait() for i, (part, process) in enumerate(zip(parts, processes, strict=True))}
    failed = [f"{part}: {code}" for part, code in ended.items() if code]
    say(f"{len(ended)} processes: {', '.join(failed) or 'all ended well'}")
    sys.exit(bool(failed))


def identity(bits: int, batches: list[int]) -> None:
    """Texts of 16 prompts must be the same, whatever the path, the depth and the batch."""
    from invariance import TASKS

    from headstart.engine import Engine, Request
    from headstart.kernels.cuda.persistent import PERSISTENT
    from headstart.models import graph
    from headstart.sampling import SamplingParams
    from headstart.state import PrefixCache

    graph.OFTEN = 10**9  # to remember a graph for each of these shapes would take minutes

    def texts(model: Any, asked: Sequence[Sequence[int]], k: int, batch: int) -> list[list[int]]:
        engine = Engine(model, max_sequences=batch, prefix=PrefixCache(0))
        handles = [engine.submit(Request(each, SamplingParams(max_tokens=24, k=k))) for each in asked]
        return [[token for event in handle for token in event.tokens] for handle in handles]

    model, tokenizer = built_in(bits if bits < 16 else None)
    chats = [[{"role": "user", "content": task}] for task in TASKS[:16]]
    asked = [list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)) for chat in chats]
    PERSISTENT.refusal = "this benchmark"
    expected = texts(model, asked, 0, 1)
    digest = sha256(repr(expected).encode()).hexdigest()[:8]
    failed: list[str] = []
    for batch in batches if not TINY else batches[:2]:
        wrong: list[str] = []
        for path, refusal in (("separate kernels", "this benchmark"), ("one launch", None)):
            for k in range(9):
                PERSISTENT.refusal = refusal
                count = 16 if batch > 4 else 4
                found = texts(model, asked[:count], k, batch)
                wrong += [f"{path}, k = {k}"] * (found != expected[:count])
        launched = "launched" if PERSISTENT.launched else "not launched"
        say(f"{bits} bits, batches of {batch}, k = 0..8, both paths ({launched}): {wrong or 'identical'} ({digest})")
        failed += wrong
    assert not failed, f"{len(failed)} texts differ"


def requests() -> None:
    from headstart.engine import Engine, EngineThread, Request
    from headstart.kernels.cuda.persistent import PERSISTENT
    from headstart.sampling import SamplingParams

    gpu = prepare()
    model, _ = built_in()
    count, done = REQUESTS, 0
    with EngineThread(Engine(model, max_sequences=16)) as engine:
        prompt = gpu.prompts(1, 12)[0]
        handles = []
        for i in range(count):
            tokens = [token % model.vocabulary for token in (i, *prompt)]
            handles.append(engine.submit(Request(tokens, SamplingParams(max_tokens=4))))
        for handle in handles:
            reason = list(handle)[-1].finish_reason
            assert reason in ("length", "stop"), f"a request ended by {reason}"
            done += 1
            if done % (count // 5) == 0:
                say(f"{done} requests; persistent kernels: {PERSISTENT.refusal or 'in use'}")


def engines() -> None:
    """Two engines with a model each, in threads: only one may launch persistent kernels."""
    from headstart.engine import Engine, EngineThread, Request
    from headstart.sampling import SamplingParams
    from headstart.thread_exit import wait_at_exit

    gpu, texts, expected = prepare(), {}, None

    def run(number: int) -> None:
        wait_at_exit()
        model, _ = built_in()
        with EngineThread(Engine(model)) as engine:
            asked = [[token % model.vocabulary for token in prompt] for prompt in gpu.prompts(4)]
            handles = [engine.submit(Request(each, SamplingParams(max_tokens=64))) for each in asked]
            texts[number] = [[token for event in handle for token in event.tokens] for handle in handles]

    run(0)
    expected = texts[0]
    threads = [Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = texts[1] == texts[2] == expected
    say(f"two engines at once: {'identical' if same else 'NOT identical'}")
    assert same


PARTS: dict[str, Callable[[], None]] = {
    "report": report,
    "answer": answer,
    "27b": lambda: large("27b"),
    "35b": lambda: large("35b"),
    "exact": exact,
    **{
        f"identity-{bits}-{name}": partial(identity, bits, batches)
        for bits in (16, 4)
        for name, batches in BATCHES.items()
    },
    "requests": requests,
    "engines": engines,
    "answer-built-in": lambda: first_answer("built-in"),
    "answer-27b": lambda: first_answer("27b"),
}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if len(given.parts) == 1 and not given.tiny:
        PARTS[given.parts[0]]()
        return
    environment = os.environ | ({"HEADSTART_BENCH_TINY": "1"} if given.tiny else {})
    kept = tempfile.mkdtemp(prefix="kernels-")
    for part in given.parts or LIMITS:
        environment["MLX_PTX_CACHE_DIR"] = tempfile.mkdtemp(prefix="kernels-") if part == "report" else kept
        left = 60 * given.minutes - (time.perf_counter() - BEGUN)
        print(f"\n# {part}", flush=True)
        if left < 10:
            say("not run: no time left")
            continue
        limit = left if given.tiny else min(left, LIMITS.get(part, left))
        process = subprocess.Popen([sys.executable, __file__, part], env=environment, start_new_session=True)
        try:
            say(f"{part} ended with {process.wait(limit)}")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with what it started
            process.wait()
            say(f"{part} was stopped after {limit:.0f} s")


if __name__ == "__main__":
    main()
