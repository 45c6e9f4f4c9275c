"""The methods and properties of a conversation for sync code.

``wrap_method`` returns what the coroutine method returns, and ``wrap_navigation`` a ``SyncConversation`` in place of a
``Conversation``.
"""

from collections.abc import Sequence
from typing import Unpack

from kedge._internal.event_loops import SyncFacade, run_sync, wrap_method, wrap_navigation
from kedge.conversation.conversation import Conversation
from kedge.engines import Engine
from kedge.engines.options import RequestOptions
from kedge.engines.sync import wrap_stream
from kedge.planning import RequestPlan
from kedge.store import ConversationRow, Store
from kedge.turns import Block, Turn


class SyncConversation(SyncFacade[Conversation]):
    """The methods and properties of ``Conversation`` for sync code; see ``Conversation.sync``.

    Each opens the conversation if it needs its stored row and that was not loaded before.
    """

    send = wrap_method(Conversation.send)
    stream = wrap_stream(Conversation.stream)
    resume = wrap_method(Conversation.resume)
    stream_resume = wrap_stream(Conversation.stream_resume)
    regenerate = wrap_method(Conversation.regenerate)
    stream_regenerate = wrap_stream(Conversation.stream_regenerate)
    pending = wrap_method(Conversation.pending)
    append = wrap_method(Conversation.append)
    probe_and_plan = wrap_method(Conversation.probe_and_plan)

    refresh = wrap_navigation(Conversation.refresh)
    tree = wrap_method(Conversation.tree)
    path = wrap_method(Conversation.path)
    diff = wrap_method(Conversation.diff)
    goto = wrap_navigation(Conversation.goto)
    fork = wrap_navigation(Conversation.fork)
    undo = wrap_navigation(Conversation.undo)
    redo = wrap_navigation(Conversation.redo)

    insert = wrap_method(Conversation.insert)
    remove = wrap_method(Conversation.remove)
    truncate = wrap_method(Conversation.truncate)
    edit = wrap_method(Conversation.edit)
    merge_summary_of = wrap_method(Conversation.merge_summary_of)

    rename = wrap_method(Conversation.rename)
    tag = wrap_method(Conversation.tag)
    untag = wrap_method(Conversation.untag)
    archive = wrap_method(Conversation.archive)
    set_mode = wrap_method(Conversation.set_mode)
    set_retention = wrap_method(Conversation.set_retention)
    update_with = wrap_method(Conversation.update_with)
    delete = wrap_method(Conversation.delete)
    export = wrap_method(Conversation.export)
    responses = wrap_method(Conversation.responses)
    require_row = wrap_method(Conversation.require_row)

    def plan(self, *messages: Block | str, **options: Unpack[RequestOptions]) -> RequestPlan:
        """Return the plan of the request that ``send`` would send; see ``Conversation.plan``."""
        return self._open().plan(*messages, **options)

    @property
    def id(self) -> str:
        """The id of the conversation."""
        return self._target.id

    @property
    def store(self) -> Store:
        """Its store."""
        return self._target.store

    @property
    def engine(self) -> Engine:
        """Its engine, with the middleware."""
        return self._target.engine

    @property
    def row(self) -> ConversationRow:
        """Its row in the store, as it was last read."""
        return self._open().row

    @property
    def is_open(self) -> bool:
        """Whether its row was loaded from the store."""
        return self._target.is_open

    @property
    def is_new(self) -> bool:
        """Whether the store did not have the conversation when this object opened it."""
        return self._open().is_new

    @property
    def title(self) -> str:
        """Its title."""
        return self._open().title

    @property
    def tags(self) -> Sequence[str]:
        """Its tags."""
        return self._open().tags

    @property
    def head(self) -> int:
        """The number of the node at which the head last was."""
        return self._open().head

    @property
    def turn(self) -> Turn:
        """The Turn up to this node."""
        return self._open().turn

    def _open(self) -> Conversation:
        if not self._target.is_open:
            run_sync(self._target.__aenter__())
        return self._target
