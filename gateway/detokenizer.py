"""Turns token ids into text one at a time, never half a character. Decides when text is complete enough to show; which
text ends the output is stop_strings' business."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# A UTF-8 character is at most four bytes, hence four byte-level tokens. A longer undecodable run is not going to become a
# character: it is shown as replacement characters instead of being held (and decoded again) for the rest of the output.
MAX_HELD_TOKENS = 16


class Detokenizer:
    """Text of one output, special tokens left out.

    The concatenated pieces, `flush()` included, equal `tokenizer.decode(all ids, skip_special_tokens=True)` unless more
    than MAX_HELD_TOKENS in a row decode to nothing complete.
    """

    __slots__ = ("_held", "_stream", "_tokenizer", "_vocab_size")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that became complete with this token; often one token's, sometimes "". Ids the tokenizer does not know
        (a model's padded vocabulary) have no text. Raises ValueError for a negative id."""
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        if token_id >= self._vocab_size:
            return ""
        self._held.append(token_id)
        text = self._step(token_id)
        if text is None:
            return self._restart() if len(self._held) > MAX_HELD_TOKENS else ""
        self._held.clear()
        return text

    def flush(self) -> str:
        """The output has ended: the text of the tokens still held back, incomplete characters as U+FFFD."""
        return self._restart() if self._held else ""

    def _step(self, token_id: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001 - the Rust stream has one untyped error: its prefix changed under it (odd byte sequences)
            return self._restart()

    def _restart(self) -> str:
        held, self._held = self._held, []
        self._stream = DecodeStream(skip_special_tokens=True)
        return self._tokenizer.decode(held, skip_special_tokens=True)
