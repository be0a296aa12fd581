"""A damaged or malicious checkpoint is one line that names the file and the field, in every command.

A case is a line of CASES: how to damage a good checkpoint, and what the error must say.
"""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from checkpoints import write
from fixtures import generate
from headstart.checkpoint import load_model, load_tokenizer, read_layout
from headstart.checkpoint.config import MAX_DEPTH, Malformed, parse_object
from headstart.cli.main import app
from headstart.errors import CheckpointError, HeadstartError

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
TENSOR = "model.language_model.embed_tokens.weight"  # in SHARD
Damage = Callable[[Path], Any]
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
DEEP = "[" * 100_000 + "]" * 100_000


def text(file: str, content: str | bytes) -> Damage:
    """Replace a file."""
    return lambda folder: (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)


def config(**fields: Any) -> Damage:
    """Set fields of config.json."""
    return lambda folder: edit(folder / "config.json", lambda found: found.update(fields))


def sizes(**fields: Any) -> Damage:
    """Set fields of config.json's text part."""
    return lambda folder: edit(folder / "config.json", lambda found: found["text_config"].update(fields))


def index(**fields: Any) -> Damage:
    return lambda folder: edit(folder / INDEX, lambda found: found.update(fields))


def mapped(place: Any, name: str = TENSOR) -> Damage:
    """Let the index say that a tensor is in `place`."""
    return lambda folder: edit(folder / INDEX, lambda found: found["weight_map"].update({name: place}))


def header(**fields: Any) -> Damage:
    return lambda folder: edit_header(folder / SHARD, lambda found: found.update(fields))


def tensor(**fields: Any) -> Damage:
    """Set fields of one tensor in a header."""
    return lambda folder: edit_header(folder / SHARD, lambda found: found[TENSOR].update(fields))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = split_header(path)[0]
    change(content)
    put_header(path, json.dumps(content).encode())


