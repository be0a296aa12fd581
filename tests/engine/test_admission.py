"""Who is let in when: in turn between clients, and only where there is memory for them."""

import gc
import os
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from mlx.utils import tree_flatten

from fixtures import builtin_model, collect, generate, random_model, random_prompt, submit
from headstart.engine import Engine, Request
from headstart.engine.memory import memory_for_sequences
from headstart.errors import Busy, RequestError
from headstart.limits import MAX_K
from headstart.models import Model
from headstart.models.memory import Footprint, available_on_host, system_share, unused
from headstart.sampling import SamplingParams
from headstart.state import CHUNK, PrefixCache


def test_clients_take_turns() -> None:
    model = random_model("dense")
    engine = Engine(model, max_sequences=1)
    greedy = Request(random_prompt(model, 5), SamplingParams(max_tokens=1, k=0))
    order: list[str] = []
    for client in ("many", "many", "many", "few", "one", "few"):
        engine.submit(greedy, client=client, listener=lambda event, client=client: order.append(client))
    while engine.run_once():
        pass
    assert order == ["many", "few", "one", "many", "few", "many"]


def test_requests_of_a_lower_number_go_first() -> None:
    model = random_model("dense")
    engine = Engine(model, max_sequences=1)
    order: list[str] = []
    waiting = [(1, "a"), (1, "a"), (0, "b"), (9, "c"), (1, "b"), (0, "b")]
    for priority, client in waiting:
        request = Request(random_prompt(model, 5), SamplingParams(max_tokens=1, k=0), priority=priority)
        name = f"{priority} {client}"
        engine.submit(request, client=client, listener=lambda event, name=name: order.append(name))
    while engine.run_once():
        pass
    assert order == ["0 b", "0 b", "1 a", "1 b", "1 a", "9 c"]


def test_a_full_queue_reports_when_to_try_again() -> None:
    model = random_model("dense")
    engine = Engine(model, max_queue=2)
    first = [submit(engine, random_prompt(model, 5), max_tokens=2) for _ in range(2)]
    with pytest.raises(Busy, match="2 requests are waiting") as busy:
        submit(engine, random_prompt(model, 5), max_tokens=2)
    assert busy.value.retry_after > 0
    assert all(collect(handle).finish_reason == "length" for handle in first)
    assert collect(submit(engine, random_prompt(model, 5), max_tokens=2)).finish_reason == "length"


@pytest.mark.parametrize("name", ["tiny-qwen3.5", "tiny-qwen3.5-moe"])
def test_the_footprint_is_what_sequences_really_take(name: str) -> None:
    model = builtin_model(name)
    engine = Engine(model)
    for length in (300, 20):
        submit(engine, random_prompt(model, length), max_tokens=4, k=0)
    engine.prefill_all()
    batch = engine.scheduler.running.batch
    assert batch is not None
    state = batch.trunk_state
    taken = sum(a.nbytes for a in state.arrays()) - state.lengths.nbytes - state.accepted.nbytes
    one, none = Footprint.of(model), model.make_head_state(1)
    head = sum(2 * layer.keys.shape[1] * layer.keys.shape[3] * layer.keys.itemsize for layer in none.layers)
    assert taken == one.bytes([300 + 4, 20 + 4]) - 2 * head * 512


def needed(model: Model, *lengths: int) -> int:
    return Footprint.of(model).bytes(lengths)


def test_a_sequence_waits_until_there_is_memory_for_it() -> None:
    model = random_model("dense")
    prompts = [random_prompt(model, 100, i) for i in range(4)]
    engine = Engine(model, memory_limit=needed(model, 200, 200))
    handles = [submit(engine, prompt, max_tokens=40, k=3) for prompt in prompts]
    most = 0
    while engine.run_once():
        most = max(most, len(engine.scheduler.running.sequences) + len(engine.scheduler.prefilling))
    assert most == 2
    assert [collect(h).tokens for h in handles] == [generate(model, p, max_tokens=40, k=3).tokens for p in prompts]


