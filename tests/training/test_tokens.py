"""Documents on disk."""

from pathlib import Path

import numpy as np
import pytest

from training import tokens


def test_documents_come_back_as_they_were_over_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "PART", 50)
    luck = np.random.default_rng(0)
    documents = [luck.integers(0, 8192, length).tolist() for length in (3, 40, 17, 1, 80, 9)]
    assert tokens.write("code", documents, tmp_path) == 150
    assert len(list(tmp_path.glob("code-*.xz"))) == 3
    back = tokens.read("code", tmp_path)
    assert [back.tokens[a : a + n].tolist() for a, n in zip(back.starts, back.lengths, strict=True)] == documents


def test_a_corpus_that_is_written_again_leaves_no_part_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "PART", 2)
    tokens.write("chat", [[1, 2], [3, 4], [5, 6]], tmp_path)
    tokens.write("chat", [[7, 8]], tmp_path)
    assert tokens.read("chat", tmp_path).tokens.tolist() == [7, 8]


def test_a_missing_corpus_is_reported_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"training\.corpus"):
        tokens.read("chat", tmp_path)
