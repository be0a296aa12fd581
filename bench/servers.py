"""headstart's server beside mlx-lm's own, on the same checkpoint and machine, in one interleaved run.

    python bench/servers.py [--model NAME] [--drafts auto 0 2] [any option of load.py]

The model is converted first, since mlx-lm does not load the original. Both servers then stay up, each in a process of
its own, and load.py measures them by turns: mlx-lm first, and against it headstart once for each
number of `--drafts`. Texts are completed, not chats answered: the two servers apply the chat template differently.
Without further options it uses `--concurrency 1,2,4,8 --prompts short,medium`.
"""

import argparse
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import httpx

HEADSTART = Path(sysconfig.get_path("scripts")) / "headstart"


@contextmanager
def headstart_server(folder: Path) -> Iterator[str]:
    command = [HEADSTART, "serve", folder, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = dict(line.split(":", 1) for line in islice(process.stdout, 3))
        yield lines["Address"].strip()
    finally:
        process.terminate()
        process.wait()


@contextmanager
def mlx_lm_server(folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", folder, "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # it logs a line for every request
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit("mlx-lm's server did not start; run `python -m mlx_lm server` to see why")


def compare(folder: Path, drafts: Sequence[str], options: Sequence[str]) -> int:
    with headstart_server(folder) as ours, mlx_lm_server(folder) as theirs:
        urls = [f"mlx-lm={theirs}#model={folder}"]  # mlx-lm calls a model by its folder
        urls += [f"headstart {count}={ours}#num_draft_tokens={count}" for count in drafts]
        command = [sys.executable, Path(__file__).with_name("load.py"), "--model", folder.name, "--completions"]
        return subprocess.run([*command, *[part for url in urls for part in ("--url", url)], *options]).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-qwen3.5")
    parser.add_argument("--drafts", nargs="+", default=["auto", "0", "2"])
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve() / args.model.rsplit("/", 1)[-1]
        subprocess.run([HEADSTART, "convert", args.model, folder], check=True)
        raise SystemExit(
            compare(folder, args.drafts, options or ["--concurrency", "1,2,4,8", "--prompts", "short,medium"])
        )


if __name__ == "__main__":
    main()
