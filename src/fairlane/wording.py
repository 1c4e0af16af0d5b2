"""What somebody wrote, in the message that tells of it: shown safely, and what may have been meant."""

from __future__ import annotations

import difflib

_MAX_ECHO = 24


def echo(text: str) -> str:
    """`text` as an error message may show it: short, escaped, and never anything that could be a key or a password."""
    if len(text) > _MAX_ECHO or text.startswith("fl_"):
        return f"(a text of {len(text)} characters)"
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'


def suggestion(word: str, allowed: list[str], likeness: float = 0.6) -> str:
    """`, did you mean "weight"?` or nothing, if none of `allowed` is at least so alike (0 to 1)."""
    if len(word) > 64 or len(allowed) > 200:
        return ""
    close = difflib.get_close_matches(word, allowed, 1, likeness)
    return f', did you mean "{close[0]}"?' if close else ""
