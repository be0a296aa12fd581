"""What a report contains about a machine, from what a Mac's commands print, and the verdict on its tokens.

The commands' output was written down from documentation and others' reports, not on a Mac of ours.
"""

import re
from dataclasses import replace

import mlx.core as mx
import pytest

from headstart.bench.machine import current_load, device_facts, memory_facts, without_private_names
from headstart.bench.machine_report import exactness
from headstart.bench.probe import Divergence

PRINTED = {
    "sysctl -n hw.perflevel0.physicalcpu hw.perflevel1.physicalcpu": "12\n4\n",
    "sysctl -n iogpu.wired_limit_mb": "0\n",
    "sysctl -n vm.swapusage": "total = 2048.00M  used = 1024.25M  free = 1023.75M  (encrypted)\n",
    "ioreg -r -d 1 -c AGXAccelerator": '+-o AGXAccelerator\n  "gpu-core-count" = 40\n  "serial-number" = "C02X"\n',
    "vm_stat": (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                              100000.\n"
        "Pages active:                            900000.\n"
        "Pages inactive:                           50000.\n"
        "Pages speculative:                        10000.\n"
        "Pages wired down:                        200000.\n"
        "Pages purgeable:                          20000.\n"
        "File-backed pages:                        60000.\n"
    ),
    "pmset -g therm": "Note: No thermal warning level has been recorded\nCPU_Speed_Limit \t= 71\n",
    "pmset -g batt": "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=21627491)\t98%; discharging\n",
    "pmset -g": "System-wide power settings:\nCurrently in use:\n lowpowermode         1\n sleep                1\n",
}


def mac(*command: str) -> str:
    return PRINTED[" ".join(command)]


def test_a_mac_is_described_without_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {
        "device_name": "Apple M3 Max",
        "architecture": "applegpu_g15s",
        "memory_size": 48 * 2**30,
        "max_recommended_working_set_size": 36 * 2**30,
    }
    monkeypatch.setattr(mx, "device_info", lambda *device: gpu)
    for held in ("get_active_memory", "get_cache_memory"):
        monkeypatch.setattr(mx, held, lambda: 0)
    device, memory, thermal = device_facts(mac), memory_facts(mac), current_load(mac)
    assert device["processor"] == "Apple M3 Max"
    assert device["cores"].endswith(" (12 performance, 4 efficiency)")
    assert (device["architecture"], device["GPU cores"]) == ("applegpu_g15s", "40")
    assert memory["available"] == "2.7 GiB"  # 180,000 pages of 16 KiB
    assert (memory["recommended for a GPU"], memory["left for Headstart"]) == ("36.0 GiB", "2.7 GiB")
    assert (memory["wired limit"], memory["swap used"]) == ("the system's default", "1024.25M")
    assert re.sub(r"^load \d+\.\d; ", "", thermal) == (
        "No thermal warning level has been recorded; CPU_Speed_Limit = 71; Battery Power; low power mode on"
    )
    said = f"{device}{memory}{thermal}"
    assert "21627491" not in said
    assert "C02X" not in said


def test_where_the_commands_do_not_exist_the_rest_is_reported() -> None:
    assert re.fullmatch(r"load \d+\.\d", current_load(lambda *command: ""))
    assert {"processor", "cores", "device", "system", "kernels", "mlx"} <= device_facts(lambda *command: "").keys()
    assert {"total", "available", "left for Headstart"} <= memory_facts(lambda *command: "").keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/Users/ada lovelace/models/x: broken", "~/models/x: broken"),
        ("in '/private/var/folders/xy/T/build.log', line 3", "in '…/build.log', line 3"),
        ("ada@analytical-engine.local: by ada", "USER@HOST: by USER"),
        ("analytical-engine and adage", "HOST and adage"),
        ("12 / 14 / 20 tokens/s, see https://github.com/a/b", "12 / 14 / 20 tokens/s, see https://github.com/a/b"),
        ("| 1/2/4 rows | Qwen/Qwen3.6-27B |", "| 1/2/4 rows | Qwen/Qwen3.6-27B |"),
        ("`headstart graft /tmp/me/model` repairs", "`headstart graft …/model` repairs"),
    ],
)
def test_private_names_are_replaced(text: str, expected: str) -> None:
    names = {
        "/Users/ada lovelace": "~",
        "analytical-engine.local": "HOST",
        "analytical-engine": "HOST",
        "ada": "USER",
    }
    assert without_private_names(text, names) == expected


def test_a_verdict_tells_rounding_from_a_mistake() -> None:
    near_tie = Divergence(1, "code", 3, "a", "b", rounding=True)
    mistake = replace(near_tie, rounding=False)
    same, rounded, wrong = (
        exactness(found, 12, promised=not found) for found in ([], [near_tie], [near_tie, mistake])
    )
    assert same == "**Exactness: the same greedy tokens in all 12 answers**; the same tokens are promised"
    assert "1 of 12 answers differ, each where rounding decides between two tokens" in rounded
    assert rounded.endswith("not promised on these kernels")
    assert "wrong: 1 of 12 answers differ by more than rounding" in wrong
