"""Valid calls of public functions, in which ``test_argument_types.py`` replaces one argument after the other."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import kedge
from kedge import analytics, batch, compaction, conversation, middleware, store, workflows
from kedge.analytics import Selection
from kedge.chaining import MemoryIndex, StoreIndex
from kedge.chaining.proxy import create_proxy_app
from kedge.compaction import MessageLimitCompactor
from kedge.config import load_config
from kedge.conversation import Chat, Conversation
from kedge.engines import ResendLimit, messages_from_blocks, to_output_schema
from kedge.middleware.compose import StackSettings
from kedge.observe import get_logger, log_to_stderr
from kedge.planning import find_problems, get_state, prefix_digest, render
from kedge.providers import load_models, open_model
from kedge.providers.clients import ConnectSettings
from kedge.server.settings import Limits, Settings
from kedge.store import TokenRegistry, open_store
from kedge.tools import Deny, Edit, Grammar, Toolbox, run_calls
from kedge.tools.toolbox import ToolOptions
from kedge.turns import Turn, assistant, dump, dumps, user
from kedge.usage import tokens
from kedge.usage.prices import Price, load_prices
from kedge.wire import blocks_from_messages

TURN = Turn([user("Hello"), assistant("Hi."), user("Bye")])
FIRST = TURN.blocks[0]
RUN_OPTIONS = (
    *("model", "mode", "tools", "candidates", "streaming", "resend_limit", "tap", "before_send"),
    *("output_retries", "ephemeral", "heal", "keep_reasoning", "extra_body"),
)


class Call(NamedTuple):
    """A valid call of a public function."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    further: tuple[str, ...] = ()
    """Names of further keyword arguments, which ``**settings`` accepts."""

    def replace_each(self, value: object) -> "list[tuple[str, Callable[[], Any]]]":
        """Return a call for each argument, with its name, that passes this value in its place."""
        calls: list[tuple[str, Callable[[], Any]]] = []
        parameters = list(inspect.signature(self.function).parameters.values())
        for index, parameter in enumerate(parameters):
            args, kwargs = list(self.args), dict(self.kwargs)
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            if parameter.kind is parameter.KEYWORD_ONLY or index >= len(args):
                kwargs[parameter.name] = value
            else:
                args[index] = value
            if parameter.kind is parameter.VAR_POSITIONAL:
                args, kwargs = [*self.args[:index], value], dict(self.kwargs)
            calls.append((parameter.name, lambda a=args, k=kwargs: self.function(*a, **k)))
        for name in self.further:
            further = {**self.kwargs, name: value}
            calls.append((name, lambda k=further: self.function(*self.args, **k)))
        return calls


