"""Writing one response: begun in the database, written by the model, settled at once.

A ``Run`` ends in exactly one way: completed or incomplete with its output stored, or failed or
cancelled without. ``stop`` ends it from outside (the client went away, the server shuts down).
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from anyio import CancelScope, current_time

from kedge.server import errors, resource
from kedge.server.contexts import grown
from kedge.server.draft import Draft
from kedge.server.output import Event, Writer
from kedge.server.service import Service
from kedge.server.wire import encode, with_output
from kedge.tokens import count_items, count_text

log = logging.getLogger("kedge.server")

Emit = Callable[[Sequence[Event]], Awaitable[None]]
"""Sends events on their way to the client."""

TERMINAL = {"completed": "response.completed", "incomplete": "response.incomplete"}


class Run:
    """One response while it is written."""

    def __init__(self, service: Service, draft: Draft) -> None:
        self.draft = draft
        self._service = service
        self._node: int | None = None
        self._held = ExitStack()
        self._scope = CancelScope()
        self._verdict = "failed"
        self._done = False
        self._writer = Writer(draft.key, len(draft.items))

    async def whole(self) -> bytes | None:
        """Write the response and return it as JSON; None where nobody is left to read it."""
        self._begin()
        try:
            with self._limited():
                async for piece in self._service.model.answer(self.draft.prompt):
                    self._writer.take(piece)
                return with_output(*self._settle()[1:])
        except Exception:
            log.exception("the model failed")
            self._fail("failed")
            raise errors.SERVER_FAILED() from None
        finally:
            self._end()
        if self._verdict == "cancelled":
            return None
        raise errors.SERVER_FAILED()

    async def live(self, emit: Emit) -> None:
        """Write the response and tell every event of it."""
        self._begin()
        begun: dict[str, Any] = {**self.draft.head, "output": []}
        try:
            with self._limited():
                await emit(
                    [
                        {"type": "response.created", "response": begun},
                        {"type": "response.in_progress", "response": begun},
                    ]
                )
                await self._tell(emit)
        except Exception:
            log.exception("the model failed")
            self._fail("failed")
        finally:
            self._end()
        if self._verdict != "cancelled" and not self._done:
            await emit(self._failure())

    def stop(self, status: str) -> None:
        """End the response from outside, as ``failed`` or as ``cancelled``."""
        self._verdict = status
        self._scope.cancel()

    async def _tell(self, emit: Emit) -> None:
        async for piece in self._service.model.answer(self.draft.prompt):
            events = list(self._writer.feed(piece))
            if events:
                await emit(events)
        head, _, _ = self._settle()
        response = {**head, "output": self._writer.items}
        await emit([{"type": TERMINAL[head["status"]], "response": response}])
        self._done = True

    def _limited(self) -> CancelScope:
        self._scope.deadline = current_time() + self._service.settings.limits.answer_seconds
        return self._scope

    def _begin(self) -> None:
        draft = self.draft
        if draft.past.conversation is not None:
            self._held.enter_context(self._service.conversations.lock(draft.past.conversation))
        if draft.store:
            self._node = self._service.responses.begin(
                draft.key,
                draft.past.node,
                encode(draft.head),
                encode(draft.items),
                barrier=False,
                conversation=draft.past.conversation,
            )

    def _settle(self) -> tuple[Mapping[str, Any], bytes, bytes]:
        draft, writer = self.draft, self._writer
        output_tokens = count_items(writer.items)
        head = resource.finished(
            draft.head,
            status="incomplete" if writer.reason else "completed",
            reason=writer.reason,
            now=int(self._service.clock()),
            usage=resource.usage(
                input=draft.input_tokens,
                cached=_cached(draft.past.context.tokens),
                output=output_tokens,
                reasoning=sum(map(count_text, writer.thoughts)),
            ),
        )
        encoded, output = encode(head), encode(writer.items)
        if self._node is not None:
            self._keep(self._node, head["status"], encoded, output, output_tokens)
        self._node = None
        return head, encoded, output

    def _keep(self, node: int, status: str, head: bytes, output: bytes, tokens: int) -> None:
        draft = self.draft
        tokens += draft.item_tokens
        kept = self._service.responses.settle(
            node,
            status,
            head,
            output,
            barrier=False,
            tokens=tokens,
            conversation=draft.past.conversation,
        )
        if kept:
            items = [*draft.items, *self._writer.items]
            context = grown(draft.past.context, items, items, tokens, len(output))
            self._service.nodes.keep(node, draft.past.node, context)

    def _fail(self, status: str) -> None:
        if self._node is not None:
            self._service.responses.fail(self._node, status, encode(self._failed(status)))
        self._node = None

    def _failed(self, status: str) -> dict[str, Any]:
        return resource.failed(
            self.draft.head, status, "server_error", errors.SERVER_FAILED().message
        )

    def _failure(self) -> list[Event]:
        failed = self._failed("failed")
        failed["output"] = []
        return [
            {"type": "error", **failed["error"], "param": None},
            {"type": "response.failed", "response": failed},
        ]

    def _end(self) -> None:
        self._fail(self._verdict)
        self._held.close()


def _cached(tokens: int) -> int:
    return tokens if tokens >= resource.LEAST_CACHED else 0
