"""What each machine reads of a checkpoint: together all of it, and what cannot be divided is refused by name."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from headstart.cluster.parallel import PipelineParallel, TensorParallel
from headstart.errors import CheckpointError

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 64,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 2, "linear_value_head_dim": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Seat:
    """A communicator's place in its group, without a group."""

    rank: int
    ranks: int


def parts(name: str, array: mx.array, ranks: int) -> list[mx.array]:
    seats: Any = [Seat(rank, ranks) for rank in range(ranks)]
    return [TensorParallel.of(CONFIG, seat).cut(name, array) for seat in seats]


def numbered(*shape: int) -> mx.array:
    size = 1
    for each in shape:
        size *= each
    return mx.arange(size).reshape(shape)


@pytest.mark.parametrize(
    ("name", "shape", "axis"),
    [
        ("layers.3.self_attn.q_proj.weight", (48, 5), 0),
        ("layers.3.self_attn.q_proj.bias", (48,), 0),
        ("layers.3.self_attn.o_proj.scales", (5, 8), 1),
        ("layers.0.mlp.down_proj.weight", (5, 64), 1),
        ("layers.0.mlp.switch_mlp.up_proj.weight", (3, 16, 5), 1),
        ("layers.0.mlp.switch_mlp.down_proj.weight", (3, 5, 16), 2),
        ("layers.0.linear_attn.in_proj_ba.weight", (16, 5), 0),
        ("layers.0.linear_attn.A_log", (8,), 0),
    ],
)
def test_the_parts_of_a_parameter_make_up_all_of_it(name: str, shape: tuple[int, ...], axis: int) -> None:
    whole = numbered(*shape)
    cut = parts(name, whole, 4)
    assert {part.shape for part in cut} == {(*shape[:axis], shape[axis] // 4, *shape[axis + 1 :])}
    assert mx.array_equal(mx.concatenate(cut, axis=axis), whole)


@pytest.mark.parametrize("name", ["layers.0.linear_attn.in_proj_qkv.weight", "layers.0.linear_attn.conv1d.weight"])
def test_queries_keys_and_values_are_each_divided(name: str) -> None:
    """8 queries, 8 keys and 24 values that lie behind each other."""
    whole = numbered(40, 2)
    queries, keys, values = mx.split(whole, [8, 16], axis=0)
    for rank, part in enumerate(parts(name, whole, 4)):
        expected = [queries[2 * rank : 2 * rank + 2], keys[2 * rank : 2 * rank + 2], values[6 * rank : 6 * rank + 6]]
        assert mx.array_equal(part, mx.concatenate(expected))


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens.weight", "lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight",
        "layers.0.mlp.gate.weight", "layers.0.mlp.shared_expert_gate.weight", "layers.0.linear_attn.norm.weight",
        "mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.layers.0.mlp.down_proj.weight",
    ],
)  # fmt: skip
def test_norms_routers_and_the_head_are_whole_everywhere(name: str) -> None:
    whole = numbered(6, 5)
    assert all(mx.array_equal(part, whole) for part in parts(name, whole, 4))


def test_machines_share_a_key_head_where_there_are_more_of_them() -> None:
    whole = numbered(6, 5)
    cut = parts("layers.3.self_attn.k_proj.weight", whole, 4)
    assert [part.tolist() for part in cut] == [half.tolist() for half in mx.split(whole, 2) for _ in range(2)]


def test_a_bias_behind_a_sum_is_added_once() -> None:
    whole = numbered(5) + 1
    total = sum(parts("layers.3.self_attn.o_proj.bias", whole, 4), mx.zeros_like(whole))
    assert mx.array_equal(total, whole)


@pytest.mark.parametrize(("ranks", "named"), [(3, "num_attention_heads is 8"), (8, "linear_num_key_heads is 4")])
def test_heads_that_cannot_be_divided_are_refused_by_name(ranks: int, named: str) -> None:
    seat: Any = Seat(0, ranks)
    with pytest.raises(CheckpointError, match=f"{named}.*--split pipeline"):
        TensorParallel.of(CONFIG, seat)


def test_groups_of_packed_weights_that_cannot_be_divided_are_refused_by_name() -> None:
    """64 inputs in groups of 32 are two scales, too few for four machines."""
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.down_proj.scales is \(5, 2\).*--split pipeline"):
        parts("layers.0.mlp.down_proj.scales", numbered(5, 2), 4)


@pytest.mark.parametrize(("ranks", "counts"), [(2, [5, 5]), (3, [4, 3, 3]), (10, [1] * 10)])
def test_every_layer_is_on_one_machine_of_a_pipeline(ranks: int, counts: list[int]) -> None:
    seats: Any = [Seat(rank, ranks) for rank in range(ranks)]
    stages = [PipelineParallel.of(CONFIG, seat) for seat in seats]
    held = [[n for n in range(10) if stage.holds(f"layers.{n}.mlp.gate.weight")] for stage in stages]
    assert [len(layers) for layers in held] == counts
    assert [n for layers in held for n in layers] == list(range(10))
    assert [stage.ends for stage in stages] == [False] * (ranks - 1) + [True]
    assert all(stage.holds("mtp.layers.0.mlp.gate.weight") for stage in stages)


def test_more_machines_than_layers_are_refused() -> None:
    seat: Any = Seat(0, 11)
    with pytest.raises(CheckpointError, match="num_hidden_layers is 10, too few for 11 machines"):
        PipelineParallel.of(CONFIG, seat)
