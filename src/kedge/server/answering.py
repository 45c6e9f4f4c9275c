"""Writing one response: begun in the database, written by the model, settled at once.

A ``Run`` ends in exactly one way: completed or incomplete with its output stored, or failed or
cancelled without. ``stop`` ends it from outside (the client went away, the server shuts down).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from anyio import CancelScope, current_time

from kedge.server import errors, resource
from kedge.server.access import report
from kedge.server.compaction import compaction_item
from kedge.server.contexts import NOTHING, grown
from kedge.server.draft import Draft
from kedge.server.models import Piece
from kedge.server.nodes import from_barrier, is_barrier
from kedge.server.output import Event, Writer
from kedge.server.service import Service
from kedge.server.stored import Entry, Outcome
from kedge.server.wire import encode, joined
from kedge.tokens import count_items, count_text

Emit = Callable[[Sequence[Event]], Awaitable[None]]
"""Sends events on their way to the client."""


class Run:
    """One response while it is written."""

    def __init__(self, service: Service, draft: Draft) -> None:
        self.draft = draft
        self._service = service
        self._asked = encode(draft.asked)
        self._node: int | None = None
        self._held = ExitStack()
        self._scope = CancelScope()
        self._verdict = "failed"
        self._became: Mapping[str, Any] = resource.BEGUN
        self._writer = _writer(service, draft)
        self._begin()

    async def whole(self) -> bytes | None:
        """Write the response and return it as JSON; None where nobody is left to read it."""
        written = None
        try:
            with self._limited():
                self._compact()
                async for piece in self._pieces():
                    self._writer.take(piece)
                written = self._settle()
        except Exception as error:  # noqa: BLE001 - whatever a model does, the server goes on
            report("the model failed", error)
        finally:
            self.end()
        if written is None and self._verdict != "cancelled":
            raise errors.SERVER_FAILED()
        return written

    async def live(self, emit: Emit) -> None:
        """Write the response and tell every event of it."""
        try:
            with self._limited():
                begun = self._response([])
                created = {"type": "response.created", "response": begun}
                await emit([created, {"type": "response.in_progress", "response": begun}])
                await self._tell(emit)
        except Exception as error:  # noqa: BLE001 - whatever a model does, the server goes on
            report("the model failed", error)
        finally:
            self.end()
        if self._became is not resource.BEGUN:
            await emit([self._terminal()])
        elif self._verdict != "cancelled":
            await emit(self._failure())

    def stop(self, status: str) -> None:
        """End the response from outside, as ``failed`` or as ``cancelled``."""
        self._verdict = status
        self._scope.cancel()

    async def _tell(self, emit: Emit) -> None:
        events = self._compact()
        if events:
            await emit(events)
        async for piece in self._pieces():
            events = list(self._writer.feed(piece))
            if events:
                await emit(events)
        self._settle()

    async def _pieces(self) -> AsyncIterator[Piece]:
        if not self.draft.silent:
            async for piece in self._service.model.answer(self.draft.prompt):
                yield piece

    def _compact(self) -> list[Event]:
        draft, writer = self.draft, self._writer
        if draft.kept is None:
            return []
        id = writer.next_id("compaction")
        item = compaction_item(self._service.sealer, id, draft.kept)
        return list(writer.add(item, during="response.compaction.compacting"))

    def _limited(self) -> CancelScope:
        self._scope.deadline = current_time() + self._service.settings.limits.answer_seconds
        return self._scope

    def _begin(self) -> None:
        draft, past = self.draft, self.draft.past
        if past.conversation is not None:
            self._held.enter_context(self._service.conversations.lock(past.conversation))
        self._service.running.add(self)
        if draft.store:
            barrier = is_barrier(draft.input)
            entry = Entry(
                draft.key, past.node, self._asked, encode(draft.input), barrier, past.conversation
            )
            self._node = self._service.responses.begin(entry)

    def _settle(self) -> bytes:
        draft, writer = self.draft, self._writer
        thought = sum(map(count_text, writer.thoughts))
        said = [item for item in writer.items if item["type"] != "reasoning"]
        self._became = resource.finished(
            reason=writer.reason,
            now=int(self._service.clock()),
            usage=resource.usage(
                input=draft.view.tokens,
                cached=draft.cached,
                output=thought + count_items(said),
                reasoning=thought,
            ),
        )
        became, output = encode(self._became), encode(writer.items)
        if self._node is not None:
            self._keep(self._node, became, output)
            self._node = None
        return joined(self._asked, became, output)

    def _keep(self, node: int, became: bytes, output: bytes) -> None:
        service, past = self._service, self.draft.past
        items: Sequence[Any] = [*self.draft.input, *self._writer.items]
        seen, above = items, past.context
        barrier = is_barrier(items)
        if barrier:
            items = from_barrier(items)
            seen, above = service.read(items), NOTHING
        tokens = count_items(seen)
        outcome = Outcome(self._became["status"], became, output, barrier, tokens)
        if service.responses.settle(node, outcome, past.conversation):
            size = len(self._asked) + len(output)
            service.nodes.keep(node, past.node, grown(above, items, seen, tokens, size))

    def end(self) -> None:
        """Let go of everything; a response that is not settled by now has failed."""
        self._service.running.discard(self)
        self._held.close()
        node, self._node = self._node, None
        if node is not None:
            self._service.responses.fail(node, self._verdict)

    def _response(self, output: list[Any]) -> dict[str, Any]:
        return {**self.draft.asked, **self._became, "output": output}

    def _terminal(self) -> Event:
        response = self._response(self._writer.items)
        return {"type": f"response.{response['status']}", "response": response}

    def _failure(self) -> list[Event]:
        self._became = resource.failed("failed")
        return [
            {"type": "error", **self._became["error"], "param": None},
            {"type": "response.failed", "response": self._response([])},
        ]


def _writer(service: Service, draft: Draft) -> Writer:
    body = draft.prompt.body
    sealed = "reasoning.encrypted_content" in (body.get("include") or ())
    reasoning: Mapping[str, Any] = body.get("reasoning") or {}
    return Writer(
        draft.key,
        len(draft.input),
        seal=service.sealer.seal if sealed else None,
        shown=bool(reasoning.get("summary") or reasoning.get("generate_summary")),
    )
