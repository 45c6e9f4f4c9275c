"""One attempt of a tool call, within the tool's concurrency limit and timeout, and the parts of its result.

Async functions run in the event loop, others in a thread. A thread cannot be stopped, only abandoned:
after a timeout or a cancellation it still counts under the tool's limit until it ends; otherwise a tool limited to
one call could run twice at once. When abandoned threads hold the whole limit, waiting calls fail with
``ConcurrencyExhausted`` instead of waiting for threads that may never end.

A returned text remains text. Images and PDFs, as bytes or as parts, are sent as such. Everything else is written as
JSON, values without a JSON form by ``str``. Text beyond the limit is truncated with a note, and an image beyond its
limit is replaced by a note.
"""

import math
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from typing import Any, cast
from weakref import WeakKeyDictionary

from anyio import (
    CapacityLimiter,
    Event,
    Lock,
    current_effective_deadline,
    get_cancelled_exc_class,
    move_on_after,
    to_thread,
)
from anyio.lowlevel import RunVar
from msgspec import Struct
from msgspec.structs import asdict

from kedge import turns
from kedge.tools.toolbox import AnyTool
from kedge.turns.attachments import detect_media_type, read_audio, split_data_url
from kedge.turns.parts import PART_TYPES
from kedge.wire.fields import repair_surrogates

Parts = tuple[turns.Part, ...]
Arguments = dict[str, Any]

MAX_THREADS = 40
"""Maximum number of sync tools running at once in an event loop. They do not share anyio's default threads:
a tool that itself needs one of those could wait for itself."""


class AttemptTimeout(TimeoutError):
    """The attempt took longer than the tool's timeout."""


class SelfCancelled(Exception):
    """The function was cancelled although the call was not."""


class ConcurrencyExhausted(Exception):
    """The limit of a tool is used up by threads whose calls timed out and which have not ended."""

    def __init__(self, size: int) -> None:
        super().__init__(f"it is busy: {size} earlier call(s) timed out and are still running")


class ConcurrencyLimiter:
    """Allows at most ``size`` calls at a time, in order of arrival.

    ``abandoned`` has the threads whose calls have ended before them. A thread that ends wakes no waiting call, which
    would have to happen in the event loop: while other calls run, the next one to finish does, and when only abandoned
    threads are left, there are no waiting calls.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = 0
        self.abandoned: set[object] = set()
        self._arrivals = Lock()
        self._finished = Event()

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[None]:
        """Wait until a call may run, and count it.

        Raises:
            ConcurrencyExhausted: Abandoned threads hold the whole limit.
        """
        async with self._arrivals:  # only the first one waits for a call to finish
            while self.running + len(self.abandoned) >= self.size:
                if not self.running:
                    raise ConcurrencyExhausted(self.size)
                self._finished = Event()
                await self._finished.wait()
            self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._finished.set()


_limiters: RunVar[WeakKeyDictionary[AnyTool, ConcurrencyLimiter]] = RunVar("kedge_tool_limiters")
_thread_limiter: RunVar[CapacityLimiter] = RunVar("kedge_tool_threads")


def get_limiter(tool: AnyTool) -> ConcurrencyLimiter | None:
    """Return the limiter of a tool in the running event loop, or None if the tool has no limit."""
    if not tool.concurrency:
        return None
    limiters = _get_or_set(_limiters, WeakKeyDictionary[AnyTool, ConcurrencyLimiter])
    return limiters.setdefault(tool, ConcurrencyLimiter(tool.concurrency))


def _get_or_set(variable: RunVar[Any], create: Callable[[], Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        variable.set(create())
        return variable.get()


async def invoke_tool(tool: AnyTool, arguments: Arguments, on_start: Callable[[], None]) -> Parts:
    """Run the function once; ``on_start`` is called when its timeout starts."""
    async with AsyncExitStack() as stack:
        abandoned_threads: set[object] = set()
        limiter = get_limiter(tool)
        if limiter is not None:
            await stack.enter_async_context(limiter.acquire())
            abandoned_threads = limiter.abandoned
        if tool.is_async:
            run = partial(_run_in_loop, tool, arguments)
        else:  # the timeout starts once a thread is free
            threads = _get_or_set(_thread_limiter, partial(CapacityLimiter, MAX_THREADS))
            await stack.enter_async_context(threads)
            run = ThreadRun(tool, arguments, abandoned_threads).run
        on_start()
        with move_on_after(tool.timeout):
            try:
                return await run()
            except get_cancelled_exc_class() as error:
                if current_effective_deadline() == -math.inf:
                    raise
                raise SelfCancelled("it was cancelled from within") from error
        raise AttemptTimeout(f"it took longer than {tool.timeout:g} s")


async def _run_in_loop(tool: AnyTool, arguments: Arguments) -> Parts:
    with _replace_generator_exit():
        return to_parts(await tool.function(**arguments))


@dataclass(eq=False)
class ThreadRun:
    """A function running in a thread, which counts under the limit of its tool if it is abandoned.

    The thread and the event loop each set a flag before they read the other's flag. The second one reads
    the flag of the first, so the thread does not count after it has ended.
    """

    tool: AnyTool
    arguments: Arguments
    abandoned_threads: set[object]
    started: bool = False
    ended: bool = False
    abandoned: bool = False

    async def run(self) -> Parts:
        """Start the thread and wait for it; abandon it on cancellation."""
        try:
            returned = await to_thread.run_sync(
                self.call_function, abandon_on_cancel=True, limiter=CapacityLimiter(1)
            )
        except get_cancelled_exc_class():
            self.abandon()
            raise
        if isawaitable(returned):
            return to_parts(await returned)
        return returned

    def call_function(self) -> Any:
        """Call the function, in the thread; return its parts, or what the event loop has to await."""
        self.started = True
        try:
            if self.abandoned:
                return ()
            with _replace_generator_exit():
                value = self.tool.function(**self.arguments)
            if isawaitable(value):
                return value
            return to_parts(value)
        finally:
            self.ended = True
            self.abandoned_threads.discard(self)

    def abandon(self) -> None:
        """Abandon the thread; if it has started, it counts until it ends."""
        self.abandoned = True
        if self.started:
            self.abandoned_threads.add(self)
            if self.ended:
                self.abandoned_threads.discard(self)


@contextmanager
def _replace_generator_exit() -> Generator[None]:
    """Raise ``RuntimeError`` for ``GeneratorExit``, which would close the generators of the run's events."""
    try:
        yield
    except GeneratorExit as error:
        raise RuntimeError("the function raised GeneratorExit") from error


