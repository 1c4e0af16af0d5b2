"""Tokens to text to stop strings: for every split of every output, what is delivered equals the full decode cut at the first
stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from fairlane.gateway.detokenizer import MAX_HELD_TOKENS, Detokenizer
from fairlane.gateway.output_text import OutputText
from fairlane.gateway.stop_strings import StopStrings


def trained_tokenizer() -> Tokenizer:
    """Byte-level BPE with some merges across words and characters, and one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(["the END of the end", "naïve café ends", "ab abc abcabc aabb"] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


TOKENIZER = trained_tokenizer()
VOCAB = TOKENIZER.get_vocab_size()
SPECIAL = TOKENIZER.token_to_id("<|end|>")

alphabet = st.sampled_from("abcEND é")
stops = st.lists(st.text(alphabet, min_size=1, max_size=4), max_size=4)


def cut(text: str, stop: list[str]) -> str:
    """The oracle: the text before the earliest match of any stop string."""
    starts = [at for at in (text.find(s) for s in stop) if at != -1]
    return text[: min(starts)] if starts else text


def delivered(text: list[str], stop: list[str]) -> tuple[str, str | None]:
    matcher, out = StopStrings(stop), ""
    for piece in text:
        result = matcher.push(piece)
        out += result.text
        if result.matched is not None:
            return out, result.matched
    last = matcher.finish()
    return out + last.text, last.matched


@given(st.lists(st.text(alphabet, max_size=5), max_size=12), stops)
def test_any_split_delivers_the_text_before_the_earliest_match(pieces: list[str], stop: list[str]) -> None:
    text = "".join(pieces)
    out, matched = delivered(pieces, stop)
    assert out == cut(text, stop)
    assert (matched is None) == (out == text and not any(s in text for s in stop))
    assert matched is None or text.startswith(matched, len(out))


@given(st.lists(st.text(alphabet, max_size=5), max_size=12), stops)
def test_no_more_is_held_back_than_could_begin_a_stop_string(pieces: list[str], stop: list[str]) -> None:
    matcher, text, out = StopStrings(stop), "", ""
    for piece in pieces:
        text += piece
        result = matcher.push(piece)
        out += result.text
        if result.matched is not None:
            return
        held = text[len(out) :]
        assert held == "" or any(s.startswith(held[: len(s)]) for s in stop)
        assert len(held) < max(map(len, stop), default=1) * 2


def test_a_longer_stop_string_that_began_earlier_wins_over_a_shorter_one_inside_it() -> None:
    assert delivered(list("xabcdy"), ["bc", "abcd"]) == ("x", "abcd")
    assert delivered(list("xabcey"), ["bc", "abcd"]) == ("xa", "bc")


@given(st.lists(st.integers(0, VOCAB - 1), max_size=40), stops)
def test_token_by_token_equals_the_full_decode_cut_at_the_first_stop(ids: list[int], stop: list[str]) -> None:
    output, pieces = OutputText(TOKENIZER, stop, frozenset()), []
    for token_id in ids:
        result = output.push(token_id)
        pieces.append(result.text)
        if result.matched is not None:
            break
    else:
        pieces.append(output.finish().text)
    assert "".join(pieces) == cut(TOKENIZER.decode(ids, skip_special_tokens=True), stop)


@given(st.text(max_size=30))
def test_text_survives_encoding_and_token_by_token_decoding(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    pieces = [detokenizer.push(token_id) for token_id in ids]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == text


def test_a_piece_never_holds_half_a_character() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(TOKENIZER.token_to_id(char)) for char in "ðŁĺĢ"]  # the four bytes of one emoji
    assert pieces == ["", "", "", "😀"]


def test_the_tail_that_never_became_a_character_is_flushed_once() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(TOKENIZER.token_to_id("ð")) == ""
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")


def test_an_endless_undecodable_run_is_not_held_for_ever() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    continuation = TOKENIZER.token_to_id("Ģ")  # byte 0x80
    pieces = [detokenizer.push(continuation) for _ in range(MAX_HELD_TOKENS + 1)]
    assert pieces[-1] == "\ufffd" * (MAX_HELD_TOKENS + 1)


def test_ids_of_a_padded_vocabulary_have_no_text_and_negative_ones_are_refused() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(VOCAB + 5) == ""
    with pytest.raises(ValueError, match="negative"):
        detokenizer.push(-1)


def test_stop_tokens_and_special_tokens_have_no_text() -> None:
    letter = TOKENIZER.token_to_id("b")
    output = OutputText(TOKENIZER, [], frozenset([letter]))
    texts = [output.push(TOKENIZER.token_to_id("a")).text, output.push(SPECIAL).text, output.push(letter).text]
    assert [*texts, output.finish().text] == ["a", "", "", ""]


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = OutputText(None, [], frozenset())
    assert (output.push(5).text, output.finish().text) == ("", "")
