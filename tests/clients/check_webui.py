"""Run Open WebUI on Kedge: start it as ``docs/clients.md`` says, then use its HTTP API.

Both APIs that it uses are checked, the Responses API and Chat Completions: with its API for programs, and
in a saved chat with a tool, by the requests that its web page sends.
"""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2

TIMEOUT = 300
DOCUMENTED_PORT = "--port 8080"
TEST_SETTINGS = {
    "DO_NOT_TRACK": "true",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
    "HF_HUB_OFFLINE": "1",
    "OFFLINE_MODE": "true",
    "RAG_EMBEDDING_ENGINE": "openai",  # the packages for local embeddings are not installed
}
FIRST, QUESTION, ANSWER = "My name is Ada.", "What is my name?", "Your name is Ada."
TOOL = "get_current_timestamp"
"""A tool that Open WebUI offers to every model."""


class CheckFailed(Exception):
    """Open WebUI did not behave as expected."""


def expect(value: str, expected: str) -> None:
    """Raise ``CheckFailed`` if a text does not begin with another."""
    if not value.startswith(expected):
        raise CheckFailed(f"{value!r}, not {expected!r}")


@contextmanager
def start_webui(
    script: str, folder: Path, environment: Mapping[str, str]
) -> Iterator[httpx2.Client]:
    """Run the commands in an empty folder; yield a client of the API, signed in."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-e", "-c", script.replace(DOCUMENTED_PORT, f"--port {port}")],
            cwd=folder,
            env={**environment, **TEST_SETTINGS, "DATA_DIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client:
            wait_until_ready(client, process)
            account = {"email": "", "password": ""}  # without WEBUI_AUTH
            signed_in = client.post("/api/v1/auths/signin", json=account).json()
            client.headers["Authorization"] = f"Bearer {signed_in['token']}"
            yield client
    except (CheckFailed, httpx2.HTTPError) as error:
        raise CheckFailed(f"{error!r}\n{log.read_text()[-3000:]}") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(TIMEOUT)


def wait_until_ready(client: httpx2.Client, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the server answers."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end and process.poll() is None:
        try:
            client.get("/health").raise_for_status()
        except httpx2.HTTPError:
            time.sleep(0.5)
        else:
            return
    raise CheckFailed("it did not start")


def select_api(client: httpx2.Client, url: str, api_type: str) -> None:
    """Set the API of the connection, as the settings page does."""
    settings = {
        "ENABLE_OPENAI_API": True,
        "OPENAI_API_BASE_URLS": [f"{url}/v1"],
        "OPENAI_API_KEYS": ["any"],
        "OPENAI_API_CONFIGS": {"0": {"enable": True, "api_type": api_type}},
    }
    client.post("/openai/config/update", json=settings).raise_for_status()


def check_programs(client: httpx2.Client, model: str) -> None:
    """Use the API for programs, which send the history themselves."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    content = ""
    for text in (FIRST, QUESTION):
        messages.append({"role": "user", "content": text})
        body = {"model": model, "messages": messages, "stream": False}
        completion = client.post("/api/chat/completions", json=body).raise_for_status().json()
        content = completion["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
    expect(content, ANSWER)
    messages.append({"role": "user", "content": "Count to 5"})
    body = {"model": model, "messages": messages, "stream": True}
    with client.stream("POST", "/api/chat/completions", json=body) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines()]
    expect("".join(read_delta(json.loads(line)) for line in data if line[:1] == "{"), "1 2 3 4 5")


def read_delta(event: dict[str, Any]) -> str:
    """Return the text of an event of either API."""
    if event.get("type") == "response.output_text.delta":
        return event["delta"]
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def check_saved_chat(client: httpx2.Client, model: str) -> None:
    """Send the messages of a saved chat, whose history and tool calls Open WebUI manages."""
    chat_id, parent_id = None, None
    for text, expected in ((FIRST, "You said"), (f"Please call {TOOL}", TOOL), (QUESTION, ANSWER)):
        user_id, answer_id = str(uuid4()), str(uuid4())
        message = {"role": "user", "content": text}
        node = {"id": user_id, "parentId": parent_id, "childrenIds": [answer_id], **message}
        body = {
            "model": model,
            "messages": [message],
            "stream": True,
            "session_id": "any",
            "id": answer_id,
            "parent_id": parent_id,
            "user_message": node,
            **({"chat_id": chat_id} if chat_id else {}),
        }
        started = client.post("/api/chat/completions", json=body).raise_for_status().json()
        chat_id, parent_id = started["chat_id"], answer_id
        expect(wait_for_answer(client, chat_id, answer_id), expected)


def wait_for_answer(client: httpx2.Client, chat_id: str, answer_id: str) -> str:
    """Wait until an answer is complete and return its text."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        chat = client.get(f"/api/v1/chats/{chat_id}").raise_for_status().json()["chat"]
        answer = chat["history"]["messages"][answer_id]
        if answer.get("error"):
            raise CheckFailed(str(answer["error"]))
        if answer.get("done"):
            return answer["content"]
        time.sleep(0.2)
    raise CheckFailed("no answer")


def run_webui(script: str, url: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Start Open WebUI with the commands of the page and use it; return the failure, or an empty string."""
    try:
        with start_webui(script, folder, environment) as client:
            model = client.get("/api/models").raise_for_status().json()["data"][0]["id"]
            for api_type in ("responses", "chat_completions"):
                select_api(client, url, api_type)
                check_programs(client, model)
                check_saved_chat(client, model)
    except CheckFailed as error:
        return str(error)
    return ""
