"""pydantic-ai with ``message_history``, chained by its own setting."""

# pyright: reportMissingImports=false

from dataclasses import replace
from typing import Any

from history import INSTRUCTIONS, Peer, add


class PydanticAIPeer(Peer):
    """``openai_previous_response_id="auto"``; under ``kedge.chain`` it replays instead."""

    modules = ("pydantic_ai", "pydantic_ai.models.openai")
    packages = ("pydantic-ai-slim", "openai")

    async def open(self) -> None:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        self.client = self.make_openai_client()
        provider = OpenAIProvider(openai_client=self.client)
        settings: Any = {} if self.chained else {"openai_previous_response_id": "auto"}
        model = OpenAIResponsesModel("practice", provider=provider)
        self.agent = Agent(model, tools=[add], instructions=INSTRUCTIONS, model_settings=settings)

    async def close(self) -> None:
        await self.client.close()

    def make_user(self, text: str) -> Any:
        from pydantic_ai.messages import ModelRequest, UserPromptPart

        return ModelRequest(parts=[UserPromptPart(content=text)])

    def with_text(self, turn: list[Any], text: str) -> list[Any]:
        from pydantic_ai.messages import UserPromptPart

        parts = [
            replace(part, content=text) if isinstance(part, UserPromptPart) else part
            for part in turn[0].parts
        ]
        return [replace(turn[0], parts=parts), *turn[1:]]

    async def send(self, text: str) -> str:
        result = await self.agent.run(text, message_history=self.history or None)
        self.turns.append(result.new_messages())
        return result.output

    async def stream(self, text: str) -> None:
        run = self.agent.run_stream(text, message_history=self.history or None)
        async with run as result:
            async for _ in result.stream_text(delta=True, debounce_by=None):
                pass
        self.turns.append(result.new_messages())

    def dump(self) -> str:
        from pydantic_ai.messages import ModelMessagesTypeAdapter

        texts = [ModelMessagesTypeAdapter.dump_json(turn).decode() for turn in self.turns]
        return "\n".join(texts)

    def load(self, text: str) -> None:
        from pydantic_ai.messages import ModelMessagesTypeAdapter

        self.turns = [ModelMessagesTypeAdapter.validate_json(line) for line in text.splitlines()]


PEER = PydanticAIPeer
