"""The ``openai`` client, with the id of the last response kept by hand and dropped after every change."""

# pyright: reportMissingImports=false

import json
from typing import Any

from history import INSTRUCTIONS, Peer, add

TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


class OpenAIPeer(Peer):
    """As a careful program uses the SDK: chained on the last response until the history is changed."""

    modules = ("openai",)
    packages = ("openai",)

    async def open(self) -> None:
        self.client = self.make_openai_client()
        self.last: str | None = None

    async def close(self) -> None:
        await self.client.close()

    async def changed(self) -> None:
        self.last = None

    def make_user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def _options(self, turn: list[Any], sent: int) -> Any:
        # Unchanged since the last response: only what is new. Otherwise everything, without an id.
        if self.last is None:
            new: Any = {"input": [*self.history, *turn]}
        else:
            new = {"input": turn[sent:], "previous_response_id": self.last}
        return {"model": "practice", "instructions": INSTRUCTIONS, "tools": [TOOL], **new}

    async def send(self, text: str) -> str:
        turn: list[Any] = [self.make_user(text)]
        sent, before = 0, self.last
        try:
            while True:
                response = await self.client.responses.create(**self._options(turn, sent))
                self.last = None if self.chained else response.id
                turn += [item.model_dump(exclude_none=True) for item in response.output]
                sent = len(turn)
                calls = [item for item in response.output if item.type == "function_call"]
                for call in calls:
                    output = str(add(**json.loads(call.arguments)))
                    result = {"type": "function_call_output", "call_id": call.call_id}
                    turn.append({**result, "output": output})
                if not calls:
                    break
        except Exception:
            self.last = before
            raise
        self.turns.append(turn)
        return response.output_text

    async def stream(self, text: str) -> None:
        turn: list[Any] = [self.make_user(text)]
        async with self.client.responses.stream(**self._options(turn, 0)) as events:
            async for _ in events:
                pass
            response = await events.get_final_response()
        self.last = None if self.chained else response.id
        turn += [item.model_dump(exclude_none=True) for item in response.output]
        self.turns.append(turn)

    def dump(self) -> str:
        return json.dumps(self.turns)

    def load(self, text: str) -> None:
        self.turns = json.loads(text)


PEER = OpenAIPeer
