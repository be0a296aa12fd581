"""The Metal sources use nothing that Metal does not have, and that compilers for CPUs would let pass."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headstart.kernels import metal

FOLDER = Path(metal.__file__).parent
FORBIDDEN = {
    "double": r"\bdouble\b",
    "64-bit `long long`": r"\blong\s+long\b",
    "exceptions": r"\b(throw|try|catch|noexcept)\b",
    "function pointers": r"\(\s*\*\s*\w*\s*\)\s*\(",
    "lambdas": r"\[[&=]?\]\s*\(",
    "allocation": r"\b(new|delete|malloc|free)\b",
    "virtual functions and casts by type": r"\b(virtual|dynamic_cast|typeid|reinterpret_cast)\b",
    "goto": r"\bgoto\b",
    "words of Metal's as names": r"\b(half|kernel|vertex|fragment|sampler|texture|visible|ray_data)\b",
    "the standard library": r"\bstd::",
    "C++17, which Metal has from version 4 on": r"\bif\s+constexpr\b|\bauto\s*\[|\binline\s+constexpr\b",
    "double literals": r"\b\d+\.\d*(e[+-]?\d+)?(?![\w.])",
    "fast functions, which round as the chip likes": r"metal::(fast::|(exp|exp2|log|sqrt|rsqrt|sin|cos)\()",
    "sums in an order that Metal does not promise": r"\bsimd_(sum|product|prefix\w*)\b",
    "constants of a program that are not `constant`": r"(?m)^(static )?constexpr\b",
}


def texts() -> Iterator[tuple[str, str]]:
    """Kernels without comments, and the calls of them that the launchers hold."""
    for path in FOLDER.glob("*.metal"):
        yield path.name, re.sub(r"//.*", "", path.read_text())
    for path in FOLDER.glob("*.py"):
        for number, text in enumerate(re.findall(r'"""(.*?)"""', path.read_text(), re.DOTALL)):
            if ";" in text and "_in_grid" in text:
                yield f"{path.name}, text {number}", text


TEXTS = dict(texts())


def test_there_is_something_to_check() -> None:
    assert {"common.metal", "products.metal", "experts.metal", "norm.metal"} <= set(TEXTS)
    assert sum(name.startswith("attention.py") for name in TEXTS) == 3


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_forbidden_is_used(what: str) -> None:
    for name, text in TEXTS.items():
        assert (found := re.search(FORBIDDEN[what], text)) is None, f"{name}: {found and found[0]}"


def test_sources_are_ascii() -> None:
    """What compiles at run time reads other letters by the system's locale."""
    for path in FOLDER.glob("*.metal"):
        assert path.read_bytes().isascii(), path.name
    for name, text in TEXTS.items():
        assert text.isascii(), name


@pytest.mark.parametrize("name", TEXTS)
def test_no_array_has_a_length_that_is_known_at_run_time_only(name: str) -> None:
    for length in re.findall(r"\b(?:float|int|uint|T)\s+\w+\[([^\]]*)\]\s*[;,=]", TEXTS[name]):
        names = re.findall(r"[A-Za-z_]\w*", length)
        assert all(each.isupper() or each == "headstart" for each in names), length


@pytest.mark.parametrize("name", TEXTS)
def test_no_function_calls_itself(name: str) -> None:
    """Functions are called before they are defined by nobody, so there is no recursion over several either."""
    text = TEXTS[name]
    for found in re.finditer(r"^inline [^;{]*?(\w+)\(", text, re.MULTILINE):
        body = text[text.index("{", found.end()) :]
        depth = 0
        for at, letter in enumerate(body):
            depth += (letter == "{") - (letter == "}")
            if not depth:
                assert not re.search(rf"(?<!::)\b{found[1]}\s*(<[^;]*>)?\(", body[:at]), found[1]
                break


def test_pointers_have_address_spaces() -> None:
    """test_metal_language.py checks this too, where there is a clang."""
    for name, text in TEXTS.items():
        for pointer in re.findall(r"[^\n(,;]*\b(?:float|T|uint|N|Out)\*", text):
            assert re.search(r"\b(device|threadgroup|thread|constant)\b", pointer), f"{name}: {pointer.strip()}"
