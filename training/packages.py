"""The packages that the text comes from, as listed in packages.toml."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("packages.toml")


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    licence: str
    held_out: bool  # never trained on

    def wheel(self, folder: Path) -> Path:
        """Its wheel in a folder of downloads. File names spell a package's name in a way of their own."""
        plain = _plain(self.name)
        for path in sorted(folder.glob("*.whl")):
            name, version = path.name.split("-")[:2]
            if (_plain(name), version) == (plain, self.version):
                return path
        raise FileNotFoundError(
            f"{folder} has no wheel of {self.name} {self.version}: run `python -m training.download {folder}`"
        )


def packages(path: Path = LIST) -> list[Package]:
    """Held-out packages first: text that is in both belongs to them."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Package(name, entry["version"], entry["licence"], held_out=table == "held_out")
        for table in ("held_out", "train")
        for name, entry in tables[table].items()
    ]


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")
