"""Where the time of a decoder layer in one launch goes on this card, phase by phase.

    python bench/gpu_phases.py [27b | 35b ...] [--without loads | products | ones]     both shapes where none is named

Blocks meet at barriers between the phases of a layer. Here thread 0 of every block also notes the clock at the start,
where it arrives at a barrier, begins to wait and has passed, and at the end: kernels are compiled with a changed copy
of team.cu. Steps of one sequence verify k drafts that cost nothing, with those of the window before pending, half of
which are folded.

A table per kind of layer, in µs, medians over its launches. Clocks of different multiprocessors cannot be compared,
so all are differences within a block:
    k = 2      from passing a barrier to passing the next, median of the blocks: about the kernel, together
    work       of it until the block arrives: median of the blocks (the slowest)
    barrier    from arriving to passing, of the block that takes least (and from where it begins to wait)
A product's first weights are asked for between arriving and waiting. What has no barrier of its own, such as a norm
that every block computes for itself, is part of its neighbour. "until the next" is from the last block's end to the
first's start in the next layer; in between the clocks are written out. With $OUT set, everything is also written to
$OUT/gpu_phases.json.
"""

import argparse
import tempfile
from collections import defaultdict
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gpu import SHAPES, prompts, verify_only, warm_model
from gpu_products import line, note, table

from headstart.engine.step import prefill_prompts, step
from headstart.kernels.cuda import compiler, layer
from headstart.kernels.cuda.device import resident_blocks
from headstart.kernels.cuda.persistent import PERSISTENT, SHARED_BYTES
from headstart.models import Model
from headstart.models.graph import OFTEN

LAYERS, KS, TURNS = 8, (0, 2, 3), 3
STEPS = 20  # the last ones of a turn, whose clocks are kept
NUMBERS = 40  # of a launch and block; the last one says how many there are
CHANGES = {  # of team.cu, in little code: what does not fit the instruction cache slows all phases down
    "  struct Shared {\n": f"""  struct Shared {{
    unsigned numbers[{NUMBERS}];
    unsigned* next;
    __device__ __forceinline__ static unsigned nanoseconds() {{
      unsigned long long now;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      return now;
    }}
""",
    "    shared->target = (": """    shared->numbers[0] = shared->nanoseconds();
    shared->numbers[1] = clock64();
    shared->next = shared->numbers + 2;
    shared->target = (""",
    "void arrive() const {\n    __syncthreads();\n    if (threadIdx.x != 0) return;\n": """void arrive() const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    shared->next[0] = clock64();
""",
    "      const long long begun = clock64();\n": """      const long long begun = clock64();
      shared->next[1] = begun;
""",
    "      shared->target += gridDim.x;\n": """      shared->next[2] = clock64();
      shared->next += 3;
      shared->target += gridDim.x;
""",
}
FIXED_EXPERTS = {
    "choice.experts + row * EACH);\n": """choice.experts + row * EACH);
    __syncwarp();
    const int t = threadIdx.x % 32;
    if (t < TOP) choice.experts[row * EACH + t] = (row * TOP + t) * 9 % E;
"""
}
WITHOUT = {  # of products.cu
    "loads": {"if (WHOLE || row < rows[r])\n": "if ((WHOLE || row < rows[r]) && rows[r] > 1 << 28)\n"},
    "products": {"        add_unit<": "        if (tiles > 1 << 28) add_unit<"},
    "ones": {"if (BITS < 16) multiply<T>(ones[c]": "if (BITS < 16 && p == 0) multiply<T>(ones[c]"},
}
END = f"""
__syncthreads();
if (threadIdx.x < 32) {{
  if (threadIdx.x == 0) {{
    barrier.next[0] = clock64(), barrier.next[1] = barrier.nanoseconds();
    barrier.numbers[{NUMBERS - 1}] = barrier.next + 2 - barrier.numbers;
  }}
  __syncwarp();
  unsigned* const mine = const_cast<unsigned*>(clocks) + blockIdx.x * {1 + STEPS * NUMBERS};
  const unsigned launches = *mine;
#pragma unroll 1
  for (int i = threadIdx.x; i < {NUMBERS}; i += 32)
    mine[1 + launches % {STEPS} * {NUMBERS} + i] = barrier.numbers[i];
  __syncwarp();
  if (threadIdx.x == 0) *mine = launches + 1;
}}
"""
PHASES = {
    "GatedDeltaNet": ["first norm", "projections", "delta rule", "output"],
    "attention": ["first norm", "projections", "norms of heads, rotation, cache", "pieces", "merge", "output"],
    "MLP": ["second norm", "gate and up", "down"],
    "experts": ["second norm", "router", "choice, gate and up", "down, sum"],
}
Kind = tuple[str, str]  # a layer's mixer and what follows it


