"""The machine a figure was measured on, without the names of hosts, users or folders."""

import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import version

import mlx.core as mx

from ..host import available_cores
from ..kernels import choose_backend

PACKAGES = ("headstart", "mlx", "mlx-lm")


@dataclass(frozen=True)
class SystemInfo:
    system: str
    processor: str
    cores: int
    memory_gb: float
    device: str  # what the arrays are computed on
    kernels: str
    versions: dict[str, str]

    def __str__(self) -> str:
        used = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        hardware = f"{self.processor}, {self.cores} cores, {self.memory_gb:.0f} GB"
        return f"{self.device}, kernels: {self.kernels} · {hardware} · {self.system} · {used}"


def system_info() -> SystemInfo:
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    mac = platform.mac_ver()[0]
    # The rest of a Linux kernel's release may be anything that its builder wrote there.
    release = re.match(r"\d+(\.\d+)?|", platform.release())
    system = f"macOS {mac}" if mac else f"{platform.system()} {release[0] if release else ''}"
    return SystemInfo(
        system=f"{system} {platform.machine()}",
        processor=_device_name(mx.cpu),
        cores=available_cores(),
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        device=f"gpu: {_device_name(mx.gpu)}" if on_gpu else "cpu",
        kernels=str(choose_backend()),
        versions={**{name: version(name) for name in PACKAGES}, "python": platform.python_version()},
    )


def _device_name(device: mx.DeviceType) -> str:
    return str(mx.device_info(mx.Device(device, 0)).get("device_name") or platform.machine())
