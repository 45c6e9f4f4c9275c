"""The parts of content: what a message, a tool's output or a summary may be made of.

Members follow the types of the openai package; which part types a role may use follows the live
API. An unknown part type is answered in two steps, as observed: a type that exists nowhere is
blamed on ``content[0].type`` and answered with all types there are, a type that exists elsewhere
is blamed on ``content[0]`` and answered with those that belong here.
"""

from collections.abc import Mapping

from kedge.server.shapes.branches import Array, Either, Nullable, Object, Tagged
from kedge.server.shapes.language import Shape
from kedge.server.shapes.leaves import Anything, Choice, Decimal, Integer, Text

TEXT = Text()
STRINGS = Array(TEXT, of="strings")
MAYBE_TEXT = Nullable(TEXT)

ALL_PARTS = (
    "input_text",
    "input_image",
    "input_audio",
    "output_text",
    "refusal",
    "input_file",
    "computer_screenshot",
    "summary_text",
    "encrypted_content",
)
"""Every part type there is, in the words and the order of the live API."""


def part(choices: Mapping[str, Shape]) -> Tagged:
    """Make the shape of a part of content that must be one of these."""
    return Tagged(choices, elsewhere=ALL_PARTS)


BREAKPOINT = Nullable(
    Object({"mode": Choice(("explicit",)), "ttl": Choice(("30m", "12h"))}, required=("mode",))
)

INPUT_TEXT = Object(
    {"type": TEXT, "text": TEXT, "prompt_cache_breakpoint": BREAKPOINT}, required=("text",)
)
INPUT_IMAGE = Object(
    {
        "type": TEXT,
        "detail": Nullable(Choice(("low", "high", "auto", "original"))),
        "file_id": MAYBE_TEXT,
        "image_url": MAYBE_TEXT,
        "prompt_cache_breakpoint": BREAKPOINT,
    }
)
INPUT_FILE = Object(
    {
        "type": TEXT,
        "detail": Choice(("auto", "low", "high")),
        "file_data": MAYBE_TEXT,
        "file_id": MAYBE_TEXT,
        "file_url": MAYBE_TEXT,
        "filename": MAYBE_TEXT,
        "prompt_cache_breakpoint": BREAKPOINT,
    }
)
INPUT_AUDIO = Object(
    {
        "type": TEXT,
        "input_audio": Object(
            {"data": TEXT, "format": Choice(("mp3", "wav"))}, required=("data", "format")
        ),
    },
    required=("input_audio",),
)

ANNOTATION = Tagged(
    {
        "file_citation": Object(
            {"type": TEXT, "file_id": TEXT, "filename": TEXT, "index": Integer()},
            required=("file_id", "index"),
        ),
        "url_citation": Object(
            {
                "type": TEXT,
                "start_index": Integer(),
                "end_index": Integer(),
                "title": TEXT,
                "url": TEXT,
            },
            required=("start_index", "end_index", "url"),
        ),
        "container_file_citation": Object(
            {
                "type": TEXT,
                "container_id": TEXT,
                "file_id": TEXT,
                "filename": TEXT,
                "start_index": Integer(),
                "end_index": Integer(),
            },
            required=("container_id", "file_id"),
        ),
        "file_path": Object(
            {"type": TEXT, "file_id": TEXT, "index": Integer()}, required=("file_id",)
        ),
    }
)
TOKEN = {"token": TEXT, "bytes": Nullable(Array(Integer(), of="integers")), "logprob": Decimal()}
LOGPROB = Object(
    TOKEN | {"top_logprobs": Array(Object(TOKEN, required=("token", "logprob")))},
    required=("token", "logprob"),
)
OUTPUT_TEXT = Object(
    {
        "type": TEXT,
        "text": TEXT,
        "annotations": Nullable(Array(ANNOTATION)),
        "logprobs": Nullable(Array(LOGPROB)),
    },
    required=("text",),
)
REFUSAL = Object({"type": TEXT, "refusal": TEXT}, required=("refusal",))
ENCRYPTED = Object({"type": TEXT, "encrypted_content": TEXT}, required=("encrypted_content",))

INPUT_PART = part(
    {
        "input_text": INPUT_TEXT,
        "input_image": INPUT_IMAGE,
        "input_file": INPUT_FILE,
        # The live API lists this part, but nobody has published its members.
        "scoped_content": Anything(only_objects=True),
        "input_audio": INPUT_AUDIO,
    }
)
OUTPUT_PART = part({"output_text": OUTPUT_TEXT, "refusal": REFUSAL})
TOOL_PART = part({"input_text": INPUT_TEXT, "input_image": INPUT_IMAGE, "input_file": INPUT_FILE})
AGENT_PART = part(
    {"input_text": INPUT_TEXT, "input_image": INPUT_IMAGE, "encrypted_content": ENCRYPTED}
)
AGENT_OUTPUT_PART = part({"output_text": OUTPUT_TEXT})
SUMMARY_PART = Tagged({"summary_text": Object({"type": TEXT, "text": TEXT}, required=("text",))})
REASONING_PART = Tagged(
    {"reasoning_text": Object({"type": TEXT, "text": TEXT}, required=("text",))}
)

TEXT_OR_OBJECTS = "one of an array of objects or string"

INPUT_CONTENT = Either(TEXT_OR_OBJECTS, text=TEXT, array=Array(INPUT_PART))
OUTPUT_CONTENT = Either(TEXT_OR_OBJECTS, text=TEXT, array=Array(OUTPUT_PART))
TOOL_OUTPUT = Either(TEXT_OR_OBJECTS, text=TEXT, array=Array(TOOL_PART))
