"""What a process asks of its machine."""

import ctypes
import platform
import re
from pathlib import Path

import pytest

from headstart.host import give_back_memory


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not keep it")
def test_freed_memory_goes_back_to_the_system() -> None:
    libc, block, count = ctypes.CDLL(None), 2**14, 2**12
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(block) for _ in range(count)]
    for each in blocks:
        ctypes.memset(each, 1, block)
    for each in blocks[:-1]:  # the last one keeps the others in the heap
        libc.free(each)
    before = resident_bytes()
    give_back_memory()
    assert before - resident_bytes() > block * count // 2
    libc.free(blocks[-1])
