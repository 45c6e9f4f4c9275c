r"""Cutting a text so that tiktoken can count any length of it.

tiktoken first splits a text by a regular expression, and that expression's ``\s+(?!\S)`` needs a
stack entry for every character: a run of a million spaces overflows it, as a panic that even
``except Exception`` does not see. (Long runs of letters, once quadratic, are fine since tiktoken
0.13.) So very long runs of blanks, and only those, are counted apart.

Where a run is cut out of its text the count stays exact: a run without line breaks starts a new
piece of the expression, and ends one just before its last character (which belongs to the word
that follows) or at the end of the text. Inside the run the count is exact when it is one character
repeated, because tokens of blanks are powers of two long and the cuts fall on multiples of them.
A run of mixed blanks may come out a token or two too high at each cut.
"""

import re
from collections.abc import Iterator

LONGEST_RUN = 100_000
CUT = 65_536
# Blanks as the expression of tiktoken sees them: Python's \s also holds the separators 1c to 1f.
_BLANK = r"[^\S\r\n\x1c-\x1f]"


def long_run(length: int) -> re.Pattern[str]:
    """Match a whole run of at least this many blanks, unless a line break ends it."""
    return re.compile(rf"(?<!{_BLANK}){_BLANK}{{{length},}}+(?![\r\n])")


_LONG_RUN = long_run(LONGEST_RUN)


def pieces(text: str) -> Iterator[str]:
    """Cut the text into parts whose counts add up to its own; nearly always there is one."""
    start = 0
    if len(text) >= LONGEST_RUN:
        for run in _LONG_RUN.finditer(text):
            stop = run.end() if run.end() == len(text) else run.end() - 1
            yield text[start : run.start()]
            for at in range(run.start(), stop, CUT):
                yield text[at : min(at + CUT, stop)]
            start = stop
    yield text[start:] if start else text
