"""Parts: text, refusals, images, files, opaque parts, and parts created from local files."""

from pathlib import Path
from typing import Any

import pytest

from for_each import for_each
from kedge import turns
from kedge.errors import InvalidTurn
from kedge.turns import FrozenMap, ImagePart, OpaquePart, TextPart, audio, file, image
from kedge.turns.attachments import data_url, split_data_url


def test_audio_from_bytes_or_data_url() -> None:
    """Audio from bytes or a data URL is an ``input_audio`` part with the format ``wav`` or ``mp3``."""
    wav = OpaquePart(
        FrozenMap(type="input_audio", input_audio={"data": "UklGRg==", "format": "wav"})
    )
    assert audio(b"RIFF") == wav == audio("data:audio/x-wav;base64,UklGRg==")
    assert audio(b"ID3", media_type="audio/mpeg").content["input_audio"]["format"] == "mp3"


untyped: Any = turns  # the same module, untyped
INVALID_PARTS: list[tuple[Any, str]] = [
    (ImagePart, "an image needs exactly one of url, file_id; got none"),
    (lambda: untyped.ImagePart("u", file_id="f"), "exactly one of url, file_id; got url, file_id"),
    (
        lambda: untyped.FilePart(filename="a"),
        "a file needs exactly one of url, data, file_id; got none",
    ),
    (lambda: untyped.FilePart("u", "d", "f"), "got url, data, file_id"),
    (
        lambda: untyped.image("cat.png"),
        "for a local file pass a path: kedge.image(Path('cat.png'))",
    ),
    (lambda: untyped.image("x" * 200), f"'{'x' * 80}…' is not a URL"),
    (lambda: untyped.file("/srv/a.pdf"), "kedge.file(Path('/srv/a.pdf'))"),
    (lambda: untyped.file("C:\\a.pdf"), "is not a URL"),
    (lambda: untyped.image(5), "image: expected a URL or bytes, got int; kedge.image reads files"),
    (lambda: untyped.image(""), "an image needs exactly one of url, file_id; got none"),
    (lambda: untyped.audio("https://a.example/a.wav"), "audio must be bytes or a base64 data URL"),
    (lambda: untyped.audio(b"OggS", media_type="audio/ogg"), "of type audio/wav, audio/x-wav"),
    (lambda: untyped.TextPart(5), "text: expected a string, got int"),
    (lambda: untyped.TextPart("\ud800"), "text: lone surrogate"),
    (lambda: untyped.ImagePart("u", file_id=0), "file_id: expected a string, got int"),
    (lambda: untyped.OpaquePart({"type": float("nan")}), "content.type: nan is not a JSON number"),
    (lambda: untyped.TextPart("a", extra={"type": "x"}), "extra holds 'type'"),
]


@for_each(("make", "message"), INVALID_PARTS)
def test_invalid_part_is_rejected(make: Any, message: str) -> None:
    """An invalid part raises ``InvalidTurn``, which names the member and the expected type."""
    with pytest.raises(InvalidTurn) as error:
        make()
    assert message in str(error.value)


def test_equality_ignores_extra() -> None:
    """Parts that differ only in ``extra`` are equal, and ``extra`` is preserved."""
    plain, recorded = TextPart("a"), TextPart("a", extra=FrozenMap(annotations=[1]))
    assert plain == recorded
    assert hash(plain) == hash(recorded)
    assert recorded.extra == {"annotations": [1]}


@for_each(
    ("url", "expected"),
    [
        ("data:image/png;base64,AA==", ("image/png", "AA==")),
        ("data:text/plain;charset=utf-8;base64,YQ==", ("text/plain", "YQ==")),
        ("data:text/plain,a", ("", "")),
        ("data:image/png;base64", ("", "")),
        ("https://example.com/a;base64,AA==", ("", "")),
    ],
)
def test_split_data_url(url: str, expected: tuple[str, str]) -> None:
    """The media type has no parameters; another URL has neither a type nor content."""
    assert split_data_url(url) == expected


def test_an_image_is_read_from_a_path(tmp_path: Path) -> None:
    """The file name determines the media type, and later changes of the file do not affect the part."""
    path = tmp_path / "cat.jpeg"
    path.write_bytes(b"abc")
    part = image(path, detail="low")
    path.write_bytes(b"other")
    assert part == ImagePart("data:image/jpeg;base64,YWJj", "low")
    assert image(b"abc") == ImagePart("data:image/png;base64,YWJj")
    assert image("https://kedge.example/a.png").url == "https://kedge.example/a.png"


@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF1234WEBP", "image/webp"),
    ],
)
def test_content_determines_the_type_of_an_image(
    content: bytes, media_type: str, tmp_path: Path
) -> None:
    """A known image format is declared as such, whatever the file is called; an explicit type is used."""
    path = tmp_path / "photo.png"
    path.write_bytes(content)
    assert image(path) == image(content) == ImagePart(data_url(content, media_type))
    declared = ImagePart(data_url(content, "image/png"))
    assert image(path, media_type="image/png") == image(content, media_type="image/png") == declared


def test_a_file_from_bytes_has_a_name() -> None:
    """Bytes and data URLs have a default name, which OpenAI requires; a URL has none."""
    assert file(b"%PDF-1").filename == "file.pdf"
    assert file(b"a", media_type="text/plain").filename == "file.txt"
    assert file("data:text/csv;base64,YQ==").filename == "file.csv"
    assert file(b"a", media_type="application/x-unknown").filename == "file"
    assert file(b"a", filename="a.pdf").filename == "a.pdf"
    assert file("https://kedge.example/a.pdf").url == "https://kedge.example/a.pdf"


def test_a_file_is_read_from_a_path_and_has_its_name(tmp_path: Path) -> None:
    """The file name is the default for the name of the part."""
    path = tmp_path / "notes.md"
    path.write_bytes(b"# Notes")
    assert file(path) == file(b"# Notes", filename="notes.md", media_type="text/markdown")
    assert file(path, filename="a.md").filename == "a.md"
    assert file(b"%PDF").data.startswith("data:application/pdf;")


def test_audio_is_read_from_a_path(tmp_path: Path) -> None:
    """WAV and MP3 are recognized by the file name or set by the media type."""
    path = tmp_path / "hello.mp3"
    path.write_bytes(b"ID3")
    assert audio(path) == audio(b"ID3", media_type="audio/mpeg")
    assert audio(path, media_type="audio/wav") == audio(b"ID3")


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (image, "missing.png", "there is no file"),
        (image, "", "does not determine its type; pass media_type="),
        (image, "notes.txt", "is of type text/plain; use kedge.file"),
        (file, "noname", "does not determine its type"),
        (audio, "notes.txt", "is of type text/plain; convert it to WAV or MP3"),
    ],
)
def test_a_file_of_an_unsupported_type_is_rejected(
    make: Any, name: str, message: str, tmp_path: Path
) -> None:
    """The error names the file and the correction."""
    (tmp_path / "notes.txt").write_text("hi")
    with pytest.raises(InvalidTurn, match=message):
        make(tmp_path / name)


def test_a_file_above_the_size_limit_is_rejected(tmp_path: Path) -> None:
    """A file of exactly ``max_bytes`` is accepted, and a larger one is rejected."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"12345")
    assert file(path, max_bytes=5)
    with pytest.raises(InvalidTurn, match="has more than 4 bytes; upload it"):
        file(path, max_bytes=4)


def test_an_unreadable_file_is_rejected_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error contains the operating system's reason."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"12345")

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(InvalidTurn, match=r"a.txt cannot be read: Permission denied"):
        file(path)
