"""Recorded streams of every API, and the status and blocks that each of them gives.

Those of the Responses API have the shape of real streams: text with a split emoji, reasoning and a call,
interleaved parallel calls, a custom tool, a refusal, an incomplete answer, a failure, an error, a web
search, a compaction, an image, an open model's reasoning, a server that sends only deltas, and one that
sends everything in the final event.

The chat transcripts have the shapes of OpenAI, Azure, DeepSeek, OpenRouter, Mistral, Ollama, vLLM and
llama.cpp, with their variations: reasoning under two names and as parts, and calls without ids, all with
index 0, in one chunk, with an object as arguments, or with a new id in every chunk. Those of Anthropic
contain reasoning with signatures, redacted reasoning, calls, a hosted search, citations, refusals,
pauses, token limits within text and within a call, and an unknown content block.
"""

import re

from kedge.events import Outcome, StreamEvent
from kedge.turns import Block, RefusalPart, assistant, opaque, reasoning, tool_call
from kedge.wire import AnthropicDecoder, ChatDecoder, ResponsesDecoder
from wire.streams import TRANSCRIPTS, assemble, read_messages

Decoder = ChatDecoder | AnthropicDecoder | ResponsesDecoder
DECODERS: dict[str, type[Decoder]] = {
    "responses": ResponsesDecoder,
    "chat": ChatDecoder,
    "anthropic": AnthropicDecoder,
}
PATHS = {
    f"{api}/{path.stem}": path
    for api in DECODERS
    for path in sorted((TRANSCRIPTS / api.replace("responses", ".")).glob("*.sse"))
}
GENERATED = "made up"
"""A placeholder for a call id that is generated because the server sent none."""
REASONING_TEXT = "Two and two make four."
_GENERATED_ID = re.compile(r"call_18[0-9a-f]{24}")
BERN = '{"city":"Bern"}'
SIX = '{"sides":6}'

ENCRYPTED = "gAAAAABencryptedreasoning68a2=="
REASONING_SUMMARIES = ["The user wants the weather.", "I should call the tool."]
PATCH = "*** Begin\n+ naïve\n*** End"
SEARCH = {
    "id": "ws_68a9aa",
    "type": "web_search_call",
    "status": "completed",
    "action": {"type": "search", "query": "kedge anchor"},
}
COMPACTION = {"id": "cmp_68b0aa", "type": "compaction", "encrypted_content": "gAAAAABcompacted=="}

