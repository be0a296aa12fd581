"""A product on several cores has the bits of one on one core, whatever the numbers of rows and of cores."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

import headstart.kernels.cores
from fixtures import FAMILIES, random_model, random_prompt
from headstart.engine import Engine, Request
from headstart.kernels.cores import available
from headstart.kernels.products import PLAIN, product, stock, tied
from headstart.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("stock_ops")
ROWS = (1, 2, 3, 5, 9, 97)
CORES = (2, 3, 5, 16)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend to have so many."""
    streams = [mx.new_thread_local_stream(mx.cpu) for _ in range(max(CORES) - 1)]
    monkeypatch.setattr(headstart.kernels.cores, "others", lambda: streams)
    return lambda count: monkeypatch.setattr(headstart.kernels.cores, "cores", lambda: count)


def layer(kind: str, outputs: int, inputs: int) -> nn.Module:
    mx.random.seed(outputs)
    made: nn.Module = nn.Embedding(outputs, inputs) if "embedding" in kind else nn.Linear(inputs, outputs, bias=False)
    if "bits" in kind:
        return made.to_quantized(group_size=64, bits=int(kind.split()[-2]))
    made.set_dtype(mx.float32 if "float32" in kind else mx.bfloat16)
    return made


@pytest.mark.parametrize(
    "kind", ["linear", "linear float32", "linear 4 bits", "linear 8 bits", "embedding", "embedding 4 bits"]
)
def test_the_bits_are_those_of_one_core(kind: str, cores: Callable[[int], None]) -> None:
    for outputs, inputs in ((384, 384), (1000, 256), (4096, 128)):
        module = layer(kind, outputs, inputs)
        for rows in ROWS:
            dtype = module.weight.dtype if kind in ("linear", "embedding") else mx.float32
            x = mx.random.normal((1, rows, inputs)).astype(dtype)
            expected = module.as_linear(x) if "embedding" in kind else module(x)
            for count in CORES:
                cores(count)
                found = tied(x, module) if "embedding" in kind else product(x, module)
                assert found.dtype == expected.dtype
                assert mx.array_equal(found, expected), (outputs, inputs, rows, count)


def test_every_core_has_its_part(cores: Callable[[int], None]) -> None:
    """Or this would not be faster. Parts are counted by what multiplies them."""
    cores(3)
    seen: list[int] = []

    def multiply(x: mx.array, weight: mx.array) -> mx.array:
        seen.append(weight.shape[0])
        return x @ weight.T

    headstart.kernels.cores.on_all_cores(mx.ones((9, 384)), [mx.ones((1024, 384))], 384, multiply)
    assert sum(seen) == 1024
    assert len(seen) == 3
    assert max(seen) - min(seen) <= headstart.kernels.cores.UNIT
    seen.clear()
    headstart.kernels.cores.on_all_cores(mx.ones((1, 64)), [mx.ones((64, 64))], 64, multiply)
    assert seen == [64], "too little to wake anybody for"


@pytest.mark.parametrize(
    ("quota", "most"),
    [("100000 100000", 1), ("50000 100000", 1), ("150000 100000", 2), ("max 100000", None), ("", None)],
)
def test_a_container_has_no_more_cores_than_it_has_time_for(tmp_path: Path, quota: str, most: int | None) -> None:
    seen = available(tmp_path / "nothing")
    (tmp_path / "cpu.max").write_text(quota)
    assert available(tmp_path / "cpu.max") == min(seen, most or seen)


def test_a_layer_with_a_bias_or_of_another_kind_is_called_as_it_is() -> None:
    """Layers that are on several machines are other kinds."""
    biased = nn.Linear(256, 1024)
    x = mx.random.normal((4, 256))
    assert mx.array_equal(stock(x, biased), biased(x))

    class Twice(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * super().__call__(x)

    twice = Twice(256, 1024, bias=False)
    assert type(twice) not in PLAIN
    assert mx.array_equal(stock(x, twice), twice(x))

    class Scaled(nn.Embedding):
        def as_linear(self, x: mx.array) -> mx.array:
            return 2 * super().as_linear(x)

    scaled = Scaled(1024, 256)
    assert mx.array_equal(tied(x, scaled), scaled.as_linear(x))


def test_another_thread_may_multiply_too(cores: Callable[[int], None]) -> None:
    cores(2)
    module, x, found = layer("linear", 4096, 128), mx.ones((3, 128), mx.bfloat16), []
    mx.eval(module.parameters(), x)

    def work() -> None:
        with mx.stream(mx.cpu):
            found.append(product(x, module).tolist())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [module(x).tolist()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_says_the_same_on_any_number_of_cores(
    family: str, cores: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headstart.kernels.cores, "LEAST", 1)  # its matrices are small
    model = random_model(family)
    prompt, said = random_prompt(model, 9), set()
    for count in (1, *CORES):
        cores(count)
        engine, params = Engine(model), SamplingParams(max_tokens=12, seed=3, temperature=0.7)
        rows = [engine.submit(Request(prompt, replace(params, k=k))) for k in (0, 2)]
        said |= {tuple(token for event in row for token in event.tokens) for row in rows}
    assert len(said) == 1
