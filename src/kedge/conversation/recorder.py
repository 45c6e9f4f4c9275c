"""Collect the incidents, tool runs and bodies of a run, which a store keeps with its nodes."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from kedge.engines.content_filter import ContentFilters
from kedge.engines.request_log import filter_json
from kedge.events import Event
from kedge.events.run import Healed, ModeChanged, RequestPlanned, ServerForgot, ToolFinished
from kedge.store import Incident, StoredExchange, Telemetry, ToolRow
from kedge.store.records import NO_TELEMETRY
from kedge.text.json_text import escape_surrogates

WITHHELD_BODY = b"[not stored: guard rules apply, and this body is a stream]"


@dataclass(slots=True)
class RunRecorder:
    """Collects the incidents, tool runs and bodies of one run."""

    clock: Callable[[], float] = time.time
    filters: ContentFilters = field(default_factory=ContentFilters)
    recorded: Telemetry = NO_TELEMETRY
    _scope: str = ""

    def record_exchange(self, request: bytes, reply: bytes, status: int | None) -> None:
        """Record the bodies of a request and its reply, after the guards of the stack."""
        if self.filters:
            request, reply = (_filter_body(body, self.filters) for body in (request, reply))
        self._add("exchanges", StoredExchange(request, reply, status, self.clock()))

    def record_event(self, event: Event) -> None:
        """Record an event."""
        match event:
            case RequestPlanned(plan):
                self._scope = plan.scope
            case Healed():
                self._record_incident("healed", event.reason)
            case ServerForgot():
                self._record_incident("forgot", "usage")
            case ModeChanged():
                self._record_incident("mode_changed", event.reason)
            case ToolFinished():
                row = ToolRow(event.call.name, event.outcome, event.seconds, self.clock())
                self._add("tools", row)
            case _:
                pass

    def drain_telemetry(self) -> Telemetry:
        """Return the data recorded since the last call."""
        recorded, self.recorded = self.recorded, NO_TELEMETRY
        return recorded

    def _record_incident(self, kind: str, reason: str) -> None:
        incident = Incident(kind, reason, self._scope, self.clock())  # pyright: ignore[reportArgumentType]
        self._add("incidents", incident)

    def _add(self, kind: str, row: object) -> None:
        rows = {kind: (*getattr(self.recorded, kind), row)}
        self.recorded = replace(self.recorded, **rows)


def _filter_body(body: bytes, filters: ContentFilters) -> bytes:
    """Return a JSON body with its texts filtered; any other body is withheld.

    The text of a stream is split into pieces, in which patterns cannot be found.
    """
    if not body:
        return body
    try:
        filtered = json.dumps(filter_json(json.loads(body), filters), ensure_ascii=False)
        return escape_surrogates(filtered).encode()
    except (ValueError, RecursionError):
        return WITHHELD_BODY