def split_header(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put_header(path: Path, raw: bytes) -> None:
    data = split_header(path)[1]
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def raw_header(raw: bytes) -> Damage:
    return lambda folder: put_header(folder / SHARD, raw)


def length(value: int) -> Damage:
    """Let a file say that its header is so long."""

    def damage(folder: Path) -> None:
        content = (folder / SHARD).read_bytes()
        (folder / SHARD).write_bytes(struct.pack("<Q", value) + content[8:])

    return damage


def sparse(size: int) -> Damage:
    """A file of holes whose header would fill it."""

    def damage(folder: Path) -> None:
        (folder / SHARD).write_bytes(struct.pack("<Q", size - 8))
        os.truncate(folder / SHARD, size)

    return damage


def device(file: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).symlink_to("/dev/zero")

    return damage


def pipe(file: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return damage


CASES: dict[str, tuple[Damage, str, str]] = {  # damage, file, words
    "config: nested": (text("config.json", DEEP), "config.json", "nested too deeply"),
    "config: nested a little": (config(extra=json.loads("[" * 40 + "]" * 40)), "config.json", "levels deep"),
    "config: list": (text("config.json", "[]"), "config.json", "not a JSON object but a list"),
    "config: not UTF-8": (text("config.json", b'{"model_type": "\xff"}'), "config.json", "not JSON ('utf-8'"),
    "config: UTF-16": (text("config.json", '{"a": 1}'.encode("utf-16")), "config.json", "not JSON ('utf-8'"),
    "config: key twice": (text("config.json", '{"a": 1, "a": 2}'), "config.json", "'a' comes twice"),
    "config: digits": (text("config.json", '{"a": ' + "9" * 5000 + "}"), "config.json", "not JSON"),
    "config: pipe": (pipe("config.json"), "config.json", "not a regular file"),
    "config: model_type list": (config(model_type=[]), "config.json", "model_type [] is unknown"),
    "config: model_type escape": (config(model_type="\x1b[2J"), "config.json", r"model_type '\x1b[2J' is unknown"),
    "config: text_config number": (config(text_config=5), "config.json", "text_config is 5"),
    "config: text_config null": (config(text_config=None), "config.json", "text_config is None"),
    "config: quantization_config": (config(quantization_config=5), "config.json", "quantization_config is 5"),
    "config: extra tensors": (config(mlx_lm_extra_tensors=5), "config.json", "mlx_lm_extra_tensors is 5"),
    "config: sidecar outside": (
        config(mlx_lm_extra_tensors={"mtp_file": "../x.safetensors"}), "config.json", "mtp_file names '../x.safet",
    ),
    "config: sidecar number": (config(mlx_lm_extra_tensors={"mtp_file": 5}), "config.json", "mtp_file is a number"),
    "config: no width": (sizes(hidden_size=0), "config.json", "hidden_size is 0"),
    "config: negative width": (sizes(head_dim=-1), "config.json", "head_dim is -1"),
    "config: width in words": (sizes(vocab_size="many"), "config.json", "vocab_size is 'many'"),
    "config: infinite width": (sizes(intermediate_size=float("inf")), "config.json", "intermediate_size is inf"),
    "config: endless layers": (sizes(num_hidden_layers=10**9), "config.json", "num_hidden_layers is 1000000000"),
    "config: endless head": (sizes(mtp_num_hidden_layers=10**9), "config.json", "mtp_num_hidden_layers is"),
    "config: head in words": (sizes(mtp_num_hidden_layers="x"), "config.json", "mtp_num_hidden_layers is 'x'"),
    "config: heads": (sizes(num_key_value_heads=3), "config.json", "not a multiple of num_key_value_heads"),
    "config: no context": (sizes(max_position_embeddings=0), "config.json", "max_position_embeddings is 0"),
    "config: unknown context": (
        sizes(max_position_embeddings=None), "config.json", "max_position_embeddings is missing",
    ),
    "config: flag list": (sizes(norm_topk_prob=[1]), "config.json", "norm_topk_prob is [1]"),
    "config: no experts chosen": (sizes(num_experts=4), "config.json", "num_experts_per_tok is 0; it must be from 1"),
    "config: activation": (sizes(hidden_act="x"), "config.json", "hidden_act is 'x'; it must be silu"),
    "config: activation list": (sizes(hidden_act=["silu"]), "config.json", "hidden_act is ['silu']"),
    "config: another's": (sizes(mlp_hidden_act="gelu"), "config.json", "mlp_hidden_act is 'gelu'; it must be relu2"),
    "config: NaN": (sizes(rms_norm_eps=float("nan")), "config.json", "rms_norm_eps is nan"),
    "config: rope list": (sizes(rope_parameters=[1]), "config.json", "rope_parameters is [1]"),
    "config: rope theta": (sizes(rope_parameters={"rope_theta": "x"}), "config.json", "rope_parameters.rope_theta"),
    "config: rotary share": (sizes(partial_rotary_factor=256), "config.json", "partial_rotary_factor is 256"),
    "config: rope thetas": (sizes(rope_theta=[]), "config.json", "rope_theta is []"),
    "config: rope kind": (sizes(rope_parameters={"rope_type": "x"}), "config.json", "Unsupported RoPE type"),
    "config: rope escape": (sizes(rope_parameters={"rope_type": "\x1b["}), "config.json", r"RoPE type \x1b["),
    "index: nested": (text(INDEX, DEEP), INDEX, "nested too deeply"),
    "index: list": (text(INDEX, "[]"), INDEX, "not a JSON object but a list"),
    "index: no map": (index(weight_map=[]), INDEX, "weight_map is not a JSON object"),
    "index: number": (mapped(5), INDEX, f"weight_map.{TENSOR} is a number"),
    "index: list for a file": (mapped([]), INDEX, f"weight_map.{TENSOR} is a list"),
    "index: above": (mapped("../../etc/passwd"), INDEX, f"weight_map.{TENSOR} names '../../etc/passwd'"),
    "index: hidden above": (mapped("a/../../x"), INDEX, "outside the model's folder"),
    "index: absolute": (mapped("/etc/passwd"), INDEX, "names '/etc/passwd', which is outside"),
    "index: escape": (mapped(SHARD, "\x1b[2Jx"), INDEX, r"'\x1b[2Jx' is empty, too long or not printable"),
    "index: surrogate": (mapped(SHARD, "\ud800"), INDEX, "not printable"),
    "index: folder": (mapped("."), "", "not a regular file"),
    "header: nested": (raw_header(b'{"a":' + DEEP.encode() + b"}"), SHARD, "recursion limit exceeded"),
    "header: list": (raw_header(b"[]      "), SHARD, "invalid type: sequence"),
    "header: not UTF-8": (raw_header(b'{"\xff": 1}'), SHARD, "invalid UTF-8 in header"),
    "header: long": (length(2**63), SHARD, "header too large"),
    "header: longer than memory": (sparse(2**40), SHARD, "header too large"),
    "header: short": (length(0), SHARD, "invalid JSON in header"),
    "header: metadata list": (header(__metadata__=[]), SHARD, "invalid type: sequence, expected a map"),
    "header: metadata number": (header(__metadata__={"format": 5}), SHARD, "expected a string"),
    "header: tensor number": (header(**{TENSOR: 5}), SHARD, "expected struct TensorInfo"),
    "header: dtype": (tensor(dtype="I64"), SHARD, "invalid shape, data type, or offset for tensor"),
    "header: unknown dtype": (tensor(dtype="C64", shape=[64, 64]), SHARD, f"{TENSOR}: dtype C64 is unknown"),
    "header: dtype list": (tensor(dtype=[]), SHARD, "invalid type: sequence, expected string"),
    "header: shape": (tensor(shape=[-256, -64]), SHARD, "invalid value: integer `-256`"),
    "header: shape number": (tensor(shape=5), SHARD, "invalid type: integer `5`"),
    "header: empty": (tensor(shape=[0], data_offsets=[0, 0]), SHARD, "invalid offset for tensor"),
    "header: offsets": (tensor(data_offsets=[-32768, 0]), SHARD, "invalid value: integer `-32768`"),
    "header: offsets turned": (tensor(data_offsets=[32768, 0]), SHARD, f"invalid offset for tensor `{TENSOR}`"),
    "header: one offset": (tensor(data_offsets=[1]), SHARD, "invalid length 1"),
    "header: overlap": (tensor(data_offsets=[2, 32770]), SHARD, f"invalid offset for tensor `{TENSOR}`"),
    "header: far": (tensor(data_offsets=[2**50, 2**50 + 32768]), SHARD, "truncated"),
    "header: pipe": (pipe(SHARD), SHARD, "not a regular file"),
    "header: escape": (header(**{"\x1b[2J": EMPTY}), SHARD, r"'\x1b[2J' is empty, too long or not printable"),
}  # fmt: skip
# What only a tokenizer reads: `generate` and `serve` refuse it.
TOKENIZER_CASES: dict[str, tuple[Damage, str, str]] = {
    "tokenizer_config list": (text("tokenizer_config.json", "[]"), "tokenizer_config.json", "not a JSON object"),
    "tokenizer_config nested": (text("tokenizer_config.json", DEEP), "tokenizer_config.json", "nested too deeply"),
    "tokenizer_config length": (text("tokenizer_config.json", '{"model_max_length": "x"}'), "tokenizer_config.json",
                                "model_max_length is 'x', not a number"),
    "generation_config list": (text("generation_config.json", "[]"), "generation_config.json", "not a JSON object"),
    "generation_config nested": (text("generation_config.json", DEEP), "generation_config.json", "nested too deeply"),
    "end token list": (text("generation_config.json", '{"eos_token_id": [[]]}'), "", "eos_token_id is [[]]"),
    "end token word": (text("generation_config.json", '{"eos_token_id": "x"}'), "", "eos_token_id is 'x'"),
    "tokenizer list": (text("tokenizer.json", "[]"), "", "no usable tokenizer"),
    "tokenizer nested": (text("tokenizer.json", DEEP), "", "no usable tokenizer"),
    "tokenizer of numbers": (text("tokenizer.json", '{"model": 5, "decoder": 5}'), "", "no usable tokenizer"),
    "tokenizer not UTF-8": (text("tokenizer.json", b"\xff\xfe"), "", "no usable tokenizer"),
    **{f"{file}: pipe": (pipe(file), file, "not a regular file") for file in
       ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")},
    "tokenizer.json: device": (device("tokenizer.json"), "tokenizer.json", "not a regular file"),
    "tokenizer with code": (
        lambda folder: edit(
            folder / "tokenizer_config.json",
            lambda found: found.update(tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]}),
        ), "", "",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("good") / "raw")


@pytest.fixture(scope="module")
def stripped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("stripped") / "model", "dense", "stripped")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "model")


