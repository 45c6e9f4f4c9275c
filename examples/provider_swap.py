"""One conversation with two providers: the second model continues where the first one stopped.

    python examples/provider_swap.py openai:gpt-5.1 anthropic:claude-sonnet-4-5

Without arguments both models are the built-in one.
"""

import sys

from kedge import Turn, connect, user

if __name__ == "__main__":
    first, second = sys.argv[1:] or ("practice", "practice")
    turn = connect(first).sync.run(Turn([user("My name is Ada.")]))
    print(connect(second).sync.ask(turn.append(user("What is my name?"))).text)
