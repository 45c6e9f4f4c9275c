"""The composer in Chromium: attachments, request settings, and conversations of another provider."""

import random
import struct
import zlib

from playwright.sync_api import FilePayload, expect

from web.browser.conftest import OpenTab, send
from web.conftest import PageServer
from web.test_attachments import PNG

DROP_FILE = """([type, name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name, { type: "text/plain" }));
  const members = { bubbles: true, cancelable: true };
  const event = type === "paste"
    ? new ClipboardEvent(type, { ...members, clipboardData: data })
    : new DragEvent(type, { ...members, dataTransfer: data });
  document.querySelector("[data-say]").dispatchEvent(event);
}"""


def build_picture() -> bytes:
    """Return a PNG of 60 by 40 pixels of noise, which do not compress."""

    def build_chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    pixels = random.Random(1)
    rows = b"".join(b"\0" + pixels.randbytes(3 * 60) for _ in range(40))
    header = struct.pack(">IIBBBBB", 60, 40, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(build_chunk(*chunk) for chunk in chunks)


def test_images_and_files_are_attached(open_tab: OpenTab, page: PageServer) -> None:
    """Files can be selected, pasted, dropped and removed; each file that is not accepted is reported."""
    tab = open_tab(page, f"/conversations/{page.create_conversation()}")
    files: list[FilePayload] = [
        {"name": "dot.png", "mimeType": "image/png", "buffer": PNG},
        {"name": "setup.exe", "mimeType": "application/x-msdownload", "buffer": b"MZ"},
        {"name": "large.txt", "mimeType": "text/plain", "buffer": b"x" * 5_000_001},
    ]
    tab.get_by_label("Attach files").set_input_files(files)
    toast = tab.locator("#toast")
    expect(toast).to_contain_text("setup.exe: files of this type cannot be attached.")
    expect(toast).to_contain_text("large.txt is too large")
    tab.evaluate(DROP_FILE, ["paste", "pasted.txt", "from the clipboard"])
    tab.evaluate(DROP_FILE, ["drop", "dropped.txt", "from a folder"])
    expect(tab.locator("[data-attached] li")).to_have_count(3)
    tab.get_by_role("button", name="Remove pasted.txt").click()
    expect(tab.locator("[data-attached] li")).to_have_count(2)
    send(tab, "What is this?")
    question = tab.locator("[data-exchange] .said.user")
    expect(question.get_by_role("link", name="File: dropped.txt")).to_be_visible()
    image = question.get_by_role("img", name="Image")
    expect(image).to_be_visible()
    expect(image).to_have_js_property("naturalWidth", 1)
    expect(tab.locator("[data-attached]")).to_be_hidden()


def test_a_large_picture_is_shown(open_tab: OpenTab, page: PageServer) -> None:
    """A picture of thousands of bytes is shown after it was sent, and when the page is opened again."""
    tab = open_tab(page, f"/conversations/{page.create_conversation()}")
    picture: FilePayload = {"name": "noise.png", "mimeType": "image/png", "buffer": build_picture()}
    tab.get_by_label("Attach files").set_input_files([picture])
    send(tab, "What is this?")
    image = tab.locator("[data-exchange] .said.user").get_by_role("img", name="Image")
    for _ in range(2):
        expect(image).to_be_visible()
        expect(image).to_have_js_property("naturalWidth", 60)
        tab.reload()


def test_text_is_sent_as_it_was_written(open_tab: OpenTab, page: PageServer) -> None:
    """The first line may be indented, and an unchanged system prompt begins with its line break."""
    name = page.post("/api/conversations", system="\nBe kind.")["id"]
    tab = open_tab(page, f"/conversations/{name}")
    send(tab, "    indented\n  less")
    expect(tab.locator("[data-exchange]")).to_have_count(1)
    blocks = page.get(f"/api/conversations/{name}/turns")["blocks"]
    assert blocks[0]["text"] == "\nBe kind."
    assert blocks[1]["parts"][0]["text"] == "    indented\n  less"


def test_request_settings_are_sent_and_retained(open_tab: OpenTab, page: PageServer) -> None:
    """The system prompt is stored with the conversation; effort and temperature remain in the form, also if invalid."""
    name = page.post("/api/conversations", system="Be kind.")["id"]
    tab = open_tab(page, f"/conversations/{name}")
    tab.locator("summary", has_text="Request settings").click()
    tab.get_by_label("System prompt").fill("Be brief.")
    tab.get_by_label("Reasoning effort").select_option("high")
    tab.get_by_label("Temperature").fill("2.5")
    tab.keyboard.press("Escape")
    send(tab, "What is 2+3?")
    expect(tab.get_by_label("Temperature")).to_be_focused()
    tab.get_by_label("Temperature").fill("0.25")
    send(tab, "What is 2+3?")
    expect(tab.locator(".said.assistant .prose").last).to_have_text("2+3 = 5.")
    expect(tab.locator("[data-exchange]")).to_have_count(1)  # the answer is stored, not only shown
    tab.locator("summary", has_text="Request settings").click()
    expect(tab.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(tab.get_by_label("Reasoning effort")).to_have_value("high")
    tab.reload()
    expect(tab.locator("[name=system]")).to_have_value("Be brief.")
    blocks = page.get(f"/api/conversations/{name}/turns")["blocks"]
    assert blocks[0]["text"] == "Be brief."
