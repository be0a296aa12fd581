"""Tables of n-gram embeddings: found at any size, read by rows, refused where they do not fit, kept by `convert`."""

import json
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

from flash_next import TEXT, make_config, write_flash_next
from headstart.checkpoint import load_model, read_layout
from headstart.checkpoint.convert import convert, plan_conversion
from headstart.checkpoint.graft import graft, plan_graft
from headstart.checkpoint.quantize import Recipe
from headstart.checkpoint.safetensors import Header, TensorInfo, read_header
from headstart.checkpoint.tables import TABLES, MappedRows, find_tables
from headstart.cli.main import app
from headstart.errors import CheckpointError
from headstart.models.grams import GramShape

RELEASED = TEXT | {  # the fields of Qwen3.8-Flash-Next that shape its table
    "vocab_size": 248320, "hidden_size": 2560, "ple_layer_ids": [2], "ple_embed_dim": 2560, "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128, "eos_token_id": 248044,
}  # fmt: skip
TOKENS = mx.array([[5, 99, 7, 30, 7, 7, 41, 200, 3, 18]])


def hidden(folder: Path) -> mx.array:
    model = load_model(folder, dtype=mx.float32)
    return model.logits(model.trunk(TOKENS, model.make_state(1), certain=TOKENS.shape[1]))


def test_the_heads_of_the_released_table_have_the_sizes_that_others_found() -> None:
    shape = GramShape.of(RELEASED, 0)
    assert shape.head_rows == (
        20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
        20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171,
    )  # fmt: skip
    assert (shape.rows, shape.width) == (320_001_536, 160)
    assert GramShape.of(RELEASED, 1).head_rows[0] > 20000171  # a second table goes on