def refused(words: str, *command: str | Path) -> str:
    """The command ends with one line on standard error and nothing else."""
    result = CliRunner().invoke(app, [str(word) for word in command])
    assert isinstance(result.exception, SystemExit), (command[0], result.exception)
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert words in lines[0], (command[0], lines[0])
    return lines[0]


@pytest.mark.parametrize(
    ("name", "every"),
    [(name, False) for name in CASES] + [pytest.param(name, True, marks=pytest.mark.slow) for name in CASES],
)
def test_every_command_refuses_it_in_one_line(
    name: str, every: bool, folder: Path, stripped: Path, tmp_path: Path
) -> None:
    """One of them, in turn, in ordinary tests."""
    damage, file, words = CASES[name]
    damage(folder)
    commands: list[list[str | Path]] = [
        ["inspect", folder],
        ["generate", "-m", folder, "-p", "x"],
        ["convert", folder, tmp_path / "converted"],
        ["graft", folder, "--from", stripped],
        ["serve", folder, "--port", "0"],
    ]
    first = list(CASES).index(name)
    for command in commands if every else [commands[first % 5]]:
        line = refused(words, *command)
        assert file in line
        assert len(line) < 1000
    assert not (tmp_path / "converted").exists()
    source = CliRunner().invoke(app, ["graft", str(stripped), "--from", str(folder), "--dry-run"])
    assert source.exception is None or isinstance(source.exception, SystemExit), "as the source of a head"


