"""``farflung probe``: the network between processes of a launcher, as a table, as JSON, and as a profile."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from farflung.cli.main import main
from farflung.network import load_profile
from tests.pool import Pool
from tests.refusals import refuse


def probed(rank: int, size: int, store: dist.Store, *, port: str, args: list[str]) -> tuple[int, str]:
    """A job of the pool: exit code and output of the command."""
    del store
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return main(["probe", *args]), out.getvalue()


@pytest.fixture
def port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def test_rank_0_tells_what_all_have_measured(pool: Pool, port: str, tmp_path: Path) -> None:
    args = ["--json", "--name", "home", "--out", str(tmp_path / "home.toml")]
    (code, out), other = pool.run(2, f"{__name__}.probed", port=port, args=args)
    assert (code, other) == (0, (0, ""))
    found = json.loads(out)
    assert [(link["from"], link["to"]) for link in found["links"]] == [
        tuple(found["machines"]),
        tuple(reversed(found["machines"])),
    ]
    profile = load_profile(tmp_path / "home.toml")
    assert profile.name == "home"
    assert [site.name for site in profile.sites] == found["machines"]
    for site_link, link in zip(profile.site_links, found["links"], strict=True):
        assert site_link.link.latency_s == pytest.approx(link["latency_s"], rel=1e-3)
        assert site_link.link.bandwidth_bps == pytest.approx(link["bandwidth_bps"], rel=1e-3)


def test_it_needs_a_launcher_and_a_free_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "start one on each, by torchrun" in refuse(capsys, "probe")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    (taken := tmp_path / "home.toml").write_text("")
    assert "the file exists" in refuse(capsys, "probe", "--out", taken)
    missing = tmp_path / "none" / "home.toml"
    assert f"--out {missing}: there is no folder {missing.parent}" in refuse(
        capsys, "probe", "--out", missing
    )
    assert "name it" in refuse(capsys, "probe", "--workload", "synthetic/quadratic")
