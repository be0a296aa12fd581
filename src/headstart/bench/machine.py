"""What a report says of the machine: device, memory, load and thermal state; and keep private names out of it.

Nothing here needs root. What a system does not tell is left out.
"""

import getpass
import os
import platform
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

from ..models.memory import VARIABLE, WORKING_SET, ask_system, available_on_host, available_on_mac, unused
from .system import system_info

Ask = Callable[..., str]  # a command and its arguments → what it prints


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
    facts["available"] = _gibibytes(available_on_mac(ask) or available_on_host())
    if working := mx.device_info().get(WORKING_SET):
        facts["recommended for a GPU"] = _gibibytes(int(working))
    if wired := ask("sysctl", "-n", "iogpu.wired_limit_mb").strip():
        facts["wired limit"] = "the system's default" if wired == "0" else f"{wired} MB, set with sysctl"
    if swap := re.search(r"used = (\S+)", ask("sysctl", "-n", "vm.swapusage")):
        facts["swap used"] = swap[1]
    facts["left for Headstart"] = _gibibytes(unused(ask))
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
