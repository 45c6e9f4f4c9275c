"""A random simulation of the changes that users, middlewares, servers and time make to a Turn.

A script is a list of steps, each a name and a few numbers; a step uses the numbers to select what it
changes, so every script can be run and a failing one shrinks. The laws are checked before every send
and around every change that must have no effect.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from kedge import turns
from kedge.errors import Unsendable
from kedge.planning import Mode, RequestPlan, get_state, plan_request, record_response, set_state
from kedge.turns import Block, OpaqueBlock, ReasoningBlock, Turn, opaque, reasoning, system, user
from planning import normal_form
from planning.laws import LAWS, LawViolation, PlanCase, ResponseSnapshot, response_output
from planning.reference_server import DAY, ReferenceServer, RequestRejected, ResponseNotFound

Step = tuple[str, int, int, int]
Script = list[Step]
Planner = Callable[..., RequestPlan]

MODES: tuple[Mode | None, ...] = (*(None,) * 5, "chained", "stateless", "conversation")
OUTCOMES = ("completed",) * 4 + ("unstored", "incomplete", "failed")
Shape = tuple[str, ...]
OUTPUT_SHAPES: tuple[Shape, ...] = (
    ("message",),
    ("reasoning", "message"),
    ("function_call",),
    ("reasoning", "function_call"),
    ("reasoning", "function_call", "custom_tool_call"),
    ("reasoning", "reasoning", "message"),
    ("message", "reasoning"),
    ("reasoning",),
    ("compaction", "message"),
    ("reasoning", "compaction", "reasoning", "message"),
    ("web_search_call", "message"),
    ("shell_call",),
    ("reasoning", "mcp_approval_request"),
    ("message", "message"),
)


@dataclass
class Simulation:
    """Branches of a conversation, two servers, and a clock."""

    planner: Planner = plan_request
    branches: list[Turn] = field(default_factory=lambda: [Turn()])
    history: list[Turn] = field(default_factory=list[Turn])
    snapshots: dict[str, ResponseSnapshot] = field(default_factory=dict[str, ResponseSnapshot])
    now: float = 1_000_000.0
    mode: Mode = "chained"
    _word_numbers: Any = field(default_factory=count)

    def __post_init__(self) -> None:
        self.servers = (
            ReferenceServer("alpha", self.new_word),
            ReferenceServer("beta", self.new_word, retention=10 * DAY, max_depth=2),
        )

    def new_word(self) -> str:
        """Return a unique word."""
        return f"<{next(self._word_numbers)}>"

    def run(self, script: Script) -> None:
        """Run every step, checking the laws before each send."""
        for name, which, b, c in script:
            index = which % len(self.branches)
            turn = self.branches[index]
            changed = STEPS[name](self, turn, b, c)
            if changed is not None:
                self.history.append(turn)
                self.branches[index] = changed

    def plan(self, turn: Turn, server: ReferenceServer, mode: Mode = "chained") -> RequestPlan:
        """Plan a request with the planner under test."""
        depth = server.max_depth
        return self.planner(turn, scope=server.scope, mode=mode, now=self.now, max_depth=depth)

    def check_laws(self, turn: Turn, plan: RequestPlan, server: ReferenceServer) -> None:
        """Check every law for a plan."""
        case = PlanCase(turn, plan, server, self.servers, self.snapshots, self.now)
        for law in LAWS:
            law(case)

    # Steps that extend a conversation.

    def say(self, turn: Turn, b: int, c: int) -> Turn:
        """Append a block to the Turn."""
        return turn.append(self._make_block(b))

    def send(self, turn: Turn, b: int, c: int) -> Turn:
        """Send the Turn to a server, and return it with the answer."""
        memory, mode = self.servers[b % 2], MODES[b // 2 % len(MODES)] or self.mode
        outcome = OUTCOMES[c % len(OUTCOMES)]
        shape = OUTPUT_SHAPES[c // len(OUTCOMES) % len(OUTPUT_SHAPES)]
        if c < len(OUTCOMES) * len(OUTPUT_SHAPES) or c % 2:
            turn = self._answer_open_calls(turn)
        if mode == "conversation":
            turn = self._check_conversation(turn, memory)
        plan = self.plan(turn, memory, mode)
        try:
            self.check_laws(turn, plan, memory)
        except ResponseNotFound:
            return self._heal(turn, plan)
        if plan.problems:
            return self._check_unsendable(turn, plan)
        if not plan.anchor and not plan.delta_blocks:
            return turn  # nothing to send
        return self._send_plan(turn, plan, memory, outcome, shape)

    def _send_plan(
        self, turn: Turn, plan: RequestPlan, server: ReferenceServer, outcome: str, shape: Shape
    ) -> Turn:
        conversation = ""
        if plan.mode == "conversation":
            conversation = plan.conversation_id or server.open_conversation()
        try:
            response = server.respond(
                plan.input(),
                previous="" if conversation else plan.previous_response_id,
                conversation=conversation,
                now=self.now,
                store=outcome != "unstored",
                status=outcome if outcome in ("incomplete", "failed") else "completed",
                shape=shape,
            )
        except ResponseNotFound:
            return self._heal(turn, plan)
        except RequestRejected as refusal:
            raise LawViolation("sendable", refusal, turn, plan.explain()) from None
        self.now += 1.0
        if response.status == "failed":
            return turn
        turn = record_response(
            turn,
            [turns.block_from_item(item) for item in response.output],
            response_id=response.id,
            plan=plan,
            created_at=response.created_at,
            status="incomplete" if response.status == "incomplete" else "completed",
            stored=response.stored,
            retention=server.retention,
            conversation_id=conversation,
        )
        visible = normal_form.normalize_visible(turn)
        output = response_output(turn, response.id, len(visible))
        self.snapshots[response.id] = ResponseSnapshot(visible, output)
        return turn

    def _check_conversation(self, turn: Turn, server: ReferenceServer) -> Turn:
        """Drop a conversation object that another client has changed, as an engine does."""
        state = get_state(turn)
        items = server.conversations.get(state.conversation_id, [])
        last = server.responses.get(state.previous_response_id)
        if state.conversation_id and (last is None or not items or items[-1] != last.items[-1]):
            return set_state(turn, replace(state, conversation_id=""))
        return turn

    def _heal(self, turn: Turn, plan: RequestPlan) -> Turn:
        lost = plan.previous_response_id
        assert any(lost in each.responses for each in self.servers)
        return set_state(turn, get_state(turn).mark_lost([lost]))

    def _check_unsendable(self, turn: Turn, plan: RequestPlan) -> Turn:
        try:
            plan.input()
        except Unsendable:
            return turn
        raise LawViolation("problems", "a plan with problems can be sent", plan)

    def _answer_open_calls(self, turn: Turn) -> Turn:
        """Append a result for every call without one."""
        plan = plan_request(turn, scope="", now=0.0)
        waiting = {each.block_id for each in plan.problems if each.kind == "unanswered"}
        return turn.append(*(self._make_result(block) for block in turn if block.id in waiting))

    def _make_result(self, call: Block) -> Block:
        if isinstance(call, turns.ToolCallBlock):
            return turns.tool_result(call.call_id, f"found {self.new_word()}", custom=call.custom)
        assert isinstance(call, OpaqueBlock)
        if call.type == "shell_call":
            output = [{"stdout": self.new_word()}]
            call_id = call.item["call_id"]
            return opaque({"type": "shell_call_output", "call_id": call_id, "output": output})
        return opaque({"type": "mcp_approval_response", "approval_request_id": call.item["id"]})

    def _make_block(self, kind: int) -> Block:
        word = self.new_word()
        match kind % 8:
            case 0:
                return user([turns.TextPart(word), turns.ImagePart(f"https://pictures/{word}")])
            case 1:
                return user([turns.FilePart(data=f"data:{word}", filename="a.pdf")])
            case 2:
                return system(f"from now on {word}", role="developer")
            case 3:
                return turns.assistant(f"by hand {word}")
            case _:
                return user(f"said {word}")

    # Steps of users and middlewares.

    def edit(self, turn: Turn, b: int, c: int) -> Turn | None:
        """Edit a block in place, with or without its metadata."""
        if not turn.blocks:
            return None
        block = turn.blocks[b % len(turn)]
        edited = self._edit_block(block, c)
        if c % 2:
            edited = replace(edited, metadata={}, source=None)
        return turn.edit(block.id, edited)

    def _edit_block(self, block: Block, choice: int) -> Block:
        word = self.new_word()
        match block:
            case turns.UserBlock() | turns.AssistantBlock() | turns.ToolResultBlock():
                return replace(block, parts=(turns.TextPart(f"edited {word}"),))
            case turns.SystemBlock():
                return replace(block, text=f"edited {word}")
            case turns.ToolCallBlock():
                return replace(block, arguments=word)
            case ReasoningBlock() if choice % 3:
                return replace(block, summary=(f"redacted {word}",))
            case ReasoningBlock():
                return replace(block, encrypted_content=f"forged {word}")
            case OpaqueBlock() if not normal_form.is_compaction(block):
                return replace(block, item={**block.item, "note": word})
            case _:
                return block

    def insert(self, turn: Turn, b: int, c: int) -> Turn:
        """Insert a block at any position."""
        match c % 8:
            case 0:
                item = {"type": "compaction", "encrypted_content": f"by hand {self.new_word()}"}
                block: Block = opaque(item)
            case 1:
                idea = f"idea {self.new_word()}"
                block = reasoning(idea, encrypted_content=f"forged {self.new_word()}")
            case 2:
                block = opaque({"type": "web_search_call", "action": {"query": self.new_word()}})
            case _:
                block = self._make_block(c)
        return turn.insert(b % (len(turn) + 1), block)

    def remove(self, turn: Turn, b: int, c: int) -> Turn | None:
        """Remove a block."""
        return turn.remove(turn[b % len(turn)].id) if turn.blocks else None

    def move(self, turn: Turn, b: int, c: int) -> Turn | None:
        """Move a block to another position."""
        if not turn.blocks:
            return None
        block = turn[b % len(turn)]
        return turn.remove(block.id).insert(c % len(turn), block)

    def copy(self, turn: Turn, b: int, c: int) -> Turn | None:
        """Append copies of some blocks, including their metadata."""
        if not turn.blocks:
            return None
        first = b % len(turn)
        return turn.append(*(replace(each, id="") for each in turn[first : first + c % 4]))

    def truncate(self, turn: Turn, b: int, c: int) -> Turn:
        """Remove blocks from the end."""
        return turn.take(len(turn) - min(b % 6, len(turn)))

    def instruct(self, turn: Turn, b: int, c: int) -> Turn:
        """Change the leading system text."""
        if turn.lead and b % 2:
            return turn.remove(turn[0].id)
        return turn.insert(0, system(f"be {self.new_word()}"))

    def fork(self, turn: Turn, b: int, c: int) -> None:
        """Add a second branch that starts from this Turn."""
        if len(self.branches) < 4:
            self.branches.append(turn)

    def back(self, turn: Turn, b: int, c: int) -> Turn | None:
        """Return to an earlier Turn, with its own state or with the current state."""
        if not self.history:
            return None
        earlier = self.history[b % len(self.history)]
        return set_state(earlier, get_state(turn)) if c % 2 else earlier

    # Steps that must have no effect.

    def rebuild(self, turn: Turn, b: int, c: int) -> Turn:
        """Rebuild an equal conversation, and check that the plan uses the same anchor."""
        rebuilt = REBUILDS[b % len(REBUILDS)](turn)
        for memory in self.servers:
            old, new = self.plan(turn, memory), self.plan(rebuilt, memory)
            if old.previous_response_id != new.previous_response_id:
                raise LawViolation("stability", turn, old.explain(), new.explain())
        return rebuilt

    # Steps of time and servers.

    def wait(self, turn: Turn, b: int, c: int) -> None:
        """Advance the clock."""
        self.now += b % 32 * DAY

    def switch(self, turn: Turn, b: int, c: int) -> None:
        """Change the mode of later requests."""
        self.mode = MODES[b % len(MODES)] or "chained"

    def forget(self, turn: Turn, b: int, c: int) -> None:
        """Make a server lose a response."""
        retained = list(self.servers[b % 2].responses.values())
        if retained:
            retained[c % len(retained)].forgotten = True

    def intrude(self, turn: Turn, b: int, c: int) -> None:
        """Append to a server's conversation objects as another client would."""
        for items in self.servers[b % 2].conversations.values():
            text = [{"type": "input_text", "text": "from elsewhere"}]
            items.append({"type": "message", "role": "user", "content": text, "id": "it_other"})


