"""Finds the first stop string in a text that arrives in pieces. Decides which text may be shown already and which must be
held back because a stop string may have begun in it; how tokens become text is the detokenizer's business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """`text` may be delivered now. `matched` is the stop string that ended the output, if one did: nothing follows it."""

    text: str
    matched: str | None = None


class StopStrings:
    """Matches a few short stop strings (none empty) across chunk borders.

    The concatenated results equal the whole text cut at the start of the earliest match. Of two matches that start at
    the same place, the one that completes first wins, so the answer does not depend on how the text was split.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        # Shorter first: at one start position the shorter one completes first.
        self._stops = sorted(set(stops), key=len)
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Takes the next piece. After a match, push nothing more."""
        if not self._stops:
            return StopResult(text)
        text = self._held + text
        start, matched = self._first_match(text)
        # A match only counts once no earlier start can still complete: what begins before it may be a longer stop string.
        keep_from = self._possible_start(text)
        if matched is not None and start <= keep_from:
            self._held = ""
            return StopResult(text[:start], matched)
        self._held = text[keep_from:]
        return StopResult(text[:keep_from])

    def finish(self) -> StopResult:
        """The text has ended: what was held back is delivered, up to a match in it."""
        text, self._held = self._held, ""
        start, matched = self._first_match(text)
        return StopResult(text if matched is None else text[:start], matched)

    def _first_match(self, text: str) -> tuple[int, str | None]:
        best, matched = len(text), None
        for stop in self._stops:
            at = text.find(stop, 0, best + len(stop) - 1 if matched is not None else len(text))
            if at != -1 and (matched is None or at < best):
                best, matched = at, stop
        return best, matched

    def _possible_start(self, text: str) -> int:
        """The first position from which the rest of `text` is a proper prefix of some stop string; len(text) if none."""
        longest = len(self._stops[-1]) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) and len(stop) > len(tail) for stop in self._stops):
                return start
        return len(text)
