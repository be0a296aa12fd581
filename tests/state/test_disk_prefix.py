"""What the disk keeps of prompts: found again by the next process, bit for bit or not at all, whatever happens."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from test_prefix import LOTS, C, chunks, memory, prefill_prompts, prompt_of, resumed, store

from disks import small_disk
from headstart.state import DiskPrefix, PrefixCache
from headstart.state.disk_prefix import MARKER, MAX_WAITING, PrefixFolderError
from headstart.state.snapshot import Snapshot, take_snapshot

THIS = Path(__file__)


def cache(folder: Path, *, identity: str = "model", max_bytes: int = LOTS, memory: int = LOTS) -> PrefixCache:
    """A cache as a process has it that has just started."""
    return PrefixCache(memory, chunk=C, disk=DiskPrefix(folder, identity, max_bytes))


def fill(folder: Path, *prompts: list[int], **options: int) -> PrefixCache:
    prefix = cache(folder, **options)  # type: ignore[arg-type]
    for prompt in prompts:
        prefill_prompts(prefix, prompt)
        assert prefix.disk is not None
        assert prefix.disk.flush()
    return prefix


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


def test_a_prompt_resumes_in_the_next_process_where_it_would_have_in_this_one(tmp_path: Path) -> None:
    prompt = prompt_of(5)
    first = fill(tmp_path, prompt)
    following = cache(tmp_path)
    assert resumed(following, prompt) == resumed(first, prompt) == 5 * C  # `resumed` compares all arrays
    assert following.stats().disk_tokens == 5 * C
    assert resumed(following, prompt) == 5 * C
    assert following.stats().disk_tokens == 5 * C  # from memory now
    assert resumed(cache(tmp_path), prompt[: 4 * C + 1]) == 4 * C
    assert resumed(cache(tmp_path), [*prompt[: 4 * C + 1], 9, 9]) == 4 * C
    assert resumed(cache(tmp_path), prompt_of(5, seed=1)) == 0
    assert resumed(cache(tmp_path, identity="another"), prompt) == 0


def test_what_memory_has_no_room_for_is_found_on_the_disk(tmp_path: Path) -> None:
    prompts = [prompt_of(3, seed) for seed in range(4)]
    size = fill(tmp_path / "size", prompts[0]).stats().bytes
    prefix = fill(tmp_path / "cache", *prompts, memory=int(1.5 * size))
    assert prefix.stats().evictions
    for _ in range(2):
        assert [resumed(prefix, prompt) for prompt in prompts] == [3 * C] * 4
        assert prefix.stats().bytes <= prefix.max_bytes
    assert prefix.stats().disk_tokens > 3 * C


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32, mx.uint32])
def test_every_type_keeps_its_bits(tmp_path: Path, dtype: mx.Dtype) -> None:
    disk = DiskPrefix(tmp_path, "model", LOTS)
    bits = mx.random.randint(0, 1 << 16, (1, 2, 4, 32)).astype(mx.uint16).view(dtype)
    after = Snapshot(bits, [(bits, bits[:, :1])])
    mx.eval(after.arrays())
    disk.save(["a"], [[(bits,), (bits, bits, bits)]], after)
    assert disk.flush()
    found = DiskPrefix(tmp_path, "model", LOTS).load(["a"], 0, 1)
    assert found is not None
    packs, states = found
    assert [len(pack) for pack in packs[0]] == [1, 3]
    for array in (states.hidden, states.recurrent[0][0], *(part for pack in packs[0] for part in pack)):
        assert array.dtype == dtype
        assert mx.array_equal(array.view(mx.uint8), bits.view(mx.uint8))


def flip(at: float) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(at * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    return change


DAMAGE: dict[str, Callable[[Path], object]] = {
    "first byte": flip(0),
    "middle": flip(0.5),
    "last byte": flip(1),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "of another chunk": lambda path: path.write_bytes(
        next(f for f in files(path.parents[1]) if f.suffix == path.suffix and f != path).read_bytes()
    ),
    "a folder": lambda path: path.is_dir() or (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("suffix", [".kv", ".state"])
def test_a_damaged_entry_is_never_used(tmp_path: Path, damage: Callable[[Path], object], suffix: str) -> None:
    prompt = prompt_of(4)
    fill(tmp_path, prompt)
    names = DiskPrefix(tmp_path, "model", LOTS).names(chunks(prompt).tokens)
    damage(next(path for path in files(tmp_path) if path.name == names[3] + suffix))
    prefix = cache(tmp_path)
    assert resumed(prefix, prompt) == 3 * C  # the snapshot before
    prefill_prompts(prefix, prompt)
    assert resumed(prefix, prompt) == 4 * C
    assert prefix.disk is not None
    assert prefix.disk.flush()
    for path in files(tmp_path):
        damage(path)
    assert resumed(cache(tmp_path), prompt) == 0


def test_what_is_missing_on_the_disk_is_written_again(tmp_path: Path) -> None:
    prompt = prompt_of(5)
    prefix = fill(tmp_path, prompt)
    for path in files(tmp_path):
        path.unlink()
    assert prefix.disk is not None
    prefill_prompts(prefix, longer := [*prompt, *prompt_of(2)])
    assert prefix.disk.flush()
    assert resumed(cache(tmp_path), longer) == len(longer) // C * C


def test_the_folder_stays_within_its_bound_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    prompts = [prompt_of(3, seed) for seed in range(9)]
    fill(tmp_path / "size", prompts[0])
    size = sum(path.stat().st_size for path in files(tmp_path / "size"))
    folder = tmp_path / "cache"
    for n, prompt in enumerate(prompts):
        fill(folder, prompt, max_bytes=3 * size)
        assert sum(path.stat().st_size for path in files(folder)) <= 3 * size
        if n >= 2:  # the first is used again and again
            assert resumed(cache(folder, max_bytes=3 * size), prompts[0]) == 3 * C
    assert resumed(cache(folder), prompts[-1]) == 3 * C
    assert resumed(cache(folder), prompts[2]) == 0
    fill(folder, prompt_of(3, 99), identity="another", max_bytes=size)  # type: ignore[arg-type]
    assert sum(path.stat().st_size for path in files(folder)) <= size


def test_a_prompt_larger_than_the_bound_leaves_its_beginning(tmp_path: Path) -> None:
    prompt = prompt_of(20)
    prefix = cache(tmp_path, max_bytes=200_000)
    assert prefix.disk is not None
    for end in range(C, len(prompt), C):
        store(prefix, prompt, end)
        assert prefix.disk.flush()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 200_000
    assert 0 < resumed(cache(tmp_path), prompt) < 20 * C


def test_a_full_disk_costs_only_what_was_not_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as folder:
        prefix = fill(folder / "cache", *(prompt_of(3, seed) for seed in range(6)))
        assert [resumed(prefix, prompt_of(3, seed)) for seed in range(6)] == [3 * C] * 6
        assert not [path for path in files(folder / "cache") if path.suffix == ".partial"]
        assert {resumed(cache(folder / "cache"), prompt_of(3, seed)) % C for seed in range(6)} == {0}


def test_after_a_write_failed_none_is_tried_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        prefix = fill(tmp_path, prompt_of(2), prompt_of(2, 1))
    assert files(tmp_path) == []
    assert len([record for record in caplog.records if "No space left" in record.message]) == 1
    assert prefix.disk is not None
    prefix.disk._paused_until = 0.0
    prefill_prompts(prefix, prompt_of(2, 2))
    assert prefix.disk.flush()
    assert resumed(cache(tmp_path), prompt_of(2, 2)) == 2 * C


def test_the_engine_never_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written in time is dropped, the oldest first."""
    go = threading.Event()
    write = DiskPrefix._write_all
    monkeypatch.setattr(DiskPrefix, "_write_all", lambda *arguments: (go.wait(), write(*arguments)))
    prefix = cache(tmp_path)
    for seed in range(3 * MAX_WAITING):
        prefill_prompts(prefix, prompt_of(1, seed))
    go.set()
    assert prefix.disk is not None
    assert prefix.disk.flush()
    kept = [seed for seed in range(3 * MAX_WAITING) if resumed(cache(tmp_path), prompt_of(1, seed))]
    assert kept[-MAX_WAITING:] == list(range(3 * MAX_WAITING))[-MAX_WAITING:]
    assert len(kept) <= MAX_WAITING + 1


