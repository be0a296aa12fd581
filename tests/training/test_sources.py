"""What of a wheel is learned from."""

import zipfile
from pathlib import Path

from training.sources import clean, sources

BODY = "".join(
    f'def {name}(items):\n    """Return the {name} of the items."""\n    return {name}_of(sorted(items))\n\n\n'
    for name in ("median", "smallest", "range", "spread", "mode", "largest", "mean", "total", "first", "other")
)


def test_a_licence_header_is_not_learned() -> None:
    cleaned = clean("# Copyright 2020 The Authors\n# Licensed under MIT\n\n" + BODY)
    assert cleaned is not None
    assert cleaned.startswith("def median")


def test_an_ordinary_comment_at_the_top_stays() -> None:
    cleaned = clean("# Statistics of lists.\n\n" + BODY)
    assert cleaned is not None
    assert cleaned.startswith("# Statistics")


def test_files_that_speak_of_the_gpl_are_left_out() -> None:
    assert clean(BODY) is not None
    assert clean("# Under the GNU General Public License.\n" + BODY) is None


def test_files_made_of_one_line_over_and_over_are_left_out() -> None:
    assert clean("".join(f"register('name_of_it', {i % 3})\n" for i in range(200))) is None


def test_files_with_tokens_of_the_chat_template_are_left_out() -> None:
    assert clean(BODY + 'END = "<|im_end|>"\n') is None


def test_what_is_no_python_is_left_out() -> None:
    assert clean(BODY + "def broken(:\n") is None


def test_vendored_and_generated_folders_are_left_out(tmp_path: Path) -> None:
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some/_vendor/other.py", BODY)
        archive.writestr("some/stats.py", "import os\n\n\n" + BODY)
    assert [text[:9] for text in sources(wheel)] == ["import os"]
