"""Runs the scripts of the engine fuzzer through ``Chat``, whose states are stored as bytes between two calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.conversation import Chat, new_key
from kedge.engines import Engine
from kedge.engines.base import RunStream
from kedge.errors import EngineError
from kedge.events import Event
from kedge.turns import Turn
from law.engine_fuzzer import EngineFuzzer
from law.record_views import list_sent
from normalization import normalize_blocks


@dataclass
class ChatFuzzer(EngineFuzzer):
    """Branches are states. Every call has a new ``Chat``, as in another process."""

    states: list[bytes] = field(default_factory=lambda: [b""])
    key: str = field(default_factory=new_key)

    def __post_init__(self) -> None:
        self.is_encrypted = self.rng.random() < 0.5

    def _build_chat(self, engine: Engine | None = None) -> Chat:
        engine = engine or self.engines[self.server_index]
        return Chat(engine, state_key=self.key if self.is_encrypted else None, repair=False)

    @property
    def turn(self) -> Turn:
        """Return the Turn of the current state."""
        return self._build_chat().read_state(self.states[-1])

    @turn.setter
    def turn(self, turn: Turn) -> None:
        turn = Turn(turn.body, data=turn.data)  # a state has no leading system blocks
        self.states[-1] = self._build_chat().write_state(self.states[-1], turn)

    def _open_stream(self, turn: Turn, **options: Any) -> RunStream[Any]:
        *before, message = turn.blocks
        self.turn = Turn(before, data=turn.data)
        chat = self._build_chat(self._build_engine())
        self._planned = chat.plan(self.states[-1], message, **options)
        return chat.stream_with_state(self.states[-1], message, **options)

    def _store_finished(self, stream: Any) -> None:
        self.states[-1] = stream.reply.state
        stored, turn = self.turn, stream.reply.turn
        if normalize_blocks(stored.blocks) != normalize_blocks(turn.blocks):
            self.stats.lost += 1
            self.stats.report(f"state {stored.blocks}\nturn {turn.blocks}")

    def _store_failed(self, error: EngineError, turn: Turn) -> None:
        self.states[-1] = error.state or self.states[-1]

    def _check_events(self, events: Sequence[Event], since: int) -> None:
        super()._check_events(events, since)
        sent = list_sent(events)[0]["anchor"]
        is_known = not self._planned.conditional and not self._is_edited
        if is_known and self._planned.anchor_id != sent:
            self.stats.false += 1
            self.stats.report(f"dry run: {self._planned.anchor_id!r}, not {sent!r}")

    def _fork(self) -> None:
        self.states.append(self.states[-1])
        self.rng.shuffle(self.states)
