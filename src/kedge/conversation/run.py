"""One run of a conversation: store the question, send it, store the answer, and return the reply.

Blocks are stored before they are sent: the question as an ``asked`` node, later the results of tools. Every
finished answer is stored before the run continues. The head moves once, at the end, if no other process has
moved it. After a failure at any earlier point all completed steps are in the tree, and ``resume`` continues
from there. A run that is stopped early stores the partial answer beside the path, as a failed node whose
response is ``cancelled``: it is not an anchor, and is sent again only by a message that continues from it.
If tools were running, the node has no response, because no request was sent.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, cast

import anyio
from msgspec.structs import replace
from typing_extensions import TypeVar

from kedge._internal.event_loops import run_to_end
from kedge.conversation.run_writer import RunWriter, TurnTask
from kedge.engines import Engine, Reply, RunStream
from kedge.engines.request_log import CostFunction
from kedge.errors import EngineError, OutputError, StoreError
from kedge.events import Event
from kedge.events.request_record import keep_request
from kedge.events.run import TurnFinished
from kedge.planning import find_running
from kedge.store import Node
from kedge.turns import Turn

T = TypeVar("T")
OutputT = TypeVar("OutputT", default=None)
ReplyEvents = AsyncGenerator[Event | Reply[Any]]
"""The events of a turn, and its reply."""

TaskBuilder = Callable[[], Awaitable[TurnTask | Reply[Any]]]


class ConversationStream(RunStream[Reply[OutputT]], Generic[OutputT]):
    """The events of one turn, and after the last event the reply, which is then stored.

    Example:
        ```python
        async with conversation.stream("Hello") as stream:
            async for event in stream:
                ...
        print(stream.reply.text)
        ```
    """

    _before_end = "its reply; completed steps are in the store, see Conversation.resume"

    @property
    def reply(self) -> Reply[OutputT]:
        """The reply; available once the stream has ended.

        Raises:
            KedgeError: The stream has not ended.
        """
        return self._result()

    async def text_deltas(self) -> AsyncGenerator[str]:
        """Consume the events and yield the text of the answer as it arrives; a stored answer in one piece."""
        async for delta in super().text_deltas():
            yield delta
        if self.reply.stored:
            yield self.reply.text

    async def __anext__(self) -> Event:
        event = await super().__anext__()
        while isinstance(event, Reply):
            self._value = cast("Reply[Any]", event)
            event = await super().__anext__()
        return event


@dataclass(frozen=True)
class ConversationRun:
    """One run of an engine, stored step by step.

    Args:
        engine: The engine with all its middleware.
        build_task: Called when the first event is requested; returns the task, or the reply if it is stored.
        options: The options of the engine's ``stream``.
        price: A function that computes the cost of a response.
        on_finish: A function that is called with the final node and Turn of the run.
    """

    engine: Engine
    build_task: TaskBuilder
    options: Mapping[str, Any]
    price: CostFunction | None
    on_finish: Callable[[Node, Turn], None]

    async def events(self) -> ReplyEvents:
        """Yield the engine's events, and the reply."""
        task = await self.build_task()
        if isinstance(task, Reply):
            yield TurnFinished(task.turn)
            yield task
            return
        task = await load_running(task)
        writer = RunWriter(task, self.engine, self.options, self.price)
        held: list[Event] = []
        try:
            async with aclosing(self._iter_stored(writer, held)) as stored_events:
                async for event in stored_events:
                    yield event
        except StoreError:
            raise
        except OutputError as error:
            if error.turn is not None:
                writer.update_pending_answer(error.turn)
            await run_to_end(writer.save_answer())
            for held_event in held:
                yield held_event
            raise
        except EngineError as error:
            try:
                await writer.save_failure(error)
            except StoreError as problem:
                error.add_note(f"The failed request was not stored: {problem}")
            raise
        except (GeneratorExit, anyio.get_cancelled_exc_class()):
            with anyio.CancelScope(shield=True):
                await writer.save_cancelled()
            raise
        finally:
            # Stopped early, or failed elsewhere: the finished answer is paid for.
            if writer.pending_answer:
                with anyio.CancelScope(shield=True):
                    await writer.save_answer()

    async def _iter_stored(self, writer: RunWriter, held: list[Event]) -> ReplyEvents:
        """Yield each event once what it adds to the run is stored; at the end, the reply.

        Whoever has seen the event of an answer finds the answer in the store. The last answer is stored with the end of
        the run, in one transaction, so its event waits for the next one in ``held``.
        """
        async with writer.stream as stream:
            async for event in stream:
                if isinstance(event, TurnFinished):
                    reply = await run_to_end(writer.finish(self.on_finish))
                    for held_event in held:
                        yield held_event
                    yield TurnFinished(reply.turn)
                    yield reply
                    return
                await writer.store_event(event)
                held.append(event)
                if writer.pending_answer is None:
                    for held_event in held:
                        yield held_event
                    held.clear()


async def load_running(task: TurnTask) -> TurnTask:
    """Return a task that waits for a response in the background with the stored record of its request."""
    running = find_running(task.turn)
    if running is None:
        return task
    store = task.checkpoint.store
    row = task.checkpoint.row
    waiting = replace(task, waits_at=task.checkpoint.node.id)
    node = await store.node_of_response(row, running.response_id)
    if node is None:
        return waiting
    record = await store.newest_response(row, node.id)
    if record is None:
        return waiting
    return replace(task, turn=keep_request(task.turn, record), waits_at=record.node)
