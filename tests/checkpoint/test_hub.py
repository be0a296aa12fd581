"""Names become folders; a hub model is downloaded once, and no more of it than its text model and head need."""

import json
import shutil
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

import headstart.checkpoint.hub
from checkpoints import save, write
from disks import read_only_folder, small_disk
from headstart.checkpoint import load_model, read_layout, resolve
from headstart.checkpoint.hub import download, download_files, header_folder, missing_files
from headstart.checkpoint.layout import HUB_ID
from headstart.errors import CheckpointError, HubError
from loopback_hub import Hub, point_at, running_hub

INDEX = "model.safetensors.index.json"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def test_an_id_is_one_that_huggingface_hub_accepts() -> None:
    """It raises a ValueError for others."""
    letters = ("a", "-", ".", "_", "/", "é")
    names = [*map("".join, chain.from_iterable(product(letters, repeat=n) for n in range(7))), "o/a.git", "o/agit"]
    names += [f"{'a' * n}/{'b' * m}" for n, m in product((1, 95, 96, 97), repeat=2)]
    for name in names:
        try:
            validate_repo_id(name)
            valid = name.isascii() and "/" in name
        except HFValidationError:
            valid = False
        assert bool(HUB_ID.fullmatch(name)) == valid, name


def add_clutter(folder: Path) -> None:
    """What a release carries besides: a vision shard, other formats, pictures."""
    save(folder / "model-vision.safetensors", {"model.visual.patch_embed.weight": mx.zeros((8, 8))}, {"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.visual.patch_embed.weight"] = "model-vision.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "README.md").write_text("---\nbase_model: org/original\n---\n")
    for name in ("pytorch_model.bin", "model.gguf", "picture.png", "consolidated.safetensors"):
        (folder / name).write_bytes(b"x" * 64)


def test_only_what_is_needed_is_downloaded(tmp_path: Path, hub: Hub) -> None:
    hub.models["org/model"] = folder = write(
        tmp_path / "model", "moe", "sidecar", bits=4, sidecar="mtp/weights.safetensors"
    )
    add_clutter(folder)
    found = resolve("org/model")
    assert read_layout(found).mtp.location == "mtp/weights.safetensors"
    assert sorted(hub.downloaded) == sorted(
        [
            "README.md", "chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json", INDEX,
            "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "mtp/weights.safetensors",
        ]
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["sidecar", "stripped"])
def test_a_hub_model_is_inspected_without_its_weights(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(headstart.checkpoint.hub, "BLOCK", 4096)
    hub.models["org/model"] = folder = write(tmp_path / "model", "dense", kind, bits=4)
    before = Path.cwd()
    with header_folder("org/model") as (found, name):
        report = json.loads(json.dumps(read_layout(found).report()).replace(str(found), name))
        assert Path.cwd() == before, "other threads may use it"
    here = json.loads(json.dumps(read_layout(folder).report()).replace(str(folder), "org/model"))
    assert report == here
    assert report["path"] == "org/model"
    if kind == "stripped":
        assert "`headstart graft org/model --from" in report["native_mtp"]["reason"]
    assert not [file for file in hub.downloaded if file.endswith(".safetensors")]
    for file in {file for file, _, _ in hub.read}:
        data = 8 + int.from_bytes((folder / file).read_bytes()[:8], "little")
        assert max(last for each, _, last in hub.read if each == file) < data + 2 * 4096, "its header and a block"
        assert (folder / file).stat().st_size > data + 2 * 4096, "there was more of it"
    assert len({file for file, _, _ in hub.read}) == len(list(folder.rglob("*.safetensors")))


def test_inspecting_a_hub_model_leaves_the_cache_alone(tmp_path: Path, hub: Hub) -> None:
    """A graft has downloaded the head, and nothing else of the model."""
    hub.models["org/model"] = write(tmp_path / "model", "dense", "sidecar", sidecar="mtp/weights.safetensors")
    folder, files = missing_files("org/model", text=False)
    download_files("org/model", folder, files)
    head = (folder / "mtp/weights.safetensors").read_bytes()
    with header_folder("org/model") as (found, _):
        assert read_layout(found).mtp.location == "mtp/weights.safetensors"
    assert (folder / "mtp/weights.safetensors").read_bytes() == head


def test_a_cached_model_is_inspected_without_requests(tmp_path: Path, hub: Hub) -> None:
    hub.models["org/model"] = write(tmp_path / "model")
    folder = resolve("org/model")
    requests = hub.requests
    with header_folder("org/model") as (found, _):
        assert found == folder
    assert hub.requests == requests


def test_a_file_on_the_hub_that_is_no_safetensors_file_is_named(tmp_path: Path, hub: Hub) -> None:
    hub.models["org/model"] = folder = write(tmp_path / "model", shards=1)
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    wrong = pytest.raises(CheckpointError, match=f"org/model/{file.name}: not a safetensors file")
    with wrong, header_folder("org/model") as (found, _):
        read_layout(found)


def test_a_cached_model_needs_no_network_by_id_or_by_name(tmp_path: Path, hub: Hub) -> None:
    hub.models["org/model"] = write(tmp_path / "model")
    folder = resolve("org/model")
    requests = hub.requests
    assert resolve("org/model") == folder
    assert resolve("model") == folder
    assert hub.requests == requests
    assert read_layout(folder).mtp.available


def test_an_interrupted_download_is_resumed(tmp_path: Path, hub: Hub) -> None:
    hub.models["org/model"] = write(tmp_path / "model")
    folder = resolve("org/model")
    (folder / "model-00002-of-00002.safetensors").unlink()
    hub.downloaded.clear()
    assert resolve("org/model") == folder
    assert read_layout(folder).mtp.available
    assert set(hub.downloaded) <= {"model-00002-of-00002.safetensors"}


def test_a_sidecar_that_another_program_left_out_is_fetched(tmp_path: Path, hub: Hub) -> None:
    hub.models["org/model"] = write(tmp_path / "model", "dense", "sidecar")
    folder = resolve("org/model")
    (folder / "mtp.safetensors").unlink()
    assert not read_layout(folder).mtp.available
    assert read_layout(resolve("org/model")).mtp.available


def test_a_model_of_an_unknown_family_is_refused_before_its_weights(tmp_path: Path, hub: Hub) -> None:
    hub.models["org/model"] = folder = write(tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "bark"}')
    with pytest.raises(CheckpointError, match="'bark'"):
        resolve("org/model")
    assert not [file for file in hub.downloaded if file.endswith(".safetensors")]


def test_a_model_that_the_hub_does_not_have_is_named(hub: Hub) -> None:
    with pytest.raises(HubError, match=r"no/such-model: could not be read from http://127.0.0.1.*Check the spelling"):
        resolve("no/such-model")


def test_a_hub_model_without_safetensors_is_named(tmp_path: Path, hub: Hub) -> None:
    hub.models["org/model"] = folder = write(tmp_path / "model")
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    with pytest.raises(CheckpointError, match="org/model: no safetensors file"):
        resolve("org/model")


def test_an_unreachable_hub_is_named_and_a_cached_model_still_runs(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models["org/stripped"] = write(tmp_path / "stripped", "dense", "stripped")
    folder = resolve("org/stripped")
    point_at(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")  # the discard port, where nothing listens
    with pytest.raises(HubError, match=r"org/other: could not be read from http://127.0.0.1:9 \(Connect.*network"):
        resolve("org/other")
    assert resolve("org/stripped") == folder  # it lacks a head that could only be looked for


def test_offline_a_cached_model_without_a_head_runs_without_a_request(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.models["org/stripped"] = write(tmp_path / "stripped", "dense", "stripped")
    folder = resolve("org/stripped")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(headstart.checkpoint.hub, "missing_files", None)
    assert resolve("org/stripped") == folder
    assert not caplog.records


def test_offline_mode_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_at(monkeypatch, "http://127.0.0.1:9", tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"org/model.*HF_HUB_OFFLINE"):
        resolve("org/model")


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', "nothing"])
def test_an_index_that_is_none_is_named(tmp_path: Path, hub: Hub, index: str) -> None:
    hub.models["org/model"] = folder = write(tmp_path / "model")
    (folder / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=f"{INDEX}: not (JSON|a JSON object|an index of tensors)"):
        resolve("org/model")


def test_a_name_that_two_cached_models_share_is_refused(tmp_path: Path, hub: Hub) -> None:
    hub.models["one/model"] = hub.models["two/model"] = write(tmp_path / "model")
    resolve("one/model")
    resolve("two/model")
    with pytest.raises(CheckpointError, match="one/model or two/model"):
        resolve("model")


def test_paths_and_builtin_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_at(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    assert resolve().name == "tiny-qwen3.5"
    assert resolve("tiny-qwen3.5-moe").is_dir()
    assert resolve(tmp_path) == tmp_path
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model") == Path("org/model")  # a folder goes before a hub id
    with pytest.raises(CheckpointError, match="the model's name is empty"):
        resolve("")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"a file\. Name the folder"):
        resolve(tmp_path / "file")


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/path", "./no/such", "~/nowhere-at-all/x"])
def test_a_path_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    point_at(monkeypatch, "http://127.0.0.1:9", tmp_path)
    with pytest.raises(CheckpointError, match=f"{name}: no such folder.*tiny-qwen3.5"):
        resolve(name)


def test_a_disk_without_room_is_refused_before_the_download(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models["org/model"] = write(tmp_path / "model", vocab_size=20_000)
    with small_disk(tmp_path / "small", "2m") as disk:
        point_at(monkeypatch, hub.url, disk)
        with pytest.raises(
            HubError, match=rf"the disk is full: .* bytes to download, .* bytes free in {disk}.*HF_HUB_CACHE"
        ):
            resolve("org/model")
        assert not [file for file in hub.downloaded if file.endswith(".safetensors")]


def test_a_disk_that_fills_up_during_a_download_is_named(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models["org/model"] = write(tmp_path / "model", vocab_size=20_000)
    with small_disk(tmp_path / "small", "2m") as disk:
        point_at(monkeypatch, hub.url, disk)
        room = SimpleNamespace(free=2**40)  # another process takes it after it was looked for
        monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
        with pytest.raises(HubError, match="the disk is full") as caught:
            resolve("org/model")
    assert "network" not in str(caught.value)
    assert "bytes to download" in str(caught.value)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.models["org/model"] = write(tmp_path / "model")
    with read_only_folder(tmp_path / "sealed") as sealed:
        point_at(monkeypatch, hub.url, sealed / "hub")
        with pytest.raises(HubError, match=r"(Read-only|Permission).*sealed/hub.*Set HF_HUB_CACHE"):
            resolve("org/model")


@pytest.mark.parametrize("trouble", ["disk", "network"])
def test_a_head_that_cannot_be_downloaded_is_reported(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    hub.models["org/model"] = write(tmp_path / "model", "dense", "sidecar")
    (resolve("org/model") / "mtp.safetensors").unlink()
    if trouble == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    else:
        point_at(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    model = load_model("org/model")
    assert not model.has_head
    expected = "the disk is full" if trouble == "disk" else "could not be read from http://127.0.0.1:9"
    assert expected in str(model.head_unavailable)
    assert "org/model: runs without its MTP head" in caplog.text
    assert expected in caplog.text
    with pytest.raises(HubError, match=expected):
        download("org/model", vision=True)  # for a conversion, which would be without it for good
