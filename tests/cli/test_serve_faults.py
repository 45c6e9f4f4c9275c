"""Faults from the command line."""

import json
import subprocess
import sys

import httpx2 as httpx
import pytest
from click.testing import CliRunner

from kedge.cli.serve import command


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])  # noqa: S104 - refused is the point
def test_public_address_rejects_faults(host: str) -> None:
    """Nobody else's client shall meet a server that is wrong on purpose."""
    run = CliRunner().invoke(
        command, ["--host", host, "--token", "secret", "--fault", "forget_all", "--db", ":memory:"]
    )
    assert run.exit_code == 2
    assert "--fault is not allowed: serve on 127.0.0.1" in run.output


def test_a_fault_that_cannot_be_is_explained_before_anything_starts() -> None:
    """A typing mistake is answered with what there is."""
    run = CliRunner().invoke(command, ["--fault", "explode", "--db", ":memory:"])
    assert run.exit_code == 1
    assert "unknown fault 'explode'; choose one of cut_after_events" in run.output


def test_a_served_fault_strikes() -> None:
    """The real command on a real port, with two faults at once."""
    arguments = ["--port", "0", "--db", ":memory:", "--json", "--no-page"]
    faults = ["--fault", "status=503,times=1", "--fault", "omit_response_id"]
    with subprocess.Popen(
        [sys.executable, "-m", "kedge", "serve", *arguments, *faults],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["base_url"]
            body = {"model": "practice", "input": "Hello"}
            assert httpx.post(f"{url}/responses", json=body).status_code == 503
            answer = httpx.post(f"{url}/responses", json=body)
            assert answer.status_code == 200
            assert "id" not in answer.json()
        finally:
            process.terminate()