def _map_blocks(change: Callable[[Block], Block]) -> Callable[[Turn], Turn]:
    return lambda turn: Turn(map(change, turn), id=turn.id, data=turn.data)


def _reverse_members(block: Block) -> Block:
    if not isinstance(block, OpaqueBlock):
        return block
    return replace(block, item=dict(reversed(tuple(block.item.items()))))


REBUILDS: tuple[Callable[[Turn], Turn], ...] = (
    lambda turn: turns.loads(turns.dumps(turn)),
    _map_blocks(lambda block: replace(block, id="")),
    _map_blocks(lambda block: turns.block_from_item(turns.item_from_block(block))),
    _map_blocks(lambda block: replace(block, metadata={}, source=None)),
    _map_blocks(
        lambda block: block.with_metadata(seen_at=3).with_source(
            turns.Source("other", block.item_id, block.output_index)
            if block.response_id
            else block.source
        )
    ),
    _map_blocks(lambda block: block.with_origin("store")),
    _map_blocks(_reverse_members),
)

STEP_NAMES = (
    *("say", "send", "edit", "insert", "remove", "move", "copy", "truncate", "instruct", "fork"),
    *("back", "rebuild", "wait", "switch", "forget", "intrude"),
)
STEPS: dict[str, Callable[[Simulation, Turn, int, int], Turn | None]] = {
    name: getattr(Simulation, name) for name in STEP_NAMES
}


