"""Attachments and request settings: limits, storage with the message, and the preview in lists."""

import base64
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.turns import file, image, user
from web.conftest import LIMITS, PageServer, serve_page

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def data_url(content: bytes, media_type: str = "image/png") -> str:
    """Return a base64 data URL of the content."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def send(page: PageServer, name: str, **body: Any) -> Any:
    """Send a message, check that it succeeded and return the reply."""
    return page.post(f"/api/conversations/{name}/runs", **body)


def test_attachments_are_stored_and_served(page: PageServer) -> None:
    """An image is shown and a file is offered as a download; the page itself has no content of either."""
    name = page.create_conversation()
    attached = [
        {"data": data_url(PNG), "filename": "dot.png"},
        {"data": data_url(b"a,b", "text/csv"), "filename": "tästa.csv"},
    ]
    send(page, name, message="What is this?", attachments=attached)
    (question, _) = page.get(f"/api/conversations/{name}/turns")["blocks"]
    assert [part["type"] for part in question["parts"]] == ["text", "image", "file"]
    path = f"/conversations/{name}/attachments/{question['id']}"
    html = page.client.get(f"/conversations/{name}").text
    assert f'src="{path}/1"' in html
    assert f'href="{path}/2" download' in html
    assert "base64" not in html
    shown = page.client.get(f"{path}/1")
    assert (shown.content, shown.headers["content-type"]) == (PNG, "image/png")
    saved = page.client.get(f"{path}/2")
    assert saved.content == b"a,b"
    assert saved.headers["content-disposition"] == "attachment; filename*=UTF-8''t%C3%A4sta.csv"


def test_unknown_attachments_are_not_found(page: PageServer) -> None:
    """A part that is no attachment, a number without a part, and a block that does not exist give 404."""
    name = page.create_conversation()
    send(page, name, message="What is this?", attachments=[{"data": data_url(PNG)}])
    (question, _) = page.get(f"/api/conversations/{name}/turns")["blocks"]
    path = f"/conversations/{name}/attachments"
    for attachment in (f"{question['id']}/0", f"{question['id']}/9", "none%25/1"):
        assert page.client.get(f"{path}/{attachment}").status_code == 404


def test_attachments_are_deleted_with_the_conversation(page: PageServer) -> None:
    """An attachment is a part of its message, so it is deleted with it."""
    name = page.create_conversation()
    send(page, name, message="What is this?", attachments=[{"data": data_url(PNG)}])
    (question, _) = page.get(f"/api/conversations/{name}/turns")["blocks"]
    path = f"/conversations/{name}/attachments/{question['id']}/1"
    assert page.client.get(path).status_code == 200
    page.client.delete(f"/api/conversations/{name}")
    assert page.client.get(path).status_code == 404


def test_attachments_of_programs_are_no_pages(page: PageServer) -> None:
    """A block may have any id, and a file of another type is not served as a page of this server."""
    script = file(b"<script>", filename="page.html", media_type="text/html")
    name = page.create_conversation(blocks=[user([image(PNG), script], id="a/b?c#d")])
    html = page.client.get(f"/conversations/{name}").text
    (path,) = re.findall(r'<img class="shown" src="([^"]+)"', html)
    assert page.client.get(path).content == PNG
    served = page.client.get(f"{path.removesuffix('0')}1")
    assert served.headers["content-type"] == "application/octet-stream"


def test_lists_read_only_the_text_before_an_attachment(page: PageServer) -> None:
    """The first words of a message are the same with a large attachment, which the page and the API serve."""
    name = page.create_conversation()
    large = {"data": data_url(PNG + bytes(20_000))}
    send(page, name, message='What "is" this?\n\tA \u2028 dot', attachments=[large])
    (question, _) = page.get(f"/api/conversations/{name}/turns")["blocks"]
    path = f"/conversations/{name}/attachments/{question['id']}/1"
    assert f'src="{path}"' in page.client.get(f"/conversations/{name}").text
    for url in (path, f"/api{path}"):
        assert page.client.get(url).content == PNG + bytes(20_000)
    row = page.get(f"/api/conversations/{name}")
    assert row["first_words"] == 'What "is" this? A dot'
    (node,) = page.get(f"/api/conversations/{name}/tree")["nodes"]
    assert node["label"] == 'What "is" this? A dot'


def test_invalid_attachments_are_rejected(page: PageServer) -> None:
    """An invalid attachment is rejected with a reason, and nothing is stored."""
    name = page.create_conversation()
    for data, status, message in (
        (data_url(b"MZ", "application/x-msdownload"), 400, "are not accepted"),
        (data_url(b"<svg/>", "image/svg+xml"), 400, "are not accepted"),
        ("https://example.com/x.png", 400, "must be a data URL"),
        ("data:image/png;base64,???", 400, "is invalid"),
        (data_url(bytes(5_000_001)), 400, "limited to 5,000,000 bytes"),
        (data_url(bytes(6_000_000)), 422, "at most"),
    ):
        body = {"message": "Hello", "attachments": [{"data": data}]}
        answer = page.client.post(f"/api/conversations/{name}/runs", json=body)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True)
    assert page.get(f"/api/conversations/{name}/tree")["nodes"] == []


def test_edited_message_retains_its_attachments(page: PageServer) -> None:
    """An edited message retains its attachments, and new ones are added."""
    name = page.create_conversation()
    first = send(page, name, message="What is this?", attachments=[{"data": data_url(PNG)}])
    (question, _) = page.get(f"/api/conversations/{name}/turns")["blocks"]
    more = [{"data": data_url(b"x", "text/plain"), "filename": "x.txt"}]
    members = {"edit": question["id"], "at": first["node"], "attachments": more}
    send(page, name, message="And this?", **members)
    (edited, _) = page.get(f"/api/conversations/{name}/turns")["blocks"]
    assert [part["type"] for part in edited["parts"]] == ["text", "image", "file"]


def test_system_prompt_change_stays_chained(page: PageServer) -> None:
    """A new system prompt applies from its message on, stays chained, and is removed by an empty string."""
    created = page.post("/api/conversations", system="Be brief.")
    name = created["id"]
    first = send(page, name, message="Hello")
    second = send(page, name, message="What is 2+3?", system="Answer in French.")
    assert second["plan"]["anchor"] == first["response_id"]
    send(page, name, message="Thanks")
    blocks = page.get(f"/api/conversations/{name}/turns")["blocks"]
    assert [block["text"] for block in blocks if block["kind"] == "system"] == ["Answer in French."]
    assert ">\nAnswer in French.</textarea>" in page.client.get(f"/conversations/{name}").text
    send(page, name, message="And now?", system="")
    blocks = page.get(f"/api/conversations/{name}/turns")["blocks"]
    assert "system" not in {block["kind"] for block in blocks}


def test_missing_body_times_out(tmp_path: Path) -> None:
    """A client that does not send its body keeps its connection no longer than the limit of the server."""
    headers = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with serve_page(tmp_path, limits=replace(LIMITS, read_seconds=0.0)) as page:
        port = page.client.base_url.port or 0
        for path in ("/api/conversations", "/login"):
            with socket.create_connection(("127.0.0.1", port), 60) as client:
                client.sendall(f"POST {path} HTTP/1.1\r\n{headers}".encode())
                assert client.recv(1000).startswith(b"HTTP/1.1 408")