def test_a_request_that_can_never_fit_is_refused_with_what_it_needs() -> None:
    model = random_model("dense")
    engine = Engine(model, memory_limit=needed(model, 1000))
    with pytest.raises(
        RequestError, match=r"prompt has 2000 tokens .* shorten it to \d+ tokens or lower max_"
    ) as said:
        submit(engine, random_prompt(model, 2000), max_tokens=10)
    told = int(str(said.value).split("shorten it to ")[1].split()[0])
    assert told > 900
    assert len(collect(submit(engine, random_prompt(model, told), max_tokens=10)).tokens) == 10
    with pytest.raises(RequestError):
        submit(engine, random_prompt(model, told + 1), max_tokens=10)


def test_answers_that_outgrow_the_memory_wait_and_go_on_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headstart.engine.scheduler.ANSWER", 16)  # so that long answers are let in together
    model = random_model("dense")
    prompts = [random_prompt(model, 150, i) for i in range(3)]
    how = [{"k": 3}, {"k": "auto", "temperature": 1.0, "seed": 5}, {"k": 0}]
    limit = needed(model, 200, 200, 200)
    engine = Engine(model, memory_limit=limit)
    handles = [submit(engine, p, max_tokens=200, **h) for p, h in zip(prompts, how, strict=True)]
    together, fewest = 0, 3
    while engine.run_once():
        together = max(together, len(engine.scheduler.running.sequences))
        if engine.scheduler.running.batch is not None and together == 3:
            fewest = min(fewest, len(engine.scheduler.running.sequences))
            kv = engine.scheduler.running.batch.trunk_state.capacity
            assert (
                len(engine.scheduler.running.sequences) == 1
                or needed(model, *[kv] * len(engine.scheduler.running.sequences)) <= limit
            )
    assert (together, fewest) == (3, 1)
    for handle, prompt, h in zip(handles, prompts, how, strict=True):
        answer = collect(handle)
        assert (answer.finish_reason, answer.tokens) == (
            "length",
            generate(model, prompt, max_tokens=200, **h).tokens,
        )


def test_one_client_cannot_fill_the_queue() -> None:
    model = random_model("dense")
    engine = Engine(model, max_queue=16)
    one = Request(random_prompt(model, 5), SamplingParams(max_tokens=1, k=0))
    for _ in range(14):
        engine.submit(one, client="greedy")
    with pytest.raises(Busy, match="14 requests are waiting"):
        engine.submit(one, client="greedy")
    engine.submit(one, client="modest")


def test_a_prefix_cache_that_leaves_no_room_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.engine.scheduler.memory_for_sequences", lambda: 10**9)
    with pytest.raises(RequestError, match=r"a prefix cache of 2.00 GB leaves no room .* 1.00 GB are left"):
        Engine(random_model("dense"), prefix=PrefixCache(2 * 10**9))
    Engine(random_model("dense"), prefix=PrefixCache(10**8))


def test_what_a_prefix_cache_holds_already_is_not_set_aside_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of one model share a cache, and one that is full is no longer to be found in what is left."""
    model, prefix = random_model("dense"), PrefixCache(10**8)
    monkeypatch.setattr("headstart.engine.scheduler.memory_for_sequences", lambda: 10**9 - prefix.stats().bytes)
    first = Engine(model, prefix=prefix)
    collect(submit(first, random_prompt(model, 600), max_tokens=1))
    assert prefix.stats().bytes
    assert Engine(model, prefix=prefix).scheduler.memory == first.scheduler.memory == 10**9 - 10**8


@pytest.mark.parametrize("k", [0, 3])
def test_room_that_only_the_longest_needed_goes_with_it(k: int) -> None:
    """Or sequences that join later would each take as much, and nobody would count it."""
    model = random_model("dense")
    lengths, engine = (600, 20, 30), Engine(model, prefix=PrefixCache(0))
    prompts = [random_prompt(model, length, length) for length in lengths]
    handles = [submit(engine, prompts[0], max_tokens=4, k=k)]
    handles += [submit(engine, prompt, max_tokens=40, k=k) for prompt in prompts[1:]]
    engine.prefill_all()
    room = []
    while engine.run_once():
        if engine.scheduler.running.batch is not None:
            head = engine.scheduler.running.batch.head_state
            room.append(
                (engine.scheduler.running.batch.trunk_state.capacity, head.capacity if head is not None else 0)
            )
    assert max(room)[0] == 768
    assert room[-1] == (256, 256 if k else 0)
    for handle, prompt, limit in zip(handles, prompts, (4, 40, 40), strict=True):
        alone, answer = generate(model, prompt, max_tokens=limit, k=k), collect(handle)
        assert answer.tokens == alone.tokens
        assert answer.stats.accepted_by_position == alone.stats.accepted_by_position  # nor did the head forget


def test_what_several_answers_need_is_reported_for_all_of_them() -> None:
    model = random_model("dense")
    engine = Engine(model, memory_limit=needed(model, 300))
    with pytest.raises(RequestError, match=r"with 4 answers, .* lower max_tokens or n$"):
        engine.submit(Request(random_prompt(model, 10), SamplingParams(max_tokens=10), n=4))


GIB = 2**30


def host(root: Path, available: int, files: dict[str, str]) -> Path:
    """A Linux host with so much memory, and files under its /sys/fs/cgroup."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable: {available // 1024} kB\n")
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(text)
    return root


