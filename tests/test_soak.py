"""Tests of the soak test of ``make campaign`` with a few rounds."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from benchmarks.servers import Process

import soak
from chaining.proxy.running import serve_proxy
from kedge.testing import serve


async def test_a_soak_measures_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of server, proxy and engine is sampled after each round."""
    monkeypatch.setattr(soak, "MESSAGES", 2)
    monkeypatch.setattr(soak, "PADDING", "")
    rounds: list[float] = []
    with serve() as server, serve_proxy(server.base_url) as url:
        ports = {"server": urlsplit(server.url).port, "proxy": urlsplit(url).port}
        processes = {name: Process(os.getpid(), port or 0) for name, port in ports.items()}
        done = await soak.run_soak(tmp_path, 0, processes, rounds.append)
    assert len(rounds) == soak.MIN_ROUNDS
    assert done.requests == soak.MIN_ROUNDS * 5
    assert done.chained == soak.MIN_ROUNDS
    assert list(done.samples) == ["server", "proxy", "engine"]
    for name, samples in done.samples.items():
        assert len(samples) == soak.MIN_ROUNDS
        assert min(done.get_quarters(name)) > 10


def test_growth_is_measured_in_the_last_quarter() -> None:
    """Growth is computed from medians, so that a single outlier does not count."""
    sizes = [10, 20, 30, 30, 40, 40, 900, 50, 50, 60, 60, 60]
    done = soak.Soak(samples={"server": [size * 1_000_000 for size in sizes]})
    assert done.get_quarters("server") == [20, 40, 50, 60]
    assert done.get_growth("server") == pytest.approx(0.2)
