"""Run the commands on the pages: `python docs/check.py [PAGE …]`, also `make docs-check`. `-v` shows all output.

Every block of ```sh, ```console and ```python is run, unless `<!-- not run: why -->` stands before it. Each page has
a folder of its own and no network. The models that pages mention exist there, in the Hugging Face cache and under
~/models, but all of them are the built-in model.

- A command must succeed, unless the page shows an `error:` below it; then it must fail.
- Output that the page shows must occur: `…` matches anything, and numbers may differ.
- `headstart serve` keeps running until the page ends or starts another server.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

from pages import ROOT, Block, Command, blocks, pages, problems

BIN = Path(sys.executable).parent
BUILTIN = ROOT / "src/headstart/builtin/tiny-qwen3.5"
LINKED = ("Makefile", "bench", "docs", "examples", "src", "tests", "training")
SECONDS = 300  # for one command
NUMBERS = re.compile(r"\d[\d.,]*%?(\s+\d[\d.,]*%?)*")


class PageRunner:
    """Runs the commands of one page, in a folder of its own."""

    def __init__(self, page: Path, root: Path):
        self.page = page
        self.problems: list[str] = []
        self.folder = root / page.relative_to(ROOT).as_posix().replace("/", "-")
        self.folder.mkdir()
        self.home = self.folder / ".home"
        shutil.copytree(root / "home", self.home, symlinks=True)
        for name in LINKED:
            (self.folder / name).symlink_to(ROOT / name)
        self.servers: list[subprocess.Popen[str]] = []

    def run(self) -> None:
        try:
            for block in blocks(self.page):
                if block.not_run is not None:
                    continue
                if block.language == "python":
                    self._do(block, Command(f"python, line {block.line}"), [str(BIN / "python"), "-c", block.text])
                elif block.language in ("sh", "console"):
                    for command in block.commands:
                        self._do(block, command, ["bash", "-o", "pipefail", "-c", command.text])
        finally:
            self.stop()

    def _do(self, block: Block, command: Command, words: list[str]) -> None:
        begun = time.monotonic()
        wrong = None
        serves = command.text.startswith("headstart serve")
        status, output = self._serve(command) if serves else self._run(words)
        if (status != 0) != fails(command):
            wrong = f"ended with status {status}"
        elif not shows(command.output, output):
            wrong = "printed something else than the page shows"
        print(f"{'FAIL' if wrong else 'ok  '} {time.monotonic() - begun:5.1f} s  {command.text}", flush=True)
        if "-v" in sys.argv:
            print(output, flush=True)
        if wrong:
            place = f"{self.page.relative_to(ROOT)}:{block.line}"
            self.problems.append(f"{place}: {command.text}\n  {wrong}:\n{output}")

    def _run(self, words: list[str]) -> tuple[int, str]:
        output = self.folder / ".output"
        process = self._start(words, output)
        try:
            return process.wait(SECONDS), output.read_text()
        except subprocess.TimeoutExpired:
            return -1, f"{output.read_text()}\nnot done after {SECONDS} seconds"
        finally:
            end(process)

    def _serve(self, command: Command) -> tuple[int, str]:
        """Start a server and wait until it listens or exits."""
        if not fails(command):
            self.stop()
        output = self.folder / f".{time.monotonic_ns()}"
        process = self._start(["bash", "-c", f"exec {command.text}"], output)
        until = time.monotonic() + SECONDS
        while process.poll() is None and not listens(output.read_text()):
            if time.monotonic() > until:
                end(process)
                return -1, f"{output.read_text()}\nnot listening after {SECONDS} seconds"
            time.sleep(0.1)
        if process.poll() is None:
            self.servers.append(process)
        return process.poll() or 0, output.read_text()

    def stop(self) -> None:
        """Stop the servers, as Ctrl-C would."""
        while self.servers:
            server = self.servers.pop()
            server.send_signal(signal.SIGINT)
            server.wait(60)

    def _start(self, words: list[str], output: Path) -> "subprocess.Popen[str]":
        with output.open("w") as file:
            return subprocess.Popen(
                words,
                cwd=self.folder,
                env=environment(self.home),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # so that whatever it started can be ended with it
            )


def end(process: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def listens(greeting: str) -> bool:
    address = re.search(r"Dashboard:\s+(\S+)", greeting)
    if address is None:
        return False
    with suppress(OSError), urlopen(f"{address.group(1)}health") as answer:
        return answer.status == 200
    return False


def fails(command: Command) -> bool:
    return bool(re.search(r"^error: |^╭─ Error", command.output, re.MULTILINE))


def shows(shown: str, real: str) -> bool:
    pattern = ".*".join(re.escape(alike(part)) for part in shown.split("…"))
    return re.search(pattern, alike(real), re.DOTALL) is not None


def alike(text: str) -> str:
    """Return the text without what differs from run to run: numbers and the width of columns."""
    return re.sub(r"\s+", " ", NUMBERS.sub("0", text)).strip()


def environment(home: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "PYTHONPATH", "TMPDIR") if name in os.environ}
    return kept | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def create_models(home: Path) -> None:
    """Create the models that pages mention: an original, a conversion without its head, and one with it."""

    def cached(repo: str) -> Path:
        place = home / ".cache/huggingface/hub" / f"models--{repo.replace('/', '--')}"
        (place / "snapshots").mkdir(parents=True)
        (place / "refs").mkdir()
        (place / "refs/main").write_text("0123abc")
        return place / "snapshots/0123abc"

    cached("Qwen/Qwen3.6-27B").symlink_to(BUILTIN)
    # Compile the CPU kernels once: every page starts from a copy of this home.
    subprocess.run([str(BIN / "python"), "-m", "headstart.kernels.cpu"], env=environment(home), capture_output=True)
    (home / "models").mkdir()
    converted = home / "models/Qwen3.6-27B-4bit"
    command = [str(BIN / "headstart"), "convert", "Qwen/Qwen3.6-27B", str(converted), "--bits", "4"]
    subprocess.run(command, env=environment(home), check=True, capture_output=True)
    shutil.copytree(
        converted, cached("mlx-community/Qwen3.6-27B-4bit"), ignore=shutil.ignore_patterns("mtp", "norms")
    )


def main(wanted: list[Path]) -> int:
    begun = time.monotonic()
    found = [problem for page in wanted for problem in problems(page)]
    with tempfile.TemporaryDirectory(prefix="headstart-docs-") as root:
        create_models(Path(root) / "home")
        for page in wanted:
            print(page.relative_to(ROOT))
            runner = PageRunner(page, Path(root))
            runner.run()
            found += runner.problems
    skipped = [block for page in wanted for block in blocks(page) if block.not_run]
    for block in skipped:
        print(f"not run: {block.page.relative_to(ROOT)}:{block.line}: {block.not_run}")
    for problem in found:
        print(f"\n{problem}")
    print(f"\n{len(wanted)} pages, {len(found)} problems, {time.monotonic() - begun:.0f} s")
    return bool(found)


if __name__ == "__main__":
    named = [Path(name).resolve() for name in sys.argv[1:] if name != "-v"]
    sys.exit(main(named or pages()))