STATUSES = {
    "responses/incomplete": "incomplete",
    "responses/failed": "failed",
    "responses/error": "failed",
    "chat/length": "incomplete",
    "chat/content_filter": "incomplete",
    "chat/error": "failed",
    "chat/choice_error": "failed",
    "anthropic/max_tokens": "incomplete",
    "anthropic/max_tokens_in_call": "incomplete",
    "anthropic/pause_turn": "incomplete",
    "anthropic/overloaded": "failed",
}
BLOCKS: dict[str, list[Block]] = {
    "responses/text": [assistant("Hello \U0001f600 from Zürich.")],
    "responses/reasoning_and_call": [
        reasoning(REASONING_SUMMARIES, encrypted_content=ENCRYPTED),
        tool_call("get_weather", '{"city":"Zürich"}', call_id="call_ijVhE1A5JfpvEbYCLs7MVtDk"),
    ],
    "responses/parallel_calls": [
        tool_call("get_weather", '{"city":"Bern"}', call_id="call_alpha"),
        tool_call("get_time", '{"zone":"CET"}', call_id="call_beta"),
    ],
    "responses/custom_tool": [tool_call("apply", PATCH, call_id="call_patch", custom=True)],
    "responses/refusal": [assistant([RefusalPart("I can't help with that.")])],
    "responses/incomplete": [assistant("Once upon a")],
    "responses/failed": [assistant("Let me see")],
    "responses/error": [assistant("Let")],
    "responses/web_search": [opaque(SEARCH), assistant("A kedge is a light anchor.")],
    "responses/compaction": [opaque(COMPACTION), assistant("Where were we?")],
    "responses/image": [
        opaque(read_messages("image")[-1]["response"]["output"][0]),
        assistant("Here it is."),
    ],
    "responses/reasoning_text": [reasoning(text="Two and two make four."), assistant("4")],
    "responses/plain_server": [
        assistant("Just words"),
        tool_call("roll", '{"sides":6}', call_id="call_plain"),
    ],
    "responses/llama_cpp": [
        reasoning(text="Two cities, two calls."),
        assistant("Let me look."),
        tool_call("get_weather", '{"city":"Bern"}', call_id="fc_68c1cc"),
        tool_call("get_weather", '{"city":"Basel"}', call_id="fc_68c1dd"),
    ],
    "responses/all_at_once": [
        assistant("All at once."),
        tool_call("roll", "{}", call_id="call_once"),
    ],
    "chat/text": [assistant("Hello \U0001f600 from Zürich.")],
    "chat/tool_call": [tool_call("get_weather", '{"city":"Zürich"}', call_id="call_a1")],
    "chat/parallel_calls": [
        assistant("Both."),
        tool_call("get_weather", BERN, call_id="call_alpha"),
        tool_call("get_time", '{"zone":"CET"}', call_id="call_beta"),
    ],
    "chat/refusal": [assistant([RefusalPart("I can't help with that.")])],
    "chat/length": [assistant("Once upon a")],
    "chat/content_filter": [assistant("Well")],
    "chat/custom_tool": [
        tool_call("apply", "*** Begin\n+ naïve\n*** End", call_id="call_patch", custom=True)
    ],
    "chat/deepseek": [reasoning(text=REASONING_TEXT), assistant("It is 4")],
    "chat/openrouter": [reasoning(text=REASONING_TEXT), assistant("4")],
    "chat/ollama_calls": [
        tool_call("get_weather", BERN, call_id="call_x1"),
        tool_call("get_weather", '{"city":"Basel"}', call_id="call_x2"),
    ],
    "chat/no_ids": [
        tool_call("roll", SIX, call_id=GENERATED),
        tool_call("flip", "{}", call_id=GENERATED),
    ],
    "chat/object_arguments": [
        tool_call("roll", '{"sides": 6}', call_id="call_o1"),
        tool_call("now", "{}", call_id="call_o2"),
    ],
    "chat/new_id_each_piece": [tool_call("get_weather", BERN, call_id="chatcmpl-tool-1")],
    "chat/no_done": [assistant("Just words")],
    "chat/azure": [assistant("Hi there")],
    "chat/thinking_parts": [reasoning(text=REASONING_TEXT), assistant("4!")],
    "chat/function_call": [tool_call("roll", SIX, call_id=GENERATED)],
    "chat/error": [assistant("Let")],
    "chat/choice_error": [assistant("Let me")],
    "anthropic/text": [assistant("Hello \U0001f600 from Zürich.")],
    "anthropic/thinking_and_call": [
        reasoning(text=REASONING_TEXT, encrypted_content="EqQBCgIYAhIM1sig=="),
        assistant("Let me see."),
        tool_call("get_weather", '{"city": "Zürich"}', call_id="toolu_01A"),
    ],
    "anthropic/parallel_calls": [
        tool_call("get_weather", BERN, call_id="toolu_01B"),
        tool_call("get_time", '{"zone":"CET"}', call_id="toolu_01C"),
    ],
    "anthropic/no_arguments": [tool_call("now", "{}", call_id="toolu_01D")],
    "anthropic/redacted": [
        reasoning(encrypted_content="EmwKAhgBEgy3va3p"),
        reasoning(encrypted_content="EqQomitted"),
        assistant("4"),
    ],
    "anthropic/max_tokens": [assistant("Once upon a")],
    "anthropic/max_tokens_in_call": [
        assistant("Rolling."),
        tool_call("roll", '{"sides":', call_id="toolu_01E"),
    ],
    "anthropic/refusal": [assistant("Well"), assistant([RefusalPart("This could harm.")])],
    "anthropic/refusal_at_once": [assistant([RefusalPart("The model declined to answer.")])],
    "anthropic/pause_turn": [
        assistant("I look it up."),
        opaque(
            {
                "type": "server_tool_use",
                "id": "srvtoolu_01F",
                "name": "web_search",
                "input": {"query": "kedge"},
            }
        ),
        opaque(
            {
                "type": "web_search_tool_result",
                "tool_use_id": "srvtoolu_01F",
                "content": [
                    {
                        "type": "web_search_result",
                        "title": "Kedge",
                        "url": "https://x/kedge",
                        "encrypted_content": "EqgfCi",
                    }
                ],
            }
        ),
    ],
    "anthropic/citations": [assistant("A kedge is a light anchor.")],
    "anthropic/overloaded": [assistant("Let")],
    "anthropic/tomorrow": [
        opaque({"type": "hologram", "shape": "cube", "content": "blue light"}),
        assistant("There."),
    ],
}
EXPECTED = {name: (STATUSES.get(name, "completed"), blocks) for name, blocks in BLOCKS.items()}
"""The status and the blocks of each stream."""


def read_bytes(name: str) -> bytes:
    """Return the bytes of a transcript."""
    return PATHS[name].read_bytes()


def split_messages(name: str) -> list[bytes]:
    """Return the messages of a transcript."""
    return [message + b"\n\n" for message in read_bytes(name).split(b"\n\n") if message]


def make_decoder(name: str) -> Decoder:
    """Return a decoder for the API of a transcript."""
    return DECODERS[name.partition("/")[0]]()


def decode(name: str, *chunks: bytes) -> list[StreamEvent]:
    """Return the events the decoder gives for these chunks and the end of the stream."""
    decoder = make_decoder(name)
    return [event for chunk in chunks for event in decoder.feed(chunk)] + decoder.close()


def decode_outcome(name: str, *chunks: bytes) -> Outcome:
    """Decode and assemble chunks of bytes."""
    return assemble(decode(name, *chunks))


def normalize(value: object) -> str:
    """Return the repr of events or blocks, with generated call ids replaced by a placeholder."""
    return _GENERATED_ID.sub(GENERATED, repr(value))


def block_contents(blocks: object) -> list[str]:
    """Return the kind and content of each block, normalized."""
    return [normalize((b.kind, b.content)) for b in blocks]  # type: ignore[attr-defined]


def block_text(block: Block) -> str:
    """Return all text of a block: reasoning, text, refusal and arguments."""
    texts = "".join(getattr(block, "texts", ()))
    return texts + "".join(str(getattr(block, n, "")) for n in ("text", "refusal", "arguments"))
