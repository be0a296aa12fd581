"""headstart's server beside mlx-lm's own, on the same checkpoint and machine, in one interleaved run.

    python bench/servers.py [--model NAME] [--drafts auto 0 2] [any option of load.py]

The model is converted first, since mlx-lm does not load the original. Both servers then stay up, each in a process of
its own, and load.py measures them by turns: mlx-lm first, and against it headstart once for each
number of `--drafts`. Texts are completed, not chats answered: the two servers apply the chat template differently.
Without further options it uses `--concurrency 1,2,4,8 --prompts short,medium`.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import harness  # noqa: F401, it says where the tests' modules are

from suites.servers import free_port, headstart, running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-qwen3.5")
    parser.add_argument("--drafts", nargs="+", default=["auto", "0", "2"])
    given, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve() / given.model.rsplit("/", 1)[-1]
        subprocess.run([sys.executable, "-m", "headstart", "convert", given.model, folder], check=True)
        port = free_port()
        command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder), "--port", str(port)]
        with headstart(str(folder)) as ours, running(command, port) as theirs:
            urls = [f"mlx-lm={theirs.url}#model={folder}"]  # mlx-lm calls a model by its folder
            urls += [f"headstart {count}={ours.url}#num_draft_tokens={count}" for count in given.drafts]
            load = [sys.executable, str(Path(__file__).with_name("load.py")), "--model", folder.name, "--completions"]
            load += [part for url in urls for part in ("--url", url)]
            load += rest or ["--concurrency", "1,2,4,8", "--prompts", "short,medium"]
            raise SystemExit(subprocess.run(load).returncode)


if __name__ == "__main__":
    main()
