"""What a step costs with each thing that a request or a user can switch on, beside the plain step, by turns."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.adapters import EXPERTS, LINEAR
from ..errors import HeadstartError
from ..library import load
from ..models import Model
from ..sampling import GrammarSpec, SamplingParams
from ..state import PrefixCache
from .local import K, decode_batch
from .measurement import Estimate, Trial
from .prompts import builtin_prompts
from .report import format_estimate, table
from .system import SystemInfo, system_info

RANKS = {"rank-8": 8, "rank-32": 32, "rank-16": 16}  # of the adapters that are loaded
LIST = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 200}  # a grammar that goes on


class Feature(NamedTuple):
    """Something that can be switched on."""

    name: str
    params: SamplingParams = SamplingParams()
    model: str = "plain"  # which of the models decodes
    adapters: tuple[str | None, ...] = ()  # of the sequences, by turns
    text: bool = False  # it needs a tokenizer


SAMPLED = SamplingParams(temperature=0.8)
FEATURES = (
    Feature("plain"),
    Feature("temperature .8", SAMPLED),
    Feature("temperature .8 and a seed", SamplingParams(temperature=0.8, seed=1)),
    Feature("top_p .95, top_k 20", SamplingParams(temperature=0.8, top_p=0.95, top_k=20)),
    Feature("min_p .05", SamplingParams(temperature=0.8, min_p=0.05)),
    Feature("XTC", SamplingParams(temperature=0.8, xtc_probability=0.5, xtc_threshold=0.1)),
    Feature("presence, frequency", SamplingParams(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.5)),
    Feature("repetition 1.1", SamplingParams(repetition_penalty=1.1)),
    Feature("logit bias", SamplingParams(logit_bias={11: -1.0, 13: 1.0})),
    Feature("five log-probabilities", SamplingParams(logprobs=True, top_logprobs=5)),
    Feature("JSON schema", SamplingParams(grammar=GrammarSpec.json_schema(LIST)), text=True),
    Feature("stop strings", SamplingParams(stop=("\n\n\n\n", "#####")), text=True),
    Feature("adapters loaded, none used", model="adapted"),
    Feature("adapter of rank 8", model="adapted", adapters=("rank-8",)),
    Feature("adapter of rank 32", model="adapted", adapters=("rank-32",)),
    Feature("three adapters and none", model="adapted", adapters=(*RANKS, None)),
    Feature("KV in 8 bits", model="eight bits"),
    Feature("KV in 8 bits, temperature .8", SAMPLED, model="eight bits"),
    Feature("adapter of rank 8, temperature .8", SAMPLED, model="adapted", adapters=("rank-8",)),
)


class FeatureCell(NamedTuple):
    """Where features are compared."""

    context: int  # tokens
    sequences: int
    k: K

    def __str__(self) -> str:
        return f"{self.context:,} tokens, {self.sequences} at a time, k = {self.k}"


@dataclass(frozen=True)
class FeatureRow:
    feature: str
    cell: FeatureCell
    step_ms: Estimate
    to_plain: Estimate  # of a step's time at a fixed depth, of tokens per second at k = auto


@dataclass(frozen=True)
class FeatureReport:
    """Rows in the order of `FEATURES`, by cell."""

    model: str
    machine: SystemInfo
    tokens: int
    cpu_time: bool = False  # a CPU computes, which other programs may share
    rows: list[FeatureRow] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # features, and why they were not measured

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def markdown(self) -> str:
        parts = [f"# Features: {self.model}", f"Measured on {self.machine}"]
        clock = "of CPU time, all threads," if self.cpu_time else ""
        parts.append(
            f"A step in milliseconds {clock} and its ratio to the plain one, by turns; {self.tokens} tokens each."
        )
        cells = list(dict.fromkeys(row.cell for row in self.rows))
        for context, sequences in dict.fromkeys(cell[:2] for cell in cells):
            here = [cell for cell in cells if cell[:2] == (context, sequences)]
            heads = [""]
            for cell in here:
                ratio = "speed to plain" if cell.k == "auto" else "to plain"
                heads += [f"k = {cell.k}, ms", ratio]
            rows = [[feature.name, *self._columns(feature.name, here)] for feature in FEATURES]
            rows = [row for row in rows if any(row[1:])]
            parts += [f"## {context:,} tokens of context, {sequences} at a time", table(heads, rows)]
        parts += [f"{name}: not measured, {why}" for name, why in self.refused.items()]
        return "\n\n".join(parts) + "\n"

    def _columns(self, name: str, cells: Sequence[FeatureCell]) -> Iterator[str]:
        found = {row.cell: row for row in self.rows if row.feature == name}
        for cell in cells:
            row = found.get(cell)
            yield "" if row is None else f"{row.step_ms.median:.2f}"
            yield "" if row is None else format_estimate(row.to_plain)


def measure_features(
    folder: Path, name: str, cells: Sequence[FeatureCell], tokens: int, repeats: int, begin: Callable[[str], None]
) -> FeatureReport:
    """Measure every feature in every cell, `repeats` times and once to warm up."""
    refused: dict[str, str] = {}
    with _models(folder, refused) as (models, tokenizer):
        report = FeatureReport(name, system_info(), tokens, not models["plain"].backend.asynchronous, refused=refused)
        caches = {name: PrefixCache(8 << 30) for name in models}  # a context is read once for each model
        words = [token for prompt in builtin_prompts() for token in prompt.tokens(tokenizer)]
        decode = partial(_decode, models, caches, tokenizer, words, report.tokens)
        try:
            for cell in cells:
                times: dict[str, list[Trial]] = {each.name: [] for each in FEATURES if each.model in models}
                for repeat in range(-1, repeats):
                    for feature in Random(repeat).sample(
                        [each for each in FEATURES if each.name in times], len(times)
                    ):
                        begin(f"{feature.name}, {cell}")
                        trial = decode(feature, cell)
                        trial = replace(trial, seconds=trial.cpu_seconds) if report.cpu_time else trial
                        times[feature.name] += [trial] if repeat >= 0 else []
                report.rows.extend(_row(name, cell, trials, times["plain"]) for name, trials in times.items())
        except KeyboardInterrupt:
            report.refused["what is missing"] = "interrupted"
    return report


def _decode(
    models: Mapping[str, Model],
    caches: Mapping[str, PrefixCache],
    tokenizer: TokenizerWrapper,
    words: list[int],
    tokens: int,
    feature: Feature,
    cell: FeatureCell,
) -> Trial:
    """Decode with a feature after contexts that are all different."""
    return decode_batch(
        models[feature.model],
        [list(islice(cycle(words[start:] + words[:start]), cell.context)) for start in range(cell.sequences)],
        cell.k,
        tokens,
        params=feature.params,
        adapters=list(islice(cycle(feature.adapters or (None,)), cell.sequences)),
        tokenizer=tokenizer if feature.text else None,
        prefix=caches[feature.model],
    )


def _row(name: str, cell: FeatureCell, trials: Sequence[Trial], plain: Sequence[Trial]) -> FeatureRow:
    pairs = list(zip(trials, plain, strict=True))
    if cell.k == "auto":
        ratios = [trial.rate / beside.rate for trial, beside in pairs]
    else:
        ratios = [trial.step_seconds / beside.step_seconds for trial, beside in pairs]
    steps = [1e3 * cell.sequences * trial.step_seconds for trial in trials]
    return FeatureRow(name, cell, Estimate.of(steps), Estimate.of(ratios))


@contextmanager
def _models(folder: Path, refused: dict[str, str]) -> Iterator[tuple[dict[str, Model], TokenizerWrapper]]:
    """Load the model plain, with KV caches in eight bits, and with random adapters of all linear layers."""
    plain, tokenizer = load(folder)
    models = {"plain": plain}
    with TemporaryDirectory() as scratch:
        for name, make in (
            ("eight bits", lambda: plain.with_kv_bits(8)),
            ("adapted", lambda: load(folder, adapters=_write_adapters(plain, Path(scratch)))[0]),
        ):
            try:
                models[name] = make()
            except HeadstartError as error:
                refused[name] = str(error)
        yield models, tokenizer


def _write_adapters(model: Model, folder: Path) -> Mapping[str, Path]:
    """Write random adapters of every linear layer and every expert of the trunk, in mlx-lm's format."""
    inside = {id(module) for layer in model.weights.layers for module in layer.modules()}
    layers = {
        name: module
        for name, module in model.lm.named_modules()
        if id(module) in inside and isinstance(module, LINEAR + EXPERTS)
    }
    made = {}
    for number, (adapter, rank) in enumerate(RANKS.items()):
        arrays = {}
        for name, module in layers.items():
            *experts, outputs, inputs = module.weight.shape
            inputs = inputs * 32 // module.bits if "scales" in module else inputs
            shapes = (
                ((*experts, rank, inputs), (*experts, outputs, rank))
                if experts
                else ((inputs, rank), (rank, outputs))
            )
            for part, shape in zip(("lora_a", "lora_b"), shapes, strict=True):
                noise = mx.random.normal(shape, key=mx.random.key(number)) * 0.01
                arrays[f"{name}.{part}"] = noise.astype(mx.bfloat16)
        made[adapter] = folder / adapter
        made[adapter].mkdir()
        mx.save_safetensors(str(made[adapter] / "adapters.safetensors"), arrays)
        config = {"fine_tune_type": "lora", "lora_parameters": {"rank": rank, "scale": 1.0, "dropout": 0.0}}
        (made[adapter] / "adapter_config.json").write_text(json.dumps(config))
    return made
