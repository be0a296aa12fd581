"""`python -m training.download FOLDER`: the wheels of every listed package, by `pip download`.

Wheels for one platform whatever this machine is, so that everyone reads the same files.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from .packages import packages

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64", "any")


def download(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.writelines(f"{package.name}=={package.version}\n" for package in packages())
        wanted.flush()
        platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", "3.11", "--implementation", "cp", *platforms]
        subprocess.run([*command, "--dest", str(folder), "--requirement", wanted.name], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    download(parser.parse_args().folder)


if __name__ == "__main__":
    main()
