"""Tests of ``kedge proxy``."""

import json
import signal
import subprocess
from pathlib import Path

from click.testing import CliRunner
from openai import OpenAI
from websockets.sync.client import connect

from forked import ForkedProcess
from kedge.cli import group
from kedge.testing import serve


def test_invalid_options_are_rejected(tmp_path: Path) -> None:
    """An invalid option is rejected with a message that says what to do."""
    everywhere = ["--host", "0.0.0.0"]  # noqa: S104 - rejected
    for options, message in (
        (["--upstream", "ftp://x"], "must be an http or https URL"),
        (["--upstream", "http://"], "must be an http or https URL"),
        (["--upstream", "http://x:y/v1"], "must be an http or https URL"),
        (["--upstream", "https://x/openai?api-version=1"], "must not have a query"),
        (everywhere, "can be reached from other machines"),
        ([*everywhere, "--db", ":memory:"], "can be reached from"),
        (["--db", "/dev/null/x.db"], "cannot be opened"),
    ):
        db = ["--db", str(tmp_path / "proxy.db")]
        result = CliRunner().invoke(group, ["proxy", *db, *options])
        assert result.exit_code != 0
        assert message in result.output


def test_proxy_forwards_requests(tmp_path: Path) -> None:
    """The proxy prints its address, forwards requests, writes its index and stops on a signal."""
    index = tmp_path / "index.db"
    with serve() as server:
        command = ["-m", "kedge", "proxy", "--json", "--port", "0"]
        command += ["--upstream", server.base_url, "--db", str(index), "--trust", "always"]
        with ForkedProcess(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            with OpenAI(base_url=facts["base_url"], api_key="k", max_retries=5) as client:
                answer = client.responses.with_raw_response.create(
                    model="practice", input="What is 2+3?"
                )
            assert answer.parse().output_text == "2+3 = 5."
            assert len(answer.headers.get_list("date")) == 1  # the header of the upstream server
            url = facts["base_url"].replace("http", "ws")
            with connect(f"{url}/responses", compression=None) as socket:
                socket.send(" " * 17 * 2**20)  # longer than uvicorn accepts by default
                assert json.loads(socket.recv())["type"] == "error"
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0
    assert index.exists()
    assert not index.with_name("index.db-wal").exists()  # the store was closed
