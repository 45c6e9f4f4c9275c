"""LangChain's agent with langchain-openai and LangGraph's SQLite checkpointer."""

# pyright: reportMissingImports=false

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
from history import INSTRUCTIONS, Peer, add


class LangGraphPeer(Peer):
    """``use_previous_response_id=True``; under ``kedge.chain`` it replays instead."""

    modules = ("langchain.agents", "langchain_openai", "langgraph.checkpoint.sqlite.aio")
    packages = ("langchain", "langchain-openai", "langgraph", "langgraph-checkpoint-sqlite")
    durable = True
    threads = 0

    async def open(self) -> None:
        from langchain.agents import create_agent
        from langchain_openai import ChatOpenAI
        from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

        self.stack = AsyncExitStack()
        http = await self.stack.enter_async_context(httpx2.AsyncClient())
        if self.chained:
            import kedge

            kedge.chain(http)
        settings: Any = {"base_url": self.base_url, "api_key": "key", "max_retries": 0}
        model = ChatOpenAI(
            model="practice",
            http_async_client=http,
            use_responses_api=True,
            use_previous_response_id=not self.chained,
            **settings,
        )
        path = str(Path(self.folder) / "checkpoints.sqlite3")
        saver = await self.stack.enter_async_context(AsyncSqliteSaver.from_conn_string(path))
        self.agent = create_agent(
            model, tools=[add], system_prompt=INSTRUCTIONS, checkpointer=saver
        )
        self.thread = getattr(self, "thread", "0")

    async def close(self) -> None:
        await self.stack.aclose()

    @property
    def _config(self) -> Any:
        return {"configurable": {"thread_id": self.thread}}

    async def changed(self) -> None:
        from langchain_core.messages import RemoveMessage
        from langgraph.graph.message import REMOVE_ALL_MESSAGES

        new = [RemoveMessage(id=REMOVE_ALL_MESSAGES), *self.history]
        await self.agent.aupdate_state(self._config, {"messages": new})

    async def restart(self) -> None:
        await self.close()
        await self.open()  # the checkpointer has everything

    def make_user(self, text: str) -> Any:
        from langchain_core.messages import HumanMessage

        return HumanMessage(text)

    async def send(self, text: str) -> str:
        known = len(self.history)
        message = self.make_user(text)
        try:
            state = await self.agent.ainvoke({"messages": [message]}, self._config)
        except Exception:
            await self.changed()  # the checkpoint has the message already
            raise
        self.turns.append(state["messages"][known:])
        return state["messages"][-1].text

    async def stream(self, text: str) -> None:
        known = len(self.history)
        inputs = {"messages": [self.make_user(text)]}
        async for _ in self.agent.astream(inputs, self._config, stream_mode="messages"):
            pass
        state = await self.agent.aget_state(self._config)
        self.turns.append(state.values["messages"][known:])

    async def fork(self, turn: int) -> None:
        self.first = self.thread
        self.thread = "fork"
        await super().fork(turn)

    async def switch(self) -> None:
        self.thread = self.first
        self.turns = list(self.branch)


PEER = LangGraphPeer
