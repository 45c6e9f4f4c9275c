"""openai-agents with its SQLite session, which replays."""

# pyright: reportMissingImports=false

import json
from pathlib import Path
from typing import Any

from history import INSTRUCTIONS, Peer, add


class OpenAIAgentsPeer(Peer):
    """A session on disk; a changed history is written to it anew."""

    modules = ("agents",)
    packages = ("openai-agents",)
    durable = True

    async def open(self) -> None:
        from agents import (
            Agent,
            OpenAIResponsesModel,
            SQLiteSession,
            function_tool,
            set_tracing_disabled,
        )

        set_tracing_disabled(True)
        self.client = self.make_openai_client()
        model = OpenAIResponsesModel("practice", openai_client=self.client)
        tools = [function_tool(add)]
        self.agent = Agent(name="a", instructions=INSTRUCTIONS, model=model, tools=tools)
        self.session = SQLiteSession("t", Path(self.folder) / "session.sqlite3")

    async def close(self) -> None:
        self.session.close()
        await self.client.close()

    async def changed(self) -> None:
        await self.session.clear_session()
        await self.session.add_items(self.history)

    def make_user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    async def send(self, text: str) -> str:
        from agents import Runner

        result = await Runner.run(self.agent, text, session=self.session)
        self._add(text, result)
        return result.final_output

    async def stream(self, text: str) -> None:
        from agents import Runner

        result = Runner.run_streamed(self.agent, text, session=self.session)
        async for _ in result.stream_events():
            pass
        self._add(text, result)

    def _add(self, text: str, result: Any) -> None:
        new = [item.to_input_item() for item in result.new_items]
        self.turns.append([self.make_user(text), *new])

    def dump(self) -> str:
        return json.dumps(self.turns)

    def load(self, text: str) -> None:
        self.turns = json.loads(text)


PEER = OpenAIAgentsPeer
