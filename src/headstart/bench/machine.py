"""What a report says of the machine: device, memory, load and thermal state; and keep private names out of it.

Nothing here needs root. What a system does not tell is left out.
"""

import getpass
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

from ..models.memory import VARIABLE, WORKING_SET, available_on_host, unused
from .system import system_info

Ask = Callable[..., str]  # a command and its arguments → what it prints
RECLAIMABLE = ("free", "inactive", "speculative", "purgeable")  # pages of vm_stat that macOS can give out


def ask_system(*command: str) -> str:
    """Return what a command of macOS prints; nothing where there is no such command, or it fails."""
    if platform.system() != "Darwin":
        return ""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def device_facts(ask: Ask = ask_system) -> dict[str, str]:
    """Return the hardware and the versions of the software."""
    info = system_info()
    facts = {"processor": info.processor, "cores": str(info.cores)}
    cores = ask("sysctl", "-n", "hw.perflevel0.physicalcpu", "hw.perflevel1.physicalcpu").split()
    if len(cores) == 2:
        facts["cores"] += f" ({cores[0]} performance, {cores[1]} efficiency)"
    facts |= {"device": info.device, "architecture": str(mx.device_info().get("architecture", "not reported"))}
    if count := re.search(r'"gpu-core-count" = (\d+)', ask("ioreg", "-r", "-d", "1", "-c", "AGXAccelerator")):
        facts["GPU cores"] = count[1]
    return facts | {"system": info.system, "kernels": info.kernels} | info.versions


def memory_facts(ask: Ask = ask_system) -> dict[str, str]:
    """Return what there is of memory, what is available now, and what Headstart may take."""
    facts = {"total": f"{system_info().memory_gb:.1f} GiB"}
    pages = ask("vm_stat")
    facts["available"] = _gibibytes(available_by(pages) if pages else available_on_host())
    if working := mx.device_info().get(WORKING_SET):
        facts["recommended for a GPU"] = _gibibytes(int(working))
    if wired := ask("sysctl", "-n", "iogpu.wired_limit_mb").strip():
        facts["wired limit"] = "the system's default" if wired == "0" else f"{wired} MB, set with sysctl"
    if swap := re.search(r"used = (\S+)", ask("sysctl", "-n", "vm.swapusage")):
        facts["swap used"] = swap[1]
    facts["left for Headstart"] = _gibibytes(unused())
    if limit := os.environ.get(VARIABLE):
        facts[VARIABLE] = limit
    return facts


def current_load(ask: Ask = ask_system) -> str:
    """Return how busy the machine is, and what macOS says about throttling and power."""
    said = [f"load {os.getloadavg()[0]:.1f}"]
    # Lines such as "CPU_Speed_Limit = 100", or notes that no warning was recorded.
    said += [" ".join(line.split()).removeprefix("Note: ") for line in ask("pmset", "-g", "therm").splitlines()]
    # Only the first line: those after it have the battery's number.
    if source := re.match(r"Now drawing from '(.+)'", ask("pmset", "-g", "batt")):
        said.append(source[1])
    if mode := re.search(r"lowpowermode\s+(\d)", ask("pmset", "-g")):
        said.append(f"low power mode {'on' if mode[1] == '1' else 'off'}")
    return "; ".join(line for line in said if line)


def available_by(vm_stat: str) -> int:
    """Return the bytes that macOS can give out, by the output of `vm_stat`."""
    size = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = re.findall(rf"Pages ({'|'.join(RECLAIMABLE)}):\s+(\d+)", vm_stat)
    return int(size[1]) * sum(int(count) for _, count in pages) if size else 0


def without_private_names(text: str, names: Mapping[str, str] | None = None) -> str:
    """Return a text without folders, the user's name and the host's. `names`: what replaces each."""
    for name, instead in (private_names() if names is None else names).items():
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead, text)
    return re.sub(r"(?<![\w.~/`:…])/(?:[^\s/:`'\"|]+/)+", "…/", text)


def private_names() -> dict[str, str]:
    names = {str(Path.home()): "~", str(Path.cwd()): "."}
    with suppress(OSError, KeyError):  # no such user
        names[getpass.getuser()] = "USER"
    host = platform.node()
    names |= dict.fromkeys((host, host.partition(".")[0]), "HOST")
    # Longest first: a host's short name is part of its long one. A name of a letter or two says nothing.
    return {name: names[name] for name in sorted(names, key=len, reverse=True) if len(name) > 2}


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
