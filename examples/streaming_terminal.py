"""A chat in the terminal: answers appear as they are written. End it with Ctrl-D.

    python examples/streaming_terminal.py

Set KEDGE_MODEL to use another model than the built-in one.
"""

import os

from kedge import Chat


def main() -> None:
    """Read messages and print the answers."""
    chat, state = Chat(os.environ.get("KEDGE_MODEL", "practice")), None
    while True:
        try:
            text = input("> ")
        except EOFError:
            break
        with chat.sync.stream_with_state(state, text) as stream:
            for delta in stream.text_deltas():
                print(delta, end="", flush=True)
            state = stream.finish().state
        print()


if __name__ == "__main__":
    main()