_branches, _numbers = st.integers(0, 3), st.integers(0, 97)
FIRST_STEP: Step = ("say", 0, 4, 0)


def scripts(episodes: int = 9) -> st.SearchStrategy[Script]:
    """Return a strategy for scripts of up to this many episodes of adding, sending and changing blocks."""
    append = st.builds(lambda which, b: ("say", which, b, 0), _branches, st.integers(0, 7))
    episode = st.tuples(
        st.lists(append, max_size=1), send_steps(), st.lists(change_steps(), max_size=2)
    )
    return st.lists(episode, min_size=1, max_size=episodes).map(
        lambda played: [FIRST_STEP, *(step for s, send, m in played for step in (*s, send, *m))]
    )


def send_steps() -> st.SearchStrategy[Step]:
    """Return a strategy for sends, most of them to one server and most of them successful."""
    return st.builds(
        lambda which, b, outcome, shape: ("send", which, b, outcome + 7 * shape),
        _branches,
        st.builds(
            lambda scope, mode: scope + 2 * mode,
            st.sampled_from([0, 0, 0, 1, 1]),
            st.integers(0, len(MODES) - 1),
        ),
        st.integers(0, len(OUTCOMES) - 1),
        st.integers(0, 2 * len(OUTPUT_SHAPES) - 1),
    )


def change_steps() -> st.SearchStrategy[Step]:
    """Return a strategy for steps that change a Turn, a server or the clock."""
    names = st.sampled_from(STEP_NAMES[2:])
    return st.tuples(names, _branches, _numbers, _numbers)


def find_broken_law(planner: Planner, script: Script) -> str:
    """Return the name of the law that a planner breaks in a script, or an empty string."""
    try:
        Simulation(planner).run(script)
    except LawViolation as broken:
        return broken.law
    return ""
