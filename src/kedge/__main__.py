"""Run the ``kedge`` command with ``python -m kedge``."""

from kedge.cli import main

if __name__ == "__main__":
    main()