@pytest.mark.parametrize("name", TOKENIZER_CASES)
def test_a_bad_tokenizer_is_refused_in_one_line(name: str, folder: Path) -> None:
    damage, file, words = TOKENIZER_CASES[name]
    damage(folder)
    if not words:  # usable without the code that came with it
        load_tokenizer(folder)
        return
    for command in (["generate", "-m", folder, "-p", "x"], ["serve", folder, "--port", "0"]):
        assert file in refused(words, *command)


def test_links_are_followed_as_the_hugging_face_cache_makes_them(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--model/snapshots/0123"
    blobs = tmp_path / "models--org--model/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for n, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(n))
        (snapshot / file.name).symlink_to(f"../../blobs/{n}")
    assert read_layout(snapshot).mtp.available


def test_a_conversion_copies_no_file_from_outside_the_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a key")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    assert "notes.txt: a link to" in refused("outside the model's folder", "convert", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (folder / "notes.txt").unlink()
    (folder / "notes.txt").symlink_to("chat_template.jinja")
    assert CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "out")]).exit_code == 0


def test_a_readme_cannot_put_a_command_into_our_advice(stripped: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stripped, tmp_path / "model")
    for base in ("org/model; rm -rf ~", "org/mo\\u001bdel", "$(x)/y"):
        (folder / "README.md").write_text(f'---\nbase_model: "{base}"\n---\n')
        assert "--from ORIGINAL`" in str(read_layout(folder).mtp.reason)


@pytest.mark.parametrize(
    "readme",
    [
        "---\na: [\n---\n",
        "---\n" + "[" * 500 + "\n---\n",
        "---\ntags: 5\n---\n",
        "---\ntags: [5, {}, a]\n---\n",
        "\xff",
    ],
)
def test_a_broken_readme_stops_nothing(readme: str, folder: Path, tmp_path: Path) -> None:
    (folder / "README.md").write_bytes(readme.encode("latin-1"))
    result = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "converted")])
    assert result.exit_code == 0, result.output
    assert read_layout(tmp_path / "converted").mtp.available
    assert "mlx" in (tmp_path / "converted/README.md").read_text()


