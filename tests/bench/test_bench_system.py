"""The system in a report: enough to judge a figure by, and nothing of who measured it."""

import getpass
import json
import platform
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx

from headstart import __version__
from headstart.bench.system import system_info


def test_it_names_device_processor_and_versions() -> None:
    machine = system_info()
    assert machine.device.startswith("gpu: " if mx.default_device() == mx.Device(mx.gpu) else "cpu")
    assert machine.cores >= 1
    assert machine.memory_gb > 0
    assert set(machine.versions) == {"headstart", "mlx", "mlx-lm", "python"}
    assert machine.versions["headstart"] == __version__
    for part in (machine.processor, machine.system, f"mlx {mx.__version__.split('+')[0]}"):
        assert part in str(machine)


def test_it_does_not_name_the_host_the_user_or_a_folder() -> None:
    reported = json.dumps(asdict(system_info())) + str(system_info())
    for secret in (platform.node(), getpass.getuser(), str(Path.home()), platform.release()):
        assert secret not in reported or len(secret) < 3
