"""What the runs of a conversation do: send new messages, continue a stored question, or return a stored answer.

A run begins with a task, which is built when the first event of the run is requested. With an idempotency key, the run
claims the key before; in a queue, it waits for the earlier runs before.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from kedge._internal.event_loops import SharedResource
from kedge.conversation import lookup
from kedge.conversation.checkpoint import Checkpoint
from kedge.conversation.claims import ClaimRequest, hold_queue
from kedge.conversation.lazy_conversation import LazyConversation
from kedge.conversation.lookup import Position, ResumePoint
from kedge.conversation.messages import append_blocks
from kedge.conversation.run import ConversationRun, ConversationStream, ReplyEvents, TaskBuilder
from kedge.conversation.run_writer import TurnTask
from kedge.engines import Engine, OutputSchema, Reply, to_output_schema, unwrap
from kedge.engines.options import list_options
from kedge.engines.output_schema import SchemaMismatch
from kedge.engines.reply import answer_text, read_output
from kedge.engines.request_log import CostFunction
from kedge.errors import HeadConflict, OutputInvalid
from kedge.store import ConversationRow, Node, Store
from kedge.turns import Block, Turn, new_id


class ConversationTasks(LazyConversation):
    """A conversation that can be run, as far as its runs are concerned.

    Args:
        store: The store.
        new: The row for a new conversation.
        owned: What is closed with this object.
        engine: The engine with all its middleware.
        price: A function that computes the cost of a response.
        lease: Seconds after which the claim of a run expires unless it is renewed.
        is_queued: Whether a run waits for the earlier runs of the conversation.
    """

    def __init__(
        self,
        store: Store,
        new: ConversationRow,
        owned: Sequence[SharedResource[Any]],
        *,
        engine: Engine,
        price: CostFunction | None,
        lease: float,
        is_queued: bool,
    ) -> None:
        super().__init__(store, new, owned)
        self.engine = engine
        self.price = price
        self.lease = lease
        self._is_queued = is_queued

    # Streams

    def _stream_question(
        self,
        blocks: Sequence[Block],
        at: Position | None,
        keep: int | None,
        key: str,
        output: Any,
        options: Mapping[str, Any],
    ) -> ConversationStream[Any]:
        """Return the stream of a run that sends blocks after the head or after another position."""
        build_task = partial(self._build_question, blocks, at, keep, key)
        if key:
            run = partial(self._run_once, key, blocks, at is not None, build_task)
        else:
            run = partial(self._run, build_task)
        return self._open_stream(run, output, options)

    def _stream_stored_question(
        self, node: int | Node | None, restart: bool, output: Any, options: Mapping[str, Any]
    ) -> ConversationStream[Any]:
        """Return the stream of a run that continues a stored question."""
        schema = to_output_schema(output) if output is not None else None
        build_task = partial(self._resume, node, restart, schema)
        return self._open_stream(partial(self._run, build_task), schema, options)

    def _stream_last_question(
        self, output: Any, options: Mapping[str, Any]
    ) -> ConversationStream[Any]:
        """Return the stream of a run that sends the last question again."""
        return self._open_stream(partial(self._run, self._build_regenerate_task), output, options)

    def _open_stream(
        self, run: Callable[[dict[str, Any]], ReplyEvents], output: Any, options: Mapping[str, Any]
    ) -> ConversationStream[Any]:
        """Return the stream of a run, with the schema of a typed answer among its options."""
        run_options = list_options(options)
        schema: OutputSchema[Any] | None = None
        if output is not None:
            schema = to_output_schema(output)
            run_options = {**run_options, "output": schema}
        open_events = partial(run, run_options)
        if self._is_queued:
            open_events = partial(self._wait_in_queue, open_events)
        return ConversationStream(open_events, schema)

    async def _wait_in_queue(self, open_events: Callable[[], ReplyEvents]) -> ReplyEvents:
        """Perform a run after the earlier runs of this conversation, from their answer."""
        row = await self.require_row()
        # The lock is for the other tasks of this process, which need not ask the store; the claim for other processes.
        async with self.store.get_queue(row.id).acquire(), hold_queue(self.store, row, self.lease):
            await self._follow_head()
            async with aclosing(open_events()) as events:
                async for event in events:
                    yield event

    def _run(self, build_task: TaskBuilder, options: dict[str, Any]) -> ReplyEvents:
        run = ConversationRun(self.engine, build_task, options, self.price, self._set_position)
        return run.events()

    async def _run_once(
        self,
        key: str,
        blocks: Sequence[Block],
        is_branch: bool,
        build_task: TaskBuilder,
        options: dict[str, Any],
    ) -> ReplyEvents:
        """Perform the run with this key, or return its reply if it has ended already.

        ``is_branch`` means that the run continues from another node than the head.
        """
        row = await self._require_row_for(lambda turn: append_blocks(turn, blocks))
        request = ClaimRequest(self.store, row, key, new_id("run"), self.lease)
        model = options.get("model") or unwrap(self.engine).model
        claim = await request.acquire(blocks, {**options, "model": model})
        schema = options.get("output")

        async def build_claimed_task() -> TurnTask | Reply[Any]:
            if claim.answer:
                await self._follow_head()
                return await self._load_reply(claim.answer, schema)
            if claim.question:
                point = await self._find_claimed_turn(claim.question, is_branch=is_branch)
                if point is not None:
                    return await self._resume_at(point, key, schema)
            return await build_task()

        async with request.maintain(), aclosing(self._run(build_claimed_task, options)) as events:
            async for event in events:
                yield event

    # Tasks

    async def _build_task(
        self,
        node: int,
        change: Callable[[Turn], Turn] = lambda turn: turn,
        key: str = "",
        *,
        resumed: bool = True,
    ) -> TurnTask:
        """Return a task that sends the Turn at a node, after a change."""
        stored_node, turn = await self._load_turn(node)
        checkpoint = Checkpoint(self.store, self.row, stored_node, turn)
        return TurnTask(checkpoint, change(turn), self.head, key, resumed)

    async def _build_question(
        self, blocks: Sequence[Block], at: Position | None, keep: int | None, key: str
    ) -> TurnTask:
        """Return a task that sends blocks after a position, or after the first ``keep`` blocks there."""
        await self._require_row_for(lambda turn: append_blocks(turn, blocks))
        node = self.head
        length = keep
        if isinstance(at, int | Node):
            node = lookup.get_node_number(self.row, at)
        elif at is not None:
            stored_node, end = await self._find_position(at)
            node = stored_node.id
            if length is None:
                length = end

        def add(turn: Turn) -> Turn:
            if length is not None:
                turn = turn.take(length)
            return append_blocks(turn, blocks)

        return await self._build_task(node, add, key, resumed=False)

    async def _build_regenerate_task(self) -> TurnTask:
        """Return a task for the last question, from the current Turn if it was edited or extended since."""
        row = await self._require_row_for(lookup.truncate_to_question)
        question = lookup.find_last_question(await self.store.path(row, self.head))
        if question is not None:
            return await self._build_task(question.id)
        return await self._build_task(self.head, lookup.truncate_to_question, resumed=False)

    async def _resume(
        self, node: int | Node | None, restart: bool, schema: OutputSchema[Any] | None
    ) -> TurnTask | Reply[Any]:
        """Return the task that continues a stored question, or its answer if it has one."""
        await self._open()
        question: int | None = None
        if node is not None:
            question = lookup.get_node_number(self.row, node)
        if restart and question is not None:
            start = ResumePoint(await self.store.node(self.row, question), done=False)
            return await self._resume_at(start, "", schema)

        point = await lookup.find_resume_point(self.store, self.row, question)
        while True:
            task = await self._resume_at(point, "", schema)
            if point.done:
                return task
            # While the Turn was loaded, another process may have stored tool results or the answer. Requesting them
            # again would be paid for twice, so the task is built again until it starts at the newest node. If another
            # process stores its answer after this check, the head has moved, and this run raises ``HeadConflict``.
            newest = await lookup.find_resume_point(self.store, self.row, question)
            if newest == point:
                return task
            point = newest

    async def _resume_at(
        self, point: ResumePoint, key: str, schema: OutputSchema[Any] | None
    ) -> TurnTask | Reply[Any]:
        """Return the task that continues a stored question from this point, or its answer if it has one.

        If an answer does not have the requested type, the run continues with a correction.
        """
        if not point.done:
            await self.store.require_continuable(self.row)  # before tools run
            return await self._build_task(point.node.id, key=key)
        try:
            reply = await self._adopt_answer(point.node, schema)
        except OutputInvalid as invalid:
            mismatch = SchemaMismatch(invalid.problems)
            correction = cast("OutputSchema[Any]", schema).build_correction(mismatch)
            return await self._build_task(point.node.id, lambda turn: turn.append(correction), key)
        if key:
            await self.store.settle(self.row, key, point.node.id)
        return reply

    async def _find_claimed_turn(self, question: int, *, is_branch: bool) -> ResumePoint | None:
        """Return where the run of a key continues; None if it must start from the current head.

        A run whose answer lost the race for the head is on a separate branch: neither on the path
        to the head nor after it. It is not part of the conversation, and runs again, unless it was sent to continue
        from another node.
        """
        point = await lookup.find_resume_point(self.store, self.row, question)
        head = (await self.store.conversation(self.row)).head
        is_stored = await self._is_on_path(point.node.id, head)
        if is_stored or await self._is_on_path(head, point.node.id):
            # The head is where it was when the question was stored, perhaps by another process.
            await self._follow_head()
            return point
        if head != self.head:  # it would lose the race again
            raise HeadConflict(self.id, point.node.id, head)
        if is_branch:
            return point
        return None

    # Stored answers

    async def _adopt_answer(self, node: Node, schema: OutputSchema[Any] | None) -> Reply[Any]:
        """Return a stored answer, and move the head to it unless it is on the head's path."""
        reply = await self._load_reply(node.id, schema)
        head = (await self.store.conversation(self.row)).head
        if await self._is_on_path(node.id, head):
            await self._follow_head()
            return reply
        await self.store.move_head(self.row, node, head=self.head)
        self._set_position(node, reply.turn)
        return reply

    async def _load_reply(self, node: int, schema: OutputSchema[Any] | None) -> Reply[Any]:
        """Return the reply that is stored at a node, with its typed value if it has one.

        Raises:
            OutputInvalid: It does not match; a validator of its type may also reject what it accepted before.
        """
        turn = (await self.store.load(self.row, node)).turn(self.id)
        value = None
        if schema is not None:
            try:
                value = read_output(schema, turn)
            except SchemaMismatch as mismatch:
                raise OutputInvalid(answer_text(turn), mismatch.problems, 0, turn) from mismatch
        requests = ()
        newest = await self.store.newest_response(self.row, node)
        if newest is not None and newest.node == node:
            requests = (newest,)
        return Reply(answer_text(turn), turn, node, self.id, requests, stored=True, output=value)
