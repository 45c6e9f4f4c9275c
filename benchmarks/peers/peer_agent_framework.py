"""agent-framework with its session, which continues the last response until the history is changed."""

# pyright: reportMissingImports=false

import json
from typing import Any

from history import INSTRUCTIONS, Peer, add


class AgentFrameworkPeer(Peer):
    """A session of the service; after a change, a new session gets the complete history."""

    modules = ("agent_framework", "agent_framework.openai")
    packages = ("agent-framework-core", "agent-framework-openai")

    async def open(self) -> None:
        from agent_framework import Agent
        from agent_framework.openai import OpenAIChatClient

        self.client = self.make_openai_client()
        chat = OpenAIChatClient(model="practice", async_client=self.client)
        self.agent: Any = Agent(client=chat, instructions=INSTRUCTIONS, tools=[add])
        self.session: Any = None

    async def close(self) -> None:
        await self.client.close()

    async def changed(self) -> None:
        self.session = None

    def make_user(self, text: str) -> Any:
        from agent_framework import Message

        return Message("user", [text])

    async def _run(self, text: str, read: Any) -> str:
        message = self.make_user(text)
        before = self.session and self.session.to_dict()
        new = [message]
        if self.chained or self.session is None:
            new = [*self.history, message]
            self.session = self.agent.create_session()
        try:
            response = await read(new)
        except Exception:
            from agent_framework import AgentSession

            self.session = before and AgentSession.from_dict(before)
            raise
        if self.chained:
            self.session = None
        self.turns.append([message, *response.messages])
        return response.text

    async def send(self, text: str) -> str:
        async def read(new: list[Any]) -> Any:
            return await self.agent.run(new, session=self.session)

        return await self._run(text, read)

    async def stream(self, text: str) -> None:
        async def read(new: list[Any]) -> Any:
            updates = self.agent.run(new, session=self.session, stream=True)
            async for _ in updates:
                pass
            return await updates.get_final_response()

        await self._run(text, read)

    async def restart(self) -> None:
        from agent_framework import AgentSession

        saved = self.session and json.dumps(self.session.to_dict())
        turns = json.dumps([[message.to_dict() for message in turn] for turn in self.turns])
        await self.close()
        await self.open()
        self.load(turns)
        self.session = saved and AgentSession.from_dict(json.loads(saved))

    def load(self, text: str) -> None:
        from agent_framework import Message

        self.turns = [[Message.from_dict(each) for each in turn] for turn in json.loads(text)]


PEER = AgentFrameworkPeer
