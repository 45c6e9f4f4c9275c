"""Content parts of messages, tool outputs and summaries.

Members follow the types of the openai package; the part types of each role follow the live API. The
error of an unknown part type depends on the type, as observed: for a type that exists nowhere it names
``content[0].type`` and lists all types, for a type that is valid elsewhere it names ``content[0]`` and
lists the types that are valid here.
"""

from collections.abc import Mapping

from kedge.server.schema.validators import (
    AnyJson,
    Array,
    Integer,
    Members,
    Number,
    Object,
    String,
    StringEnum,
    TaggedUnion,
    TypeUnion,
    Validator,
)

STRING = String()
STRING_ARRAY = Array(STRING, of="strings")

MAX_TEXT_LENGTH = 10_485_760
"""The maximum length of one text, in characters, as published and observed."""
TEXT = String(max_length=MAX_TEXT_LENGTH)

PART_TYPES = (
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
"""Every part type, in the order of the live API."""


def content_part(variants: Mapping[str, Validator | Members]) -> TaggedUnion:
    """Build the schema of a content part of one of these types."""
    return TaggedUnion(variants, all_tags=PART_TYPES)


CACHE_BREAKPOINT = Object({"mode!": StringEnum("explicit"), "ttl": StringEnum("30m", "12h")})

INPUT_TEXT: Members = {"text!": TEXT, "prompt_cache_breakpoint?": CACHE_BREAKPOINT}
INPUT_IMAGE: Members = {
    "detail?": StringEnum("low", "high", "auto", "original"),
    "file_id?": STRING,
    "image_url?": STRING,
    "prompt_cache_breakpoint?": CACHE_BREAKPOINT,
}
INPUT_FILE: Members = {
    "detail": StringEnum("auto", "low", "high"),
    "file_data?": STRING,
    "file_id?": STRING,
    "file_url?": STRING,
    "filename?": STRING,
    "prompt_cache_breakpoint?": CACHE_BREAKPOINT,
}
INPUT_AUDIO: Members = {
    "input_audio!": {"data!": STRING, "format!": StringEnum("mp3", "wav")},
}

ANNOTATION = TaggedUnion(
    {
        "file_citation": {"file_id!": STRING, "filename": STRING, "index!": Integer()},
        "url_citation": {
            "start_index!": Integer(),
            "end_index!": Integer(),
            "title": STRING,
            "url!": STRING,
        },
        "container_file_citation": {
            "container_id!": STRING,
            "file_id!": STRING,
            "filename": STRING,
            "start_index": Integer(),
            "end_index": Integer(),
        },
        "file_path": {"file_id!": STRING, "index": Integer()},
    }
)
TOKEN_MEMBERS: Members = {
    "token!": STRING,
    "bytes?": Array(Integer(), of="integers"),
    "logprob!": Number(),
}
LOGPROB = Object(TOKEN_MEMBERS | {"top_logprobs": Array(TOKEN_MEMBERS)})
OUTPUT_TEXT: Members = {
    "text!": STRING,
    "annotations?": Array(ANNOTATION),
    "logprobs?": Array(LOGPROB),
    "parsed~": AnyJson(),
}
REFUSAL: Members = {"refusal!": STRING}
ENCRYPTED_PART: Members = {"encrypted_content!": STRING}

INPUT_PART = content_part(
    {
        "input_text": INPUT_TEXT,
        "input_image": INPUT_IMAGE,
        "input_file": INPUT_FILE,
        # The live API lists this part, but its members are not published.
        "scoped_content": AnyJson(only_objects=True),
        "input_audio": INPUT_AUDIO,
    }
)
OUTPUT_PART = content_part({"output_text": OUTPUT_TEXT, "refusal": REFUSAL})
TOOL_PART = content_part(
    {"input_text": INPUT_TEXT, "input_image": INPUT_IMAGE, "input_file": INPUT_FILE}
)
AGENT_PART = content_part(
    {"input_text": INPUT_TEXT, "input_image": INPUT_IMAGE, "encrypted_content": ENCRYPTED_PART}
)
AGENT_OUTPUT_PART = content_part({"output_text": OUTPUT_TEXT})
SUMMARY_PART = TaggedUnion({"summary_text": {"text!": STRING}})
REASONING_PART = TaggedUnion({"reasoning_text": {"text!": STRING}})

TEXT_OR_OBJECTS = "one of an array of objects or string"

INPUT_CONTENT = TypeUnion(TEXT_OR_OBJECTS, string=TEXT, array=Array(INPUT_PART))
OUTPUT_CONTENT = TypeUnion(TEXT_OR_OBJECTS, string=TEXT, array=Array(OUTPUT_PART))
TOOL_OUTPUT = TypeUnion(TEXT_OR_OBJECTS, string=TEXT, array=Array(TOOL_PART))
