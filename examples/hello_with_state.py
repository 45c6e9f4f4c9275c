"""Chat with state over two processes: each run sends one message and continues the conversation.

    python examples/hello_with_state.py hello.state "My name is Ada."
    python examples/hello_with_state.py hello.state "What is my name?"

The first argument is the state file, the second the message. Set KEDGE_MODEL to use another model than the
built-in one, whose server stops with the process, so that every run sends everything.
"""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from kedge import Chat, Turn, run_sync, system, user


def main(file: Path, text: str) -> None:
    """Send a message and store the new state."""
    chat = Chat(os.environ.get("KEDGE_MODEL", "practice"))
    state = file.read_bytes() if file.exists() else None
    if state is None:
        # Events are added without a request; the model sees them with the next message.
        state = chat.write_state(None, Turn([user("Ada has checked in at the harbour.")]))
    # Leading system text is sent with each call and never stored, so it may change every time.
    now = system(f"Today is {datetime.now(UTC):%A}. Be brief.")
    answer = run_sync(chat.chat_with_state(state, now, user(text)))
    print(answer.text)
    if answer.plan:
        print(answer.plan.explain())
    file.write_bytes(answer.state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