class Clocks:
    """Where launches of layers write, each as described to an array [blocks · (1 + STEPS · NUMBERS)] of its own."""

    def __init__(self) -> None:
        self.blocks = resident_blocks(SHARED_BYTES)
        self.unread = self.empty(1)[0]
        self.free: list[mx.array] = []  # for the next launches that are described
        self.taken: list[tuple[Kind, mx.array]] = []

    def empty(self, count: int) -> list[mx.array]:
        made = [mx.zeros((self.blocks * (1 + STEPS * NUMBERS),), mx.uint32) for _ in range(count)]
        mx.eval(made)
        return made

    def take(self, kind: Kind) -> mx.array:
        if not self.free:
            return self.unread
        self.taken.append((kind, self.free.pop()))
        return self.taken[-1][1]

    def read(self, place: mx.array) -> np.ndarray:
        """Return what the last launches wrote [STEPS, blocks, NUMBERS]. The host reads a copy: what it has read would
        not stay in the card's memory."""
        each = np.array(place + 0).reshape(self.blocks, -1)
        order = np.arange(each[0, 0] - STEPS, each[0, 0]) % STEPS
        return each[:, 1:].reshape(self.blocks, STEPS, NUMBERS)[:, order].swapaxes(0, 1)


def changed_copy(path: Path, changes: dict[str, str]) -> Path:
    """Return a copy of a file of a kernel's text in which these places are others."""
    text = path.read_text()
    for before, after in changes.items():
        assert text.count(before) == 1, f"{path.name} has changed, and so must this script: {before!r}"
        text = text.replace(before, after)
    changed = Path(tempfile.gettempdir(), f"{path.stem}_{sha256(text.encode()).hexdigest()[:16]}.cu")
    if not changed.exists():  # another thread may be compiling it
        changed.write_text(text)
    return changed


def clocked_kernel(
    places: Clocks, without: str | None, *, input_names: list[str], header: str, source: str, **rest: Any
) -> Any:
    """Return what `cuda_kernel` does, of a layer's kernel that notes its clocks."""
    changes = {"team": CHANGES} | ({"layer": FIXED_EXPERTS, "products": WITHOUT[without]} if without else {})
    for name, places_of_file in changes.items():
        path = Path(layer.__file__).with_name(f"{name}.cu")
        header = header.replace(f'"{path}"', f'"{changed_copy(path, places_of_file)}"')
    kernel = compiler.cuda_kernel(input_names=[*input_names, "clocks"], header=header, source=source + END, **rest)
    mixer = "GatedDeltaNet" if "run_heads" in source else "attention"
    kind = (mixer, "experts" if "choose_experts" in source else "MLP")

    def launch(*, inputs: list[mx.array], **rest: Any) -> list[mx.array]:
        return kernel(inputs=[*inputs, places.take(kind)], **rest)

    return launch