def test_rows_of_a_file_of_the_full_size_are_found_at_their_place(tmp_path: Path) -> None:
    """102 GB that the disk does not hold: nobody has written them."""
    shape, parts, rng = GramShape.of(RELEASED, 0), 128, np.random.default_rng(0)
    rows = shape.rows // parts
    headers = []
    for number in range(2):  # files
        file, tensors, start = tmp_path / f"{number}.safetensors", {}, 4096
        for part in range(number * parts // 2, (number + 1) * parts // 2):
            name = f"model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_{part}.weight"
            tensors[name] = TensorInfo(name, mx.bfloat16, (rows, shape.width), file, start)
            start += rows * shape.width * 2
        with file.open("wb") as made:
            made.truncate(start)
        headers.append(Header(file, tensors, "pt", False))
    (table,) = find_tables(tmp_path, headers, (shape,))
    assert table.nbytes == 102_400_491_520
    chosen = [0, rows - 1, rows, shape.rows - 1, *rng.integers(0, shape.rows, 60).tolist()]
    expected = rng.integers(0, 2**16, (len(chosen), shape.width)).astype(np.uint16)
    for row, values in zip(chosen, expected, strict=True):
        part = table.parts[row // rows]
        with part.file.open("r+b") as file:
            file.seek(part.start + row % rows * shape.width * 2)
            file.write(values.tobytes())
    found = MappedRows(table.parts)(np.array(chosen).reshape(8, 8))
    assert found.shape == (8, 8, shape.width)
    assert (np.array(found.view(mx.uint16)).reshape(expected.shape) == expected).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_rows_that_were_read(tmp_path: Path) -> None:
    file, rows = tmp_path / "table", 2**15
    with file.open("wb") as made:
        made.truncate(rows * 4096)
    table = MappedRows((TensorInfo("t", mx.float32, (rows, 1024), file, 0),))

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    before, most = resident(), 0
    for start in range(0, rows, 512):
        mx.eval(table(np.arange(start, start + 512)))
        most = max(most, resident() - before)
    assert most < 0.5 * file.stat().st_size


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda text: text.update(ngram_vocab_size_base=60), "of layer 1 has .* rows where config.json makes it"),
        (lambda text: text.update(seed=1), "layer_multipliers is not what config.json makes it"),
        (lambda text: text.update(ple_layer_ids=[2, 3]), "ple_layer_ids must name layers of linear attention"),
        (lambda text: text.update(indexer_budget=18), "no multiple of blocks of 4 tokens"),
        (lambda text: text.update(indexer_head_dim=8), "indexer_head_dim is less than the 16 that rotate"),
        (lambda text: text.update(output_gate_type="tanh"), "output_gate_type 'tanh' is none of"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(change: Callable[[dict], None], refusal: str, tmp_path: Path) -> None:
    write_flash_next(tmp_path)
    config = make_config()
    change(config["text_config"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=refusal):
        load_model(tmp_path)


def test_quantised_tables_are_refused_by_name(tmp_path: Path) -> None:
    shape = GramShape.of(TEXT, 0)
    name = "language_model.model.layers.1.ple.ple_embedding.ngram_embedding.shards.0.weight"
    tensor = TensorInfo(name, mx.uint32, (shape.rows, shape.width // 8), tmp_path / "model.safetensors", 0)
    with pytest.raises(CheckpointError, match="of layer 1 is quantised or in float8"):
        find_tables(tmp_path, [Header(tensor.file, {name: tensor}, "mlx", True)], (shape,))


def test_a_truncated_table_and_one_without_a_part_are_refused(tmp_path: Path) -> None:
    write_flash_next(tmp_path)
    plan = plan_conversion(read_layout(tmp_path), tmp_path / "new", Recipe(mx.float32))
    convert(plan)
    file = tmp_path / "new" / TABLES
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        load_model(tmp_path / "new")
    file.unlink()
    with pytest.raises(CheckpointError, match="holds 0 tables of n-gram embeddings"):
        load_model(tmp_path / "new")


def test_a_conversion_keeps_what_decides_and_mixes_and_copies_the_tables(tmp_path: Path) -> None:
    source = write_flash_next(tmp_path / "raw", dtype=mx.bfloat16)
    new, four = tmp_path / "new", tmp_path / "four"
    convert(plan_conversion(read_layout(source), new, Recipe(mx.bfloat16)))
    assert mx.array_equal(hidden(new), hidden(source))
    result = CliRunner().invoke(app, ["convert", str(source), str(four), "--bits", "4", "--group-size", "32"])
    assert result.exit_code == 0, result.output
    assert TABLES in result.output
    types = {name: tensor.dtype for name, tensor in read_header(four / "model.safetensors").tensors.items()}
    for ending, dtype in (
        ("input_mix_weight_down.weight", mx.float32),
        ("input_mix_weight_up.weight", mx.float32),
        ("block_inject_weight.weight", mx.float32),
        ("index_qk_proj.weight", mx.bfloat16),
        ("q_proj.weight", mx.uint32),
        ("switch_mlp.up_proj.weight", mx.uint32),
        ("ple.key_proj.weight", mx.uint32),
    ):
        assert {found for name, found in types.items() if name.endswith(ending)} == {dtype}, ending
    head = read_header(four / "mtp/weights.safetensors").tensors
    assert {head[f"mtp.{name}.weight"].dtype for name in ("fc_embedding", "fc_hidden")} == {mx.bfloat16}
    tables = [read_layout(folder).tables for folder in (source, four)]
    rows = np.arange(tables[0][0].shape.rows)
    for ours, theirs in zip(*tables, strict=True):
        assert mx.array_equal(ours.open().read(rows), theirs.open().read(rows))
    shown = CliRunner().invoke(app, ["inspect", str(four)]).output
    assert f"{sum(table.nbytes for table in tables[1]):,} bytes, read from disk a few rows a token" in shown


def test_a_graft_brings_back_the_head_that_a_conversion_keeps(tmp_path: Path) -> None:
    source, new = write_flash_next(tmp_path / "raw", dtype=mx.bfloat16), tmp_path / "new"
    convert(plan_conversion(read_layout(source), new, Recipe(mx.bfloat16, bits=4, group_size=32)))
    kept = (new / "mtp/weights.safetensors").read_bytes()
    (new / "mtp/weights.safetensors").unlink()
    graft(plan_graft(read_layout(new), source))
    assert (new / "mtp/weights.safetensors").read_bytes() == kept
    other = write_flash_next(tmp_path / "other", seed=1, dtype=mx.bfloat16)
    (new / "mtp/weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match="another model of the same sizes"):
        plan_graft(read_layout(new), other)
