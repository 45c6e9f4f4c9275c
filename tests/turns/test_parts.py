"""Parts: text, refusals, images, files, and what Kedge does not know."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge import turns
from kedge.errors import InvalidJSON, InvalidTurn
from kedge.turns import (
    FilePart,
    FrozenMap,
    ImagePart,
    OpaquePart,
    RefusalPart,
    TextPart,
    audio,
    file,
    image,
)


def test_an_image_from_bytes_equals_the_same_image_as_a_data_url() -> None:
    """Bytes are put into a data URL at once, so there is one form of one image."""
    made = image(b"\x89PNG", media_type="image/png")
    assert made == ImagePart("data:image/png;base64,iVBORw==")
    assert made == image("data:image/png;base64,iVBORw==")
    assert image("https://example.com/a.png", detail="low").detail == "low"


def test_a_file_is_given_by_url_or_by_content() -> None:
    """A URL stays a URL; bytes become a data URL with their media type."""
    assert file("https://example.com/a.pdf") == FilePart(url="https://example.com/a.pdf")
    assert file("data:text/plain,hi") == FilePart(data="data:text/plain,hi")
    made = file(b"%PDF", filename="a.pdf")
    assert made == FilePart(data="data:application/pdf;base64,JVBERg==", filename="a.pdf")


@given(st.binary(max_size=64))
def test_any_bytes_fit_into_an_image(content: bytes) -> None:
    """Empty or odd content makes an image like any other."""
    assert image(content).url.startswith("data:image/png;base64,")


def test_audio_has_the_form_that_the_apis_share() -> None:
    """From bytes or a data URL: WAV or MP3."""
    wav = OpaquePart(
        FrozenMap(type="input_audio", input_audio={"data": "UklGRg==", "format": "wav"})
    )
    assert audio(b"RIFF") == wav == audio("data:audio/x-wav;base64,UklGRg==")
    assert audio(b"ID3", media_type="audio/mpeg").content["input_audio"]["format"] == "mp3"


loose: Any = turns  # the same names, without their types
INVALID_PARTS: list[tuple[Any, str]] = [
    (ImagePart, "an image needs exactly one of url, file_id; got none"),
    (lambda: loose.ImagePart("u", file_id="f"), "exactly one of url, file_id; got url, file_id"),
    (
        lambda: loose.FilePart(filename="a"),
        "a file needs exactly one of url, data, file_id; got none",
    ),
    (lambda: loose.FilePart("u", "d", "f"), "got url, data, file_id"),
    (lambda: loose.image("cat.png"), "for a local file pass a path: kedge.image(Path('cat.png'))"),
    (lambda: loose.image("x" * 200), f"'{'x' * 80}…' is not a URL"),
    (lambda: loose.file("/srv/a.pdf"), "kedge.file(Path('/srv/a.pdf'))"),
    (lambda: loose.file("file:///tmp/a.pdf"), "is not a URL"),
    (lambda: loose.file("C:\\a.pdf"), "is not a URL"),
    (lambda: loose.image(5), "image: expected a URL or bytes, got int; kedge.image reads files"),
    (lambda: loose.image(""), "an image needs exactly one of url, file_id; got none"),
    (lambda: loose.audio("https://a.example/a.wav"), "audio must be bytes or a base64 data URL"),
    (lambda: loose.audio("data:audio/wav,RIFF"), "audio must be bytes or a base64 data URL"),
    (lambda: loose.audio(b"OggS", media_type="audio/ogg"), "of type audio/wav, audio/x-wav"),
    (lambda: loose.TextPart(5), "text: expected a string, got int"),
    (lambda: loose.TextPart(None), "text: expected a string, got NoneType"),
    (lambda: loose.TextPart("\ud800"), "text: lone surrogate"),
    (lambda: loose.RefusalPart(b"no"), "text: expected a string, got bytes"),
    (lambda: loose.ImagePart(5), "url: expected a string, got int"),
    (lambda: loose.ImagePart("u", file_id=0), "file_id: expected a string, got int"),
    (lambda: loose.ImagePart("u", None), "detail: expected a string, got NoneType"),
    (lambda: loose.FilePart("u", filename=False), "filename: expected a string, got bool"),
    (lambda: loose.FilePart("u", extra=[1]), "extra: expected a mapping, got list"),
    (lambda: loose.OpaquePart([("type", "x")]), "content: expected a mapping, got list"),
    (lambda: loose.OpaquePart({"type": float("nan")}), "content.type: nan is not a JSON number"),
    (lambda: loose.TextPart("a", extra={"type": "x"}), "extra holds 'type'"),
]


@pytest.mark.parametrize(
    ("make", "message"), INVALID_PARTS, ids=[message for _, message in INVALID_PARTS]
)
def test_a_part_that_cannot_be_is_refused(make: Any, message: str) -> None:
    """The error names the member and says what belongs there."""
    with pytest.raises(InvalidTurn) as error:
        make()
    assert message in str(error.value)


def test_extra_is_not_part_of_the_value() -> None:
    """Annotations and the like neither make two parts different nor get lost."""
    plain, recorded = TextPart("a"), TextPart("a", extra=FrozenMap(annotations=[1]))
    assert plain == recorded
    assert hash(plain) == hash(recorded)
    assert recorded.extra == {"annotations": [1]}


def test_parts_of_different_types_differ() -> None:
    """The same words said and refused are not the same."""
    assert TextPart("no") != RefusalPart("no")
    assert ImagePart("u") != FilePart("u")
    assert OpaquePart(FrozenMap(a=True)) != OpaquePart(FrozenMap(a=1))


def test_a_text_of_a_subclass_becomes_plain_text() -> None:
    """A part holds a plain string, whatever kind of string it was given."""

    class Shouting(str):
        __slots__ = ()

        def __str__(self) -> str:
            return self.upper()

    assert type(TextPart(Shouting("a")).text) is str
    assert TextPart(Shouting("a")) == TextPart("a")


def test_a_wrong_type_is_a_value_error_too() -> None:
    """Whoever catches ValueError catches what cannot be."""
    with pytest.raises(ValueError, match="lone surrogate"):
        TextPart("\udfff")
    assert issubclass(InvalidJSON, InvalidTurn)