async def run(result: Any) -> Any:
    """Return the result of a call that may be async."""
    return await result if isinstance(result, Awaitable) else result


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def list_pure_calls(folder: Path) -> list[Call]:
    """Return calls that need neither a store nor a server."""
    box = Toolbox(add)
    turn_methods = (
        *((TURN.insert, (0, FIRST)), (TURN.edit, (FIRST.id, FIRST)), (TURN.remove, (FIRST.id,))),
        *((TURN.truncate, (1,)), (TURN.take, (1,)), (TURN.index, (FIRST.id,))),
        *((TURN.with_blocks, ([FIRST],)), (TURN.with_data, ({},)), (TURN.append, (user("x"),))),
    )
    return [
        Call(Conversation, ("practice",), further=tuple(StackSettings.__optional_keys__)),
        Call(Chat, ("practice",), further=tuple(StackSettings.__optional_keys__)),
        Call(
            kedge.connect,
            ("openai:gpt-5.1",),
            {"api_key": "k"},
            tuple(ConnectSettings.__optional_keys__),
        ),
        Call(kedge.tool, (add,), further=tuple(ToolOptions.__optional_keys__)),
        Call(kedge.mcp_tools, ("http://127.0.0.1:1/mcp",)),
        Call(kedge.with_middleware, (kedge.connect("practice"),)),
        Call(open_store, (folder / "opened.db",)),
        *(Call(method, args) for method, args in turn_methods),
        Call(Turn, ([FIRST],)),
        Call(kedge.user, ("x",)),
        Call(kedge.tool_call, ("f", "{}")),
        Call(kedge.tool_result, ("c", "x")),
        Call(kedge.image, ("https://kedge.example/a.png",)),
        Call(kedge.file, (b"x",)),
        Call(kedge.audio, (b"x",)),
        Call(kedge.diff, (TURN, TURN)),
        Call(dumps, (TURN,)),
        Call(dump, (TURN,)),
        Call(blocks_from_messages, ([{"role": "user", "content": "x"}],)),
        Call(messages_from_blocks, (TURN.blocks,)),
        Call(to_output_schema, (int,)),
        Call(ResendLimit, (1,)),
        Call(find_problems, (TURN,)),
        Call(get_state, (TURN,)),
        Call(prefix_digest, (TURN,)),
        Call(render, (TURN,)),
        Call(middleware.tools, (add,)),
        Call(middleware.repair),
        Call(middleware.retry),
        Call(middleware.redact, ("x",)),
        Call(middleware.block, ("x",)),
        Call(middleware.compact, (MessageLimitCompactor(2),)),
        Call(middleware.log),
        Call(middleware.system_prompt, ("x",)),
        Call(middleware.two_phase, (lambda turn: turn,)),
        Call(middleware.repair_turn, (TURN,)),
        Call(Toolbox, (add,)),
        Call(box.without, ("add",)),
        Call(run_calls, (box, [])),
        Call(Deny, ("x",)),
        Call(Edit, ({},)),
        Call(Grammar, ("lark", "x")),
        Call(MessageLimitCompactor, (5,)),
        Call(compaction.TokenLimitCompactor, (100,)),
        Call(compaction.ServerCompactor, (1000,)),
        Call(compaction.cut_points, (TURN.blocks,)),
        Call(batch.BatchLine, ("a", ("Hi",))),
        Call(batch.BatchJob, ("a", "sqlite://:memory:", "practice")),
        Call(batch.AsyncioRunner),
        Call(batch.RateLimiter),
        Call(batch.LineResult, ("a", "completed")),
        Call(workflows.Side, ("a", "practice")),
        Call(workflows.Step, ("a", "x")),
        Call(workflows.ModelJudge, ("practice", "x")),
        Call(workflows.Verdict, (True,)),
        Call(workflows.Ruling, (True,)),
        Call(Selection),
        Call(Price, (("openai",), "gpt", 1.0, 1.0)),
        Call(load_prices, (folder / "none.toml",)),
        Call(load_models, (folder / "none.toml",)),
        Call(open_model, ("practice",)),
        Call(load_config),
        Call(tokens.count_text, ("x",)),
        Call(tokens.count_items, ([],)),
        Call(MemoryIndex),
        Call(create_proxy_app, ("http://127.0.0.1:1/v1",)),
        Call(get_logger, ("kedge.x",)),
        Call(log_to_stderr),
        Call(Settings),
        Call(Limits),
    ]


async def list_store_calls(opened: store.Store) -> list[Call]:
    """Return calls of a store, a conversation in it and an engine."""
    chat = Conversation("practice", store=opened)
    await chat.send("Hello")
    row = chat.row
    registry = TokenRegistry(opened)
    engine = kedge.connect("practice")
    sides = [workflows.Side("a", "practice"), workflows.Side("b", "practice")]
    place = {"store": opened, "engine": "practice"}
    return [
        Call(chat.send, ("Hi",), further=RUN_OPTIONS),
        Call(chat.append, ("Hi",)),
        Call(chat.plan, ("Hi",), further=RUN_OPTIONS),
        Call(chat.insert, (0, "x")),
        Call(chat.truncate, (5,)),
        Call(chat.goto, (chat.head,)),
        Call(chat.diff, (chat.head,)),
        Call(chat.fork),
        Call(chat.merge_summary_of, (chat.head,)),
        Call(chat.rename, ("t",)),
        Call(chat.tag, ("t",)),
        Call(chat.untag, ("t",)),
        Call(chat.archive, (False,)),
        Call(chat.update_with, (lambda _: {},)),
        Call(engine.run, (TURN,), further=RUN_OPTIONS),
        Call(engine.plan, (TURN,), further=RUN_OPTIONS),
        Call(opened.conversations),
        Call(opened.search, ("x",)),
        Call(opened.import_, ("",)),
        Call(opened.create),
        Call(opened.fork, (row, row.head)),
        Call(opened.export, (row,)),
        Call(opened.tree, (row,)),
        Call(opened.path, (row,)),
        Call(opened.load, (row,)),
        Call(opened.responses, (row,)),
        Call(opened.delete_older, (1e9,)),
        Call(opened.update_with, (row, lambda _: {})),
        Call(TokenRegistry, (opened,)),
        Call(registry.add, ("alice",)),
        Call(registry.find, ("x",)),
        Call(StoreIndex, (opened,)),
        Call(conversation.find_anchors, (opened, TURN, "practice")),
        Call(analytics.analyze, (opened,)),
        Call(analytics.analyze_over_time, (opened,)),
        Call(analytics.analyze_conversations, (opened,)),
        Call(workflows.list_workflows, (opened,)),
        Call(workflows.load_workflow, (opened, "wf")),
        Call(workflows.refine, ("x",), {"judge": lambda _: True, **place}),
        Call(workflows.steps, ([workflows.Step("a", "x")],), place),
        Call(
            workflows.debate, ("x", sides), {"judge": lambda _: "a", "store": opened, "rounds": 1}
        ),
    ]
