"""Search results: excerpts with the matching words marked, and links to their messages."""

import re
from urllib.parse import quote, urlencode

from markupsafe import Markup, escape

from kedge.store import Hit
from kedge.store.search import fold_text
from kedge.web.views import Excerpt

MAX_EXCERPTS = 3
"""The number of excerpts shown for a conversation."""
_WORD = re.compile(r"\w+")
_QUERY_WORD = re.compile(r"(?P<not>(?:-|\bNOT\s+)?)\"?(?P<word>\w+)(?P<prefix>\*?)")
_MARK = Markup("<mark>{}</mark>")


def find_matches(text: str, query: str) -> list[tuple[int, int]]:
    """Return the start and the end of each word of a text that a search looks for."""
    looked_for = [
        (fold_text(found["word"]), bool(found["prefix"]))
        for found in _QUERY_WORD.finditer(query)
        if not found["not"] and found["word"] not in ("OR", "NOT")
    ]
    matches: list[tuple[int, int]] = []
    for found in _WORD.finditer(text):
        word = fold_text(found.group())
        for each, is_prefix in looked_for:
            is_unspaced = not each.isascii() and each in word
            if word == each or is_unspaced or (is_prefix and word.startswith(each)):
                matches.append(found.span())
                break
    return matches


def build_excerpt(hit: Hit, query: str) -> Excerpt:
    """Build the excerpt of a hit."""
    pieces: list[Markup] = []
    end = 0
    for start, stop in find_matches(hit.excerpt, query):
        pieces += [escape(hit.excerpt[end:start]), _MARK.format(hit.excerpt[start:stop])]
        end = stop
    pieces.append(escape(hit.excerpt[end:]))
    where = urlencode({"at": hit.node, "block": hit.block_id})
    url = f"/conversations/{quote(hit.conversation, safe='')}?{where}#{quote(hit.block_id)}"
    return Excerpt(url, hit.kind.replace("_", " "), Markup("").join(pieces))