def test_a_readme_that_is_a_pipe_is_not_opened(stripped: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stripped, tmp_path / "model")
    pipe("README.md")(folder)
    assert "--from ORIGINAL`" in str(read_layout(folder).mtp.reason)


def test_depth_is_bounded_where_real_configs_are_far_from() -> None:
    at = "[" * (MAX_DEPTH - 2) + "1" + "]" * (MAX_DEPTH - 2)
    assert parse_object(f'{{"a": {at}}}'.encode())
    with pytest.raises(Malformed, match="levels deep"):
        parse_object(f'{{"a": [[{at}]]}}'.encode())


VALUES: list[Any] = [
    None, True, 0, -1, 1, 3, 2**31, 2**63, 2**64, 10**30, 0.5, float("nan"), float("inf"), "", "x", "../x", "\x00",
    "\ud800", [], [[]], [1], {}, {"a": {}}, "F32", "U8", "default", [0, 0], [0, 2**40], [2, 1],
]  # fmt: skip


def mutate(value: Any, rng: random.Random) -> Any:
    """Change one place in a JSON value: drop it, replace it, copy it, or nudge a number."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key, copied = rng.choice(list(value)), dict(value)
        match rng.randrange(8):
            case 0:
                del copied[key]
            case 1:
                copied[rng.choice(["x", "", key + "x", rng.choice(list(value))])] = copied[key]
            case 2:
                copied = {rng.choice(list(value)) if k == key else k: v for k, v in value.items()}
            case _:
                copied[key] = mutate(value[key], rng)
        return copied
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], *([] if rng.random() < 0.2 else [mutate(value[at], rng)]), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return rng.choice([value + 1, value - 1, -value, 2 * value, value // 2, value + 0.5, str(value)])
    return rng.choice(VALUES)


def fuzz(folder: Path, tmp_path: Path, seed: int, cases: int) -> dict[str, int]:
    """Mutate header, config and index; whatever loads must also generate, or fail with an error of ours."""
    rng, outcomes = random.Random(seed), {"refused": 0, "loaded": 0}
    originals = {file: (folder / file).read_bytes() for file in ("config.json", INDEX, SHARD)}
    for case in range(cases):
        file = rng.choice(["config.json", "config.json", INDEX, SHARD])
        path = folder / file
        found = split_header(path)[0] if file == SHARD else json.loads(originals[file])
        for _ in range(rng.choice([1, 1, 2, 4])):
            found = mutate(found, rng)
        raw = json.dumps(found).encode()
        if rng.random() < 0.1:  # or a few bytes of the text itself
            at = rng.randrange(len(raw))
            raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + rng.randrange(3) :]
        if file == SHARD:
            put_header(path, raw)
        else:
            path.write_bytes(raw)
        message = ""
        try:
            model = load_model(folder, mtp=None if case % 2 else False)
            if case % 8 == 0:  # takes longer than all the rest, and reads little of what was changed
                load_tokenizer(folder)
            answer = generate(model, [5, 17, 130], max_tokens=2)
            if answer.error is not None:
                raise answer.error
            outcomes["loaded"] += 1
        except HeadstartError as error:
            outcomes["refused"] += 1
            message = str(error)
        except BaseException as error:
            error.add_note(f"seed {seed}, case {case}, {file}: {raw[:4000]!r}")
            raise
        assert message.isprintable(), (seed, case, file)
        path.write_bytes(originals[file])
    print(f"\n{cases} mutated checkpoints: {outcomes}, 0 crashes")
    return outcomes


def test_mutated_checkpoints_load_or_are_refused(folder: Path, tmp_path: Path) -> None:
    outcomes = fuzz(folder, tmp_path, seed=0, cases=40)
    assert outcomes["refused"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dense", "moe", "next"])
def test_a_thousand_mutated_checkpoints_load_or_are_refused(family: str, tmp_path: Path) -> None:
    fuzz(write(tmp_path / "model", family), tmp_path, seed=1, cases=400)


def test_the_error_is_a_checkpoint_error(folder: Path) -> None:
    CASES["index: above"][0](folder)
    with pytest.raises(CheckpointError, match="outside the model's folder"):
        read_layout(folder)
