"""The text of one output: tokens in, text out that may be shown, cut at the first stop string. Joins the detokenizer and the
stop-string matcher and knows which tokens have no text; when to send is generation.py's."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from fairlane.gateway.detokenizer import Detokenizer
from fairlane.gateway.stop_strings import StopResult, StopStrings

_NOTHING = StopResult("")


class OutputText:
    """Without a tokenizer every text is empty. A token in `stop_token_ids` ends the output and has no text."""

    __slots__ = ("_detokenizer", "_stop_token_ids", "_stops")

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str], stop_token_ids: frozenset[int]) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(stop)
        self._stop_token_ids = stop_token_ids

    def push(self, token_id: int) -> StopResult:
        """What may be shown once this token has come. After a match, push nothing more."""
        if self._detokenizer is None or token_id in self._stop_token_ids:
            return _NOTHING
        text = self._detokenizer.push(token_id)
        return self._stops.push(text) if text else _NOTHING

    def finish(self) -> StopResult:
        """What was still held back, cut at a stop string that only now is certain."""
        if self._detokenizer is None:
            return _NOTHING
        last = self._stops.push(self._detokenizer.flush())
        if last.matched is not None:
            return last
        rest = self._stops.finish()
        return StopResult(last.text + rest.text, rest.matched)
