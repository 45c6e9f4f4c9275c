"""A conversation that continues in the next run: its complete state is a file.

    python examples/memory.py "My name is Ada."
    python examples/memory.py "What is my name?"

Set KEDGE_MODEL to use another model than the built-in one, and KEDGE_STATE to use another file.
"""

import os
import sys
from pathlib import Path

from kedge import Chat

if __name__ == "__main__":
    chat = Chat(os.environ.get("KEDGE_MODEL", "practice"))
    file = Path(os.environ.get("KEDGE_STATE", "memory.state"))
    answer = chat.sync.chat_with_state(file.read_bytes() if file.exists() else None, sys.argv[1])
    file.write_bytes(answer.state)
    print(answer.text)
