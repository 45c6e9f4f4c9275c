"""Tests of the option ``--fault`` of ``kedge serve``."""

import json
import subprocess
import sys

import httpx2 as httpx
import pytest
from click.testing import CliRunner

from kedge.cli.serve import command


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])  # noqa: S104 - expected to be rejected
def test_public_address_rejects_faults(host: str) -> None:
    """Faults are allowed on loopback only, so that other clients never meet a faulty server."""
    run = CliRunner().invoke(
        command, ["--host", host, "--token", "secret", "--fault", "forget_all", "--db", ":memory:"]
    )
    assert run.exit_code == 2
    assert "--fault is not allowed: serve on 127.0.0.1" in run.output


def test_unknown_fault_is_rejected() -> None:
    """An unknown fault is an error that lists the known ones."""
    run = CliRunner().invoke(command, ["--fault", "explode", "--db", ":memory:"])
    assert run.exit_code == 1
    assert "unknown fault 'explode'; choose one of cut_after_events" in run.output


def test_faults_are_applied_to_responses() -> None:
    """The running command applies two faults at once."""
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