def run_steps(model: Model, k: int) -> None:
    """Run a few steps, then STEPS of a remembered graph."""
    batch, advance = prefill_prompts(model, prompts(1), max_k=k), verify_only if k else step
    folded = mx.full((1024,), (k + 1) // 2, mx.int32)[:1]  # not an array so small that the host shares it
    for _ in range(OFTEN + 3 + STEPS):
        result = advance(model, batch, k)
        batch.trunk_state.accepted = folded
        mx.async_eval(result.tokens, *batch.arrays())
    mx.eval(batch.arrays())


def phases(kind: Kind, count: int) -> list[str]:
    """Return the names of a layer's phases. Norms that every block computes for itself have no barrier."""
    every, norms = [name for part in kind for name in PHASES[part]], ["first norm", "second norm"]
    for names in (every, [name for name in every if name not in norms]):
        if len(names) == count:
            return names
    raise AssertionError(f"{', '.join(kind)}: a kernel of {count} phases; what does PHASES miss?")


def durations(numbers: np.ndarray, count: int) -> np.ndarray:
    """Return the cycles that phases take, medians over launches of what blocks noted [launches, blocks, NUMBERS]:
    whole, work, slowest, barrier, waiting [5, phases]. Only differences of the numbers mean anything: of 32 bits."""
    assert (numbers[..., -1] == 3 * count + 1).all(), "launches of one kind have different phases"
    at = numbers[..., 1 : 3 * count]
    begun, arrived, waiting, passed = at[..., ::3], at[..., 1::3], at[..., 2::3], at[..., 3::3]
    whole, work = np.concatenate([passed, arrived[..., -1:]], axis=-1) - begun, arrived - begun
    least = [np.pad((passed - since).min(axis=1), ((0, 0), (0, 1))) for since in (arrived[..., :-1], waiting)]
    of_launches = [np.median(whole, axis=1), np.median(work, axis=1), work.max(axis=1), *least]
    return np.array([np.median(each, axis=0) for each in of_launches])


def span(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return when blocks began and ended, in nanoseconds, and the cycles between."""
    last = int(numbers[0, 0, -1]) - 1
    return numbers[..., 0], numbers[..., last], numbers[..., last - 1] - numbers[..., 1]


def column(title: str, kind: Kind, numbers: np.ndarray, gaps: list[int]) -> dict[str, list[str]]:
    """Return a table's cells for one k, by phase."""
    begun, ended, cycles = span(numbers)
    mhz = 1e3 * cycles.sum(dtype=float) / (ended - begun).sum(dtype=float)
    names = phases(kind, int(numbers[0, 0, -1]) // 3)
    measured = durations(numbers, len(names)) / mhz
    note(title, {"phases": dict(zip(names, measured.T.tolist(), strict=True)), "gaps": gaps, "MHz": mhz})
    totals = [np.median(cycles) / mhz, *measured[1:].sum(axis=1)]
    return {
        name: [f"{whole:.2f}", f"{work:.2f} ({slowest:.2f})", f"{barrier:.2f} ({waiting:.2f})" if barrier else ""]
        for name, (whole, work, slowest, barrier, waiting) in zip(
            [*names, "kernel"], [*measured.T, totals], strict=True
        )
    } | {
        "until the next": [f"{np.median(gaps) / 1e3:.2f}", "", ""],
        "MHz; launches": [f"{mhz:.0f}", str(len(numbers)), ""],
    }


def measure(shape: str, model: Model, places: Clocks) -> None:
    launched: dict[int, list[tuple[Kind, mx.array]]] = {}
    found: dict[tuple[Kind, int], list[np.ndarray]] = defaultdict(list)
    gaps: dict[tuple[Kind, int], list[int]] = defaultdict(list)
    for turn in range(TURNS):
        for k in KS:
            places.free, places.taken = [] if turn else places.empty(LAYERS * (OFTEN + 4)), []
            run_steps(model, k)
            layers = launched.setdefault(k, places.taken[-LAYERS:])  # of the graph that is remembered
            assert len(layers) == LAYERS, "no layer in one launch, or a graph from before"
            assert turn or places.free, "no graph was remembered"
            numbers = [places.read(place) for _, place in layers]
            for (kind, _), each in zip(layers, numbers, strict=True):
                found[kind, k].append(each)
            for (kind, _), each, following in zip(layers, numbers, numbers[1:], strict=False):
                gap = span(following)[0].min(axis=1) - span(each)[1].max(axis=1)
                gaps[kind, k] += gap.astype(np.int32).tolist()
    assert not PERSISTENT.status[0].item(), "a barrier was given up"
    for kind in sorted({kind for kind, _ in found}):
        title = f"{shape}: {', '.join(kind)}"
        cells = [column(f"{title}, k = {k}", kind, np.concatenate(found[kind, k]), gaps[kind, k]) for k in KS]
        table(title, *[head for k in KS for head in (f"k = {k}", "work", "barrier")])
        for name in [*(name for part in kind for name in PHASES[part]), *list(cells[0])[-3:]]:
            line(name, *[cell for each in cells for cell in each.get(name, [""] * 3)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["27b", "35b"])
    parser.add_argument("--without", choices=WITHOUT)
    given = parser.parse_args()
    mx.set_default_device(mx.gpu)
    places = Clocks()
    layer.cuda_kernel = partial(clocked_kernel, places, given.without)  # type: ignore[attr-defined]
    for name in given.shapes:
        model = replace(warm_model(SHAPES[name] | {"num_hidden_layers": LAYERS})[0])  # which remembers no graph yet
        measure(name, model, places)


if __name__ == "__main__":
    main()
