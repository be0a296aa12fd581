"""A decoder layer in one persistent kernel, run on the CPU: the bits of the layer's kernels run one by one."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import cuda_on_cpu
import mlx.core as mx
import mlx.nn as nn
import pytest

from checkpoints import requantize, write
from headstart.checkpoint import load_model
from headstart.kernels.cuda import decoder_layer, persistent
from headstart.kernels.cuda import layer as cuda_layer
from headstart.kernels.cuda.backend import CudaBackend
from headstart.models import Model
from headstart.state import KV

UNLIKE = {"shared_expert_intermediate_size": 32}  # a shared expert unlike the others
THREE_CHUNKS = {"hidden_size": 384, "moe_intermediate_size": 192, "shared_expert_intermediate_size": 192}  # of a row
WIDE_HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # as released models have
pytestmark = pytest.mark.usefixtures("stock_ops")  # the kernels for CUDA run on this CPU, not those for it


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with cuda_on_cpu.emulated() as patch:
        for module in (persistent, cuda_layer):
            patch.setattr(module, "resident_blocks", lambda shared: 2)
        patch.setattr(cuda_layer, "THREADS", 256)
        yield


MIXED = {
    "o_proj": ("nvfp4", 4, 16),
    "out_proj": ("mxfp4", 4, 32),
    "down_proj": ("mxfp8", 8, 32),
    "q_proj": ("affine", 8, 32),
}


@cache
def model(family: str, bits: int | str | None, **changed: int) -> Model:
    """One GatedDeltaNet layer and one of attention, in bfloat16, 4 bits, another mode, or several of them."""
    with TemporaryDirectory() as folder:
        sizes = {"num_hidden_layers": 2, "full_attention_interval": 2, "linear_value_head_dim": 32}
        sizes |= {"linear_key_head_dim": 32, "head_dim": 64, "hidden_size": 64}
        sizes |= changed
        layout = "raw" if bits is None else "converted"
        write(Path(folder), family, layout, bits=bits if isinstance(bits, int) else None, **sizes)
        if bits in ("nvfp4", "mxfp4", "mxfp8"):
            requantize(Path(folder), str(bits))
        made = load_model(folder, dtype=mx.bfloat16, backend=CudaBackend())
        if bits == "mixed":
            nn.quantize(made.lm, 64, 6, class_predicate=mixed)
        return made


def mixed(path: str, layer: nn.Module) -> bool | dict[str, int | str]:
    if not hasattr(layer, "to_quantized"):
        return False
    mode, bits, group = MIXED.get(path.rsplit(".", 1)[-1], ("affine", 6, 64))
    return {"mode": mode, "bits": bits, "group_size": group}


def rounds(
    net: Model, rows: int, widths: list[int], prepare: Callable[[int], None] = lambda number: None
) -> list[mx.array]:
    """What windows of these widths leave, each accepting one of its drafts. `prepare` is called before each."""
    state, head = net.make_state(rows), net.make_head_state(rows)
    made, at = [], 0
    for number, width in enumerate(widths):
        prepare(number)
        tokens = (mx.arange(rows * width).reshape(rows, width) * 37 + at * 11) % net.vocabulary
        hidden = net.trunk(tokens, state, 1 if at else width)
        committed = min(width, 2) if at else width
        state.accepted = mx.full((rows,), committed - 1, mx.int32)
        state.commit(mx.full((rows,), committed, mx.int32), most=committed)
        made.append(hidden)
        made.append(net.head(hidden, tokens, head))
        head.commit(mx.full((rows,), committed, mx.int32), most=committed)
        at += committed
    lengths = int(state.lengths[0])
    for layer in state.layers:
        made += [a[:, :, :lengths] if isinstance(layer, KV) else a for a in layer.arrays()]
    mx.eval(made)
    return made


@pytest.mark.parametrize(
    ("family", "bits", "rows", "widths", "changed"),
    [
        pytest.param("dense", 4, 1, [2, 2, 1], {}, marks=pytest.mark.slow),
        ("moe", 4, 2, [2, 2], {}),
        pytest.param("moe", "nvfp4", 2, [2, 2], {}, marks=pytest.mark.slow),
        pytest.param("moe", "mxfp8", 2, [2, 2], {}, marks=pytest.mark.slow),
        pytest.param("dense", "mxfp4", 2, [2, 2], {}, marks=pytest.mark.slow),
        pytest.param("dense", "mixed", 2, [2, 2], {}, marks=pytest.mark.slow),
        pytest.param("moe", "mixed", 2, [2, 2], {}, marks=pytest.mark.slow),
        pytest.param("dense", 4, 2, [2, 1, 3, 2], {}, marks=pytest.mark.slow),
        pytest.param("dense", None, 4, [2, 3, 1], {}, marks=pytest.mark.slow),
        pytest.param("moe", None, 1, [2, 1, 3, 2], {}, marks=pytest.mark.slow),
        pytest.param("moe", 4, 2, [2, 3, 1], {}, marks=pytest.mark.slow),
        pytest.param("moe", None, 2, [2, 3, 1], UNLIKE, marks=pytest.mark.slow),
        pytest.param("moe", 4, 16, [2, 1, 1], {"num_experts": 16, "num_experts_per_tok": 8}, marks=pytest.mark.slow),
        pytest.param("dense", 4, 2, [2, 3, 1], WIDE_HEADS, marks=pytest.mark.slow),
        pytest.param("dense", 4, 1, [2, 16, 16, 1], {}, marks=pytest.mark.slow),  # 15 pending drafts
        pytest.param("moe", 4, 1, [2, 16, 16, 1], {}, marks=pytest.mark.slow),
        pytest.param("moe", 4, 2, [2, 2], THREE_CHUNKS, marks=pytest.mark.slow),
    ],
)
def test_a_layer_in_one_launch_has_the_bits_of_its_kernels(
    family: str,
    bits: int | str | None,
    rows: int,
    widths: list[int],
    changed: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = model(family, bits, **changed)
    launched = []
    monkeypatch.setattr(decoder_layer, "launch_layer", lambda *a: launched.append(1) or cuda_layer.launch_layer(*a))
    together = rounds(net, rows, widths)
    # Two layers and the head's; the first window is a prompt's, and one of more than 16 rows takes other kernels.
    expected_launches = sum((1 + 2 * (n > 0)) * (rows * width <= 16) for n, width in enumerate(widths))
    assert len(launched) == expected_launches
    persistent = net.backend.persistent
    assert persistent.status.tolist()[0] == 0
    monkeypatch.setattr(persistent, "refusal", "this test")
    one_by_one = rounds(net, rows, widths)
    assert len(launched) == expected_launches
    for n, (found, expected) in enumerate(zip(together, one_by_one, strict=True)):
        assert mx.array_equal(found, expected), n


@pytest.mark.parametrize("first", [0, 1])
def test_drafts_that_a_layer_in_one_launch_left_are_read_by_its_kernels_and_the_other_way(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, widths, launched = model("moe", 4), [2, 3, 3, 3], []

    def take_turns(number: int) -> None:
        monkeypatch.setattr(net.backend.persistent, "refusal", "this test" if number % 2 == first else None)

    monkeypatch.setattr(net.backend.persistent, "refusal", "this test")
    expected = rounds(net, 2, widths)
    monkeypatch.setattr(decoder_layer, "launch_layer", lambda *a: launched.append(1) or cuda_layer.launch_layer(*a))
    found = rounds(net, 2, widths, take_turns)
    assert len(launched) == sum((1 + 2 * (n > 0)) * (n % 2 != first) for n in range(len(widths)))
    assert all(mx.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_barrier_that_a_block_does_not_reach_is_given_up_and_says_so(tmp_path: Path) -> None:
    text = Path(cuda_layer.__file__).with_name("team.cu").read_text()

    def run(stays: int, before: int) -> int:
        patience = "200'000'000'000" if stays == 3 else "20'000"  # on a busy machine all come, sooner or later
        (tmp_path / "team.cu").write_text(text.replace("200'000'000", patience))
        blocks = cuda_on_cpu.cuda_kernel(
            name="stuck",
            input_names=["before"],
            output_names=["after"],
            header=f'#include "{tmp_path / "team.cu"}"\n',
            source="""
                __shared__ headstart::Grid::Shared barrier;
                const headstart::Grid grid(before, after, &barrier);
                if (blockIdx.x < STAYS) grid.sync();
                grid.sync();
            """,
        )
        given = {"inputs": [mx.array([before, 0, 0, 0], mx.int32)], "template": [("STAYS", stays)]}
        shape = {"output_shapes": [(4,)], "output_dtypes": [mx.int32], "grid": (96, 1, 1), "threadgroup": (32, 1, 1)}
        return int(blocks(**given, **shape)[0][0])

    assert run(3, 0) == 0
    assert run(3, 1) == 1  # one before it had failed
    assert run(2, 0) == 1
    assert run(2, 0) == 1  # nobody waits any more


def test_one_thread_at_a_time_launches_persistent_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, asked = persistent.Persistent(), []
    thread = Thread(target=lambda: asked.append(ours.claim()))
    thread.start()
    thread.join()
    assert ours.claim()  # the first has ended
    other = Thread(target=lambda: asked.append(ours.claim()))
    other.start()
    other.join()
    assert asked == [True, False]
    ours.release()
    other = Thread(target=lambda: asked.append(ours.claim()))
    other.start()
    other.join()
    assert asked.pop()
    assert ours.claim()
    ours.give_up("a test")
    assert not ours.claim()
    monkeypatch.setattr(persistent, "resident_blocks", lambda shared: 0)
    assert not persistent.Persistent().claim()