def test_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    fill(folder, prompt_of(1))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files(folder)} == {0o600}


def foreign(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("irreplaceable")


def shared(folder: Path) -> None:
    DiskPrefix(folder, "model", LOTS).close()
    folder.chmod(0o770)


def linked(folder: Path) -> None:
    other = folder.with_name("elsewhere")
    other.mkdir()
    folder.symlink_to(other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder.write_text("a file"), "cannot be used"),
        (foreign, "other files"),
        (shared, "open to others"),
        (linked, "not a folder of yours"),
    ],
    ids=["a file", "other files", "shared", "a link"],
)
def test_a_folder_that_is_not_ours_is_left_alone(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "folder"
    make(folder)
    before = [(path, path.lstat().st_mode) for path in tmp_path.rglob("*")]
    with pytest.raises(PrefixFolderError, match=message):
        DiskPrefix(folder, "model", LOTS)
    assert [(path, path.lstat().st_mode) for path in tmp_path.rglob("*")] == before
    assert not (folder / MARKER).exists() or message == "open to others"


def write_until_killed(folder: Path) -> None:
    prefix = cache(folder)
    print("ready", flush=True)
    for seed in range(1000):
        prefill_prompts(prefix, prompt_of(6, seed))
        assert prefix.disk is not None
        prefix.disk.flush()


@pytest.mark.slow
def test_a_process_killed_at_any_time_leaves_only_whole_entries(tmp_path: Path) -> None:
    code = f"import sys; sys.path[:0] = {[str(THIS.parent), str(THIS.parents[1])]}; import test_disk_prefix as t; "
    found = 0
    for n in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", code + f"t.write_until_killed(t.Path({str(tmp_path)!r}))"], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        threading.Event().wait(0.02 + 0.037 * n)
        child.send_signal(signal.SIGKILL)
        child.wait()
        prefix = cache(tmp_path)
        found += sum(resumed(prefix, prompt_of(6, seed)) for seed in range(12))  # compares every array
        for path in files(tmp_path)[n::8]:
            path.unlink()
    assert found


def test_a_sequence_that_breaks_down_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    prompt, prefix = prompt_of(2), cache(tmp_path)
    states, hidden = memory(prompt[:C])
    prefix.store(chunks(prompt), 1, states, take_snapshot(states[0][0], hidden * mx.nan))
    assert prefix.disk is not None
    assert prefix.disk.flush()
    assert files(tmp_path) == []