MAX_OUTPUT = 100_000
"""Default maximum of characters of text in one result."""
MAX_ATTACHMENT = 20_000_000
"""Maximum characters of an image, a file or audio in its data URL."""


def to_parts(value: object) -> Parts:
    """Return the parts for a returned value."""
    match value:
        case turns.ToolResultBlock():
            return tuple(map(_to_part, value.parts)) or (turns.TextPart(""),)
        case list() | tuple() if _has_attachments(cast("list[object]", value)):
            return tuple(map(_to_part, cast("list[object]", value)))
        case _:
            return (_to_part(value),)


def truncate_parts(parts: Iterable[turns.Part], limit: int) -> Parts:
    """Return the parts with at most ``limit`` characters of text, and a note where text was truncated."""
    remaining = max(limit, 0)
    shown: list[turns.Part] = []
    for part in parts:
        size = _attachment_size(part)
        match part:
            case turns.TextPart() if len(part.text) > remaining:
                mark = f"\n[truncated: {remaining:,} of {len(part.text):,} characters are shown]"
                shown.append(turns.TextPart(repair_surrogates(part.text[:remaining]) + mark))
                remaining = 0
            case _ if size > MAX_ATTACHMENT:
                shown.append(turns.TextPart(f"[omitted: an attachment of {size:,} characters]"))
            case turns.TextPart():
                remaining -= len(part.text)
                shown.append(part)
            case _:
                shown.append(part)
    return tuple(shown)


def describe_attachments(parts: Iterable[turns.Part], *, text_only: bool) -> Parts:
    """Return the parts with a text instead of each one that an API does not accept in the result of a tool.

    Args:
        parts: The parts of a result.
        text_only: Whether the API accepts only text; otherwise it accepts images and files, but no API takes audio.
    """
    return tuple(_describe_rejected(part, text_only=text_only) for part in parts)


def _describe_rejected(part: turns.Part, *, text_only: bool) -> turns.Part:
    audio = read_audio(part)
    if audio is not None:
        content = _describe_content("audio", *audio)
        return turns.TextPart(f"[omitted: {content}; models do not take it]")
    match part:
        case turns.ImagePart() if text_only:
            content = _describe_content("an image", *split_data_url(part.url))
        case turns.FilePart() if text_only:
            content = _describe_content("a file", *split_data_url(part.data))
        case _:
            return part
    return turns.TextPart(f"[omitted: {content}; this model's API takes text only]")


def _describe_content(kind: str, media_type: str, data: str) -> str:
    if not data:
        return kind
    return f"{kind} of type {media_type}, {len(data) * 3 // 4:,} bytes"


def _has_attachments(members: Iterable[object]) -> bool:
    return any(
        isinstance(member, PART_TYPES) or (isinstance(member, bytes) and detect_media_type(member))
        for member in members
    )


def _to_part(value: object) -> turns.Part:
    match value:
        case str():
            text = str.__str__(value)  # the value of a string enum, not its name
            return turns.TextPart(repair_surrogates(text))
        case turns.RefusalPart():
            return turns.TextPart(
                value.text
            )  # a refusal part is valid only in a message of a model
        case turns.TextPart() | turns.ImagePart() | turns.FilePart() | turns.OpaquePart():
            return value
        case bytes() | bytearray() | memoryview():
            return _bytes_to_part(bytes(value))  # pyright: ignore[reportUnknownArgumentType]
        case _:
            return turns.TextPart(_to_json(value))


def _bytes_to_part(content: bytes) -> turns.Part:
    media_type = detect_media_type(content)
    if media_type == "application/pdf":
        return turns.file(content, filename="result.pdf", media_type=media_type)
    if media_type:
        return turns.image(content, media_type=media_type)
    try:
        return turns.TextPart(content.decode())
    except UnicodeDecodeError:
        return turns.TextPart(f"[{len(content):,} bytes, neither text nor an image]")


def _to_json(value: Any) -> str:
    from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

    options: dict[str, Any] = {"fallback": _to_plain, "bytes_mode": "base64"}
    errors = (PydanticSerializationError, ValueError, RecursionError)
    with suppress(*errors):
        return to_json(value, inf_nan_mode="strings", **options).decode()
    # It contains itself, or text that UTF-8 cannot encode, also in dataclasses and models, such as the name of a file.
    with suppress(*errors):
        plain = repair_surrogates(to_jsonable_python(repair_surrogates(value), **options))
        return to_json(plain, inf_nan_mode="strings", **options).decode()
    return repair_surrogates(str(value))


def _to_plain(value: object) -> object:
    if isinstance(value, Struct):
        return asdict(value)
    return str(value)


def _attachment_size(part: turns.Part) -> int:
    """Return the number of characters of an image, a file or audio; 0 for any other part."""
    audio = read_audio(part)
    if audio is not None:
        return len(audio[1])
    match part:
        case turns.ImagePart():
            return len(part.url)
        case turns.FilePart():
            return len(part.url) + len(part.data)
        case _:
            return 0