V1 = "memory/memory.{}_in_bytes"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, GIB),
        ({"memory.max": "max", "memory.current": "5", "memory.stat": "inactive_file 5"}, GIB),
        ({"memory.max": "900", "memory.current": "500", "memory.stat": "anon 3\ninactive_file 200"}, 600),
        ({"memory.max": "900", "memory.current": "1000", "memory.stat": "inactive_file 0"}, 0),
        ({V1.format("limit"): "900", V1.format("usage"): "500", "memory/memory.stat": "total_inactive_file 9"}, 409),
    ],
)
def test_what_other_processes_take_of_the_host_or_container_is_not_left(
    tmp_path: Path, files: dict[str, str], left: int
) -> None:
    assert available_on_host(host(tmp_path, GIB, files)) == left


def test_where_there_is_no_proc_all_that_is_installed_counts(tmp_path: Path) -> None:
    assert available_on_host(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(("info", "expected"), [({"free_memory": GIB}, ["clear", "wait"]), ({}, [])])
def test_what_a_pool_keeps_is_given_back_before_memory_is_divided(
    info: dict[str, int], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr("mlx.core.device_info", lambda: info)
    monkeypatch.setattr("mlx.core.clear_cache", lambda: done.append("clear"))
    monkeypatch.setattr("mlx.core.synchronize", lambda: done.append("wait"))
    monkeypatch.setattr("headstart.engine.memory.unused", lambda: 2 * GIB)
    assert memory_for_sequences() == int(0.9 * 2 * GIB)
    assert done == expected


@pytest.mark.parametrize(
    ("info", "left"),
    [
        ({"total_memory": 80 * GIB, "free_memory": 10 * GIB}, 13 * GIB),  # CUDA, where another process has the rest
        ({"total_memory": 80 * GIB, "free_memory": 78 * GIB}, 75 * GIB),
        ({"max_recommended_working_set_size": 20 * GIB, "memory_size": 32 * GIB}, 15 * GIB),  # Metal
        ({}, 4 * GIB),  # a CPU
    ],
)
def test_sequences_may_take_what_the_device_has_free(
    monkeypatch: pytest.MonkeyPatch, info: dict[str, int], left: int
) -> None:
    """This process has 5 GiB of arrays, and 3 more that MLX keeps for the next."""
    monkeypatch.setattr("mlx.core.device_info", lambda: info)
    monkeypatch.setattr("mlx.core.get_active_memory", lambda: 5 * GIB)
    monkeypatch.setattr("mlx.core.get_cache_memory", lambda: 3 * GIB)
    monkeypatch.setattr("headstart.models.memory.os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**23}.get)
    monkeypatch.setattr("headstart.models.memory.available_on_host", lambda: GIB)
    assert unused() == left


MAC = {"max_recommended_working_set_size": 12 * 10**9, "memory_size": 16 * 10**9, "architecture": "applegpu_g16g"}


def test_a_context_that_a_mac_cannot_hold_is_refused_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the scores of a prompt's chunk against everything before it count besides the KV cache."""
    model = builtin_model("tiny-qwen3.5")
    elsewhere = Footprint.of(model)
    monkeypatch.setattr("mlx.core.device_info", lambda: MAC)
    footprint = Footprint.of(model)
    heads, size = model.config["num_attention_heads"], model.dtype.size
    assert footprint == Footprint(elsewhere.fixed, elsewhere.position, 2 * heads * CHUNK * size)
    assert footprint.bytes([300, 20]) == elsewhere.bytes([300, 20]) + footprint.scores * 512

    prompt = random_prompt(model, 1000)
    room = footprint.bytes([len(prompt) + 10 + MAX_K + 1])
    monkeypatch.setattr(
        "mlx.core.get_active_memory", lambda: MAC["max_recommended_working_set_size"] - int(room / 0.9)
    )
    with pytest.raises(RequestError, match=r"prompt has 2000 tokens and needs 0\.\d+ GB .* 0\.\d+ GB are left"):
        Engine(model).submit(Request([*prompt, *prompt], SamplingParams(max_tokens=10)))
    monkeypatch.setenv("HEADSTART_MEMORY_GB", "100")
    Engine(model).submit(Request([*prompt, *prompt], SamplingParams(max_tokens=10)))


@pytest.mark.parametrize("files", [400_000, 100_000])  # 16 KiB each: 6.6 and 1.6 GB
def test_what_other_programs_hold_of_a_macs_memory_is_not_left(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    said = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               50000.\n"
        "Pages active:                            300000.\n"
        "Pages inactive:                          250000.\n"
        "Pages wired down:                        200000.\n"
        "Pages purgeable:                          10000.\n"
        f"File-backed pages:                       {files}.\n"
        "Anonymous pages:                         400000.\n"
    )
    monkeypatch.setattr("mlx.core.device_info", lambda: MAC)
    monkeypatch.setattr("mlx.core.get_active_memory", lambda: 10**9)
    monkeypatch.setattr("mlx.core.get_cache_memory", lambda: 10**8)
    monkeypatch.setattr("headstart.models.memory.platform.system", lambda: "Darwin")
    monkeypatch.setattr(
        "headstart.models.memory.subprocess.run", lambda command, **how: CompletedProcess(command, 0, said)
    )
    assert unused() == (60_000 + files) * 16384 + 10**8 < MAC["max_recommended_working_set_size"] - 10**9
    assert system_share() == " (other programs hold much of this machine's 16.00 GB: close some)"


class WiredLimits(list[int]):
    """Each limit that is set; the calls return the one before, as MLX's do."""

    def __call__(self, limit: int) -> int:
        self.append(limit)
        return 0


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> WiredLimits:
    limits = WiredLimits()
    monkeypatch.setattr("mlx.core.set_wired_limit", limits)
    monkeypatch.setattr("mlx.core.device_info", lambda: MAC)
    return limits


def test_nothing_is_wired_unless_it_is_asked_for(wired: WiredLimits) -> None:
    """mlx#3186: a process that wires all it may makes macOS panic."""
    Engine(random_model("dense"))
    assert wired == []


def test_weights_are_wired_as_long_as_a_model_lives(
    wired: WiredLimits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at_exit: list[tuple[object, ...]] = []
    monkeypatch.setattr("headstart.engine.memory.atexit.register", lambda *call: at_exit.append(call))
    monkeypatch.setenv("HEADSTART_WIRED", "1")
    one, other = (random_model.__wrapped__("dense", seed=seed) for seed in (0, 1))
    flat: Any = tree_flatten(one.weights.parameters())
    size = int(1.1 * sum(array.nbytes for _, array in flat))
    for model in (one, one, other):
        Engine(model)
    assert wired == [size, int(2 * size) + 1]
    assert "mlx#3186" in caplog.text
    assert at_exit == [(wired, 0)]
    del other, model
    gc.collect()
    assert wired[2:] == [size]


def test_weights_that_leave_the_system_too_little_are_not_wired(
    wired: WiredLimits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADSTART_WIRED", "1")
    monkeypatch.setattr("mlx.core.device_info", lambda: MAC | {"memory_size": 10**6})
    model = random_model.__wrapped__("dense")
    Engine(model)
    assert wired == [0]
    assert "weights are not wired" in caplog.text
