"""Tests of ``kedge proxy``."""

import asyncio
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from openai import OpenAI
from websockets.sync.client import connect

from forked import ForkedProcess
from kedge.cli import group
from kedge.server.uvicorn_server import LimitedServer, bind
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


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_proxy_forwards_requests(tmp_path: Path, stop: signal.Signals) -> None:
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
            process.send_signal(stop)
            assert process.wait(300) == 0
    assert index.exists()
    assert not index.with_name("index.db-wal").exists()  # the store was closed


async def test_response_cut_off_by_the_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    """A stream that does not end in time is canceled without a traceback in the log."""

    async def stream_forever(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await asyncio.Event().wait()

    server = LimitedServer(stream_forever, lifespan="off", timeout_graceful_shutdown=0)
    with bind("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"first")
        server.should_exit = True
        await serving
        writer.close()
    assert "Cancel 1 running task" in caplog.text
    assert "Traceback" not in caplog.text
