"""Who was launched with others, and who was not."""

from pathlib import Path

import pytest

from headstart.cluster import launched
from headstart.cluster.machines import RANKS


@pytest.mark.parametrize("hosts", [None, "", '[["127.0.0.1:1"], ["127.0.0.1:2"]]'])
@pytest.mark.parametrize("rank", [None, *RANKS])
def test_a_process_is_one_of_several_if_it_has_a_rank_among_hosts(
    hosts: str | None, rank: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLX_HOSTFILE", *RANKS):
        monkeypatch.delenv(name, raising=False)
    if hosts is not None:
        (tmp_path / "hosts.json").write_text(hosts + "\n")
        monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
    if rank is not None:
        monkeypatch.setenv(rank, "0")
    assert launched() == (rank is not None and hosts != "")
