"""Writing one response: written by the model, and settled in the database at once.

A ``Run`` ends in exactly one way: completed or incomplete with its output stored, or failed or
cancelled without. ``stop`` ends it from outside (the client went away, the server shuts down).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from kedge.observe import count
from kedge.server import errors, resource
from kedge.server.access import Exchange, report
from kedge.server.compaction import compaction_item
from kedge.server.contexts import NOTHING, Context, grown
from kedge.server.draft import Draft, summarised
from kedge.server.ids import node_of
from kedge.server.models import Piece, written
from kedge.server.nodes import from_barrier, is_barrier
from kedge.server.output import Event, Writer, count_answer
from kedge.server.patience import Patience
from kedge.server.service import Service
from kedge.server.sockets.memory import Place
from kedge.server.stored import Entry, Outcome
from kedge.server.weighing import count_ahead
from kedge.server.wire import Item, encode, joined
from kedge.tokens import count_items

LONGEST_QUEUE = 24 * 3600.0
"""Seconds for which a response may wait for its turn."""

Emit = Callable[[Sequence[Event]], Awaitable[None]]
"""Sends events on their way to the client."""


class Run:
    """One response while it is written."""

    def __init__(self, service: Service, draft: Draft, place: Place | None = None) -> None:
        self.draft = draft
        self._place = place
        self._service = service
        self._held = ExitStack()
        if draft.past.conversation is not None:
            self._held.enter_context(service.conversations.lock(draft.past.conversation))
        self._asked = encode(draft.asked)
        self._state: Literal["unwritten", "in_progress", "settled"] = "unwritten"
        self._verdict = "failed"
        self._reason: str | None = None
        self._patience = Patience(service.settings.limits.answer_seconds, self._on_waiting)
        self._watch: Callable[[], None] | None = None
        self._became: Mapping[str, Any] = resource.BEGUN
        self._writer = _writer(service, draft)
        self.error: errors.ApiError | None = None
        """Why the model would not answer, where it said so."""
        self.witness: Exchange | None = None
        """The record of the request, where somebody wants one."""
        service.running.add(self)

    async def whole(self, watch: Callable[[], None]) -> bytes | None:
        """Write the response and return it as JSON; None where nobody is left to read it.

        Until its client has the id nobody can ask for the response, so it is only written down
        as in progress once its model makes us wait. That is when ``watch`` is called, too.
        """
        self._watch = watch
        written = None
        try:
            with self._patience:
                await self._summarise()
                self._compact()
                async for piece in self._pieces():
                    self._writer.take(piece)
                await count_ahead((self._writer.items, self._writer.thoughts))
                if not self._patience.ended:
                    written = self._settle()
        except errors.ApiError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever a model does, the server goes on
            report("the model failed", error)
        finally:
            self.end()
        if written is None and self._verdict != "cancelled":
            raise self.error or errors.SERVER_FAILED()
        return written

    async def live(self, emit: Emit, watch: Callable[[], None]) -> None:
        """Write the response and tell every event of it."""
        self._watch = watch
        await self._written(emit, self._begin)
        if self._is_finished or self._verdict != "cancelled":  # else nobody is left to be told
            await emit(self._ending())

    def queue(self) -> list[Event]:
        """Write the response down as one that waits for its turn; tell so."""
        self._became = resource.QUEUED
        self._write_down()
        return [self._event("created"), self._event("queued")]

    async def later(self, turns: asyncio.Semaphore, emit: Emit) -> None:
        """Write the response, which was queued, when its turn has come."""
        answering, self._patience = self._patience, Patience(LONGEST_QUEUE)
        has_turn = False
        if answering.ended:  # before anything could begin
            self._patience.end()
        with self._patience:
            has_turn = await turns.acquire()
        if has_turn:
            self._patience = answering
            try:
                await self._written(emit, self._take_up)
            finally:
                turns.release()
        self.end()
        await emit(self._ending())

    async def _written(self, emit: Emit, begin: Callable[[], list[Event]]) -> None:
        try:
            with self._patience:
                await emit(begin())
                await self._tell(emit)
        except errors.ApiError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever a model does, the server goes on
            report("the model failed", error)
        finally:
            self.end()

    def _begin(self) -> list[Event]:
        self._write_down()
        return [self._event("created"), self._event("in_progress")]

    def _take_up(self) -> list[Event]:
        self._became = resource.BEGUN
        self._service.responses.take_up(node_of(self.draft.key))
        return [self._event("in_progress")]

    def _event(self, name: str) -> Event:
        return {"type": f"response.{name}", "response": self._response([])}

    @property
    def _why(self) -> errors.ApiError | str | None:
        """Why the response came to nothing."""
        return self._reason or self.error

    @property
    def _is_finished(self) -> bool:
        return self._became["status"] not in resource.UNFINISHED

    def snapshot(self) -> bytes:
        """Show a response that is yet to be written, as it stands."""
        return encode(self._response([]))

    def stop(self, status: str) -> None:
        """End the response from outside: ``failed`` by a server that stops, or ``cancelled``."""
        self._verdict = status
        self._reason = resource.STOPPED
        self._patience.end()

    def cancel(self) -> None:
        """End the response for its client's sake: it is cancelled when this returns."""
        self.stop("cancelled")
        self.end()

    def end(self) -> None:
        """Let go of everything; a response that is not settled by now has failed."""
        self._tally()
        self._service.running.discard(self)
        self._held.close()
        if self._state == "in_progress":
            self._state = "settled"
            self._service.responses.fail(node_of(self.draft.key), self._verdict, self._why)

    def _tally(self) -> None:
        if self in self._service.running:
            past = self.draft.past
            on = "nothing" if past.node is None else "response"
            status = self._became["status"] if self._is_finished else None
            count(
                "server_responses_total",
                memory=on if past.conversation is None else "conversation",
                status=status or self._verdict,
            )

    def _on_waiting(self) -> None:
        if self._state == "unwritten":
            self._write_down()
        if self._watch is not None:
            self._watch()

    async def _tell(self, emit: Emit) -> None:
        await self._summarise()
        events = self._compact()
        if events:
            await emit(events)
        async for piece in self._pieces():
            events = list(self._writer.feed(piece))
            if events:
                await emit(events)
        await count_ahead((self._writer.items, self._writer.thoughts))
        if not self._patience.ended:
            self._settle()

    async def _pieces(self) -> AsyncIterator[Piece]:
        if not self.draft.silent:
            async with written(self.draft.model, self.draft.prompt) as pieces:
                async for piece in pieces:
                    yield piece

    async def _summarise(self) -> None:
        self.draft = await summarised(self.draft)
        if self.witness is not None:
            self.witness.context = tuple(self.draft.prompt.ask.items)

    def _compact(self) -> list[Event]:
        draft, writer = self.draft, self._writer
        if draft.compacted is None:
            return []
        id = writer.next_id("compaction")
        item = compaction_item(self._service.sealer, id, draft.compacted.items)
        return list(writer.add(item, during="response.compaction.compacting"))

    def _entry(self) -> Entry:
        draft, past = self.draft, self.draft.past
        return Entry(
            key=draft.key,
            parent=past.node,
            conversation=past.conversation,
            asked=self._asked,
            input=encode(self._input()),
        )

    def _input(self) -> list[Item]:
        """What is stored as input: whoever builds on what is not stored brings it along."""
        draft = self.draft
        return [*draft.past.context.whole(), *draft.input] if draft.past.loose else draft.input

    def _write_down(self) -> None:
        if self.draft.store:
            entry, barrier = self._entry(), is_barrier(self.draft.input)
            queued = self._became is resource.QUEUED
            self._service.responses.begin(entry, barrier=barrier, queued=queued)
            self._state = "in_progress"

    def _settle(self) -> bytes:
        draft, writer = self.draft, self._writer
        counted = count_answer(writer, draft.input_tokens, draft.cached)
        self._became = resource.finished(
            reason=writer.reason,
            now=int(self._service.clock()),
            usage=resource.usage(
                input=counted.input,
                cached=counted.cached,
                output=counted.output,
                reasoning=counted.reasoning,
            ),
        )
        became, written = encode(self._became), encode(writer.items)
        if draft.store:
            self._keep(became, written)
        if self._place is not None:
            id: str = draft.asked["id"]
            self._place.keep(id, None if draft.store else self._context(len(written)))
        return joined(self._asked, became, written)

    def _keep(self, became: bytes, output: bytes) -> None:
        entry = self._entry()
        context = self._context(len(entry.input) + len(output))
        barrier = is_barrier(context.items)
        status = self._became["status"]
        outcome = Outcome(status, became, output, barrier, context.own_tokens)
        stored = self._service.responses
        if self._state == "in_progress":
            kept = stored.settle(entry, outcome)
        else:
            kept = stored.record(entry, outcome)
        self._state = "settled"
        if kept:
            self._service.nodes.keep(node_of(self.draft.key), self.draft.past.node, context)

    def _context(self, size: int) -> Context:
        """Everything up to and including this response; ``size`` is that of what it adds."""
        draft, past = self.draft, self.draft.past.context
        items = [*draft.input, *self._writer.items]
        if is_barrier(items):
            return self._after_barrier(items, size)
        tokens = draft.new_tokens + count_items(self._writer.items)
        if not (draft.past.loose and draft.store):
            return grown(past, items, items, tokens, size)
        whole, seen = past.whole(), past.as_seen()
        return grown(NOTHING, [*whole, *items], [*seen, *items], past.tokens + tokens, size)

    def _after_barrier(self, items: Sequence[Item], size: int) -> Context:
        kept = from_barrier(items)
        seen = self._service.read(kept)
        return grown(NOTHING, kept, seen, count_items(seen), size)

    def _response(self, output: list[Any]) -> dict[str, Any]:
        return {**self.draft.asked, **self._became, "output": output}

    def _ending(self) -> list[Event]:
        if self._is_finished:
            response = self._response(self._writer.items)
            return [{"type": f"response.{response['status']}", "response": response}]
        self._became = resource.failed(self._verdict, self._why)
        if self._verdict == "cancelled":
            return [self._event("failed")]  # the API has no event of its own for this
        error = {"type": "error", **self._became["error"], "param": None}
        return [error, self._event("failed")]


def _writer(service: Service, draft: Draft) -> Writer:
    body = draft.prompt.body
    sealed = "reasoning.encrypted_content" in (body.get("include") or ())
    reasoning: Mapping[str, Any] = body.get("reasoning") or {}
    return Writer(
        draft.key,
        len(draft.input),
        seal=service.sealer.seal,
        sealed=sealed,
        shown=bool(reasoning.get("summary") or reasoning.get("generate_summary")),
    )
