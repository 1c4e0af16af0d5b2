"""Text and conversations to token ids. Special-token spellings inside what users wrote are ordinary
text: only the chat template itself can place a control token. Limits are checked by the callers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer

from fairlane.errors import ConfigError, FairlaneError
from fairlane.gateway.chat_template import ChatTemplate

# Text longer than this per token of the limit is judged by its beginning: English has about 4 characters a token.
_CHARS_PER_TOKEN = 8
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: role is "system", "user" or "assistant"."""

    role: str
    content: str


class PromptEncoder:
    """Encodes prompts for one model. Thread-safe: everything it holds is read-only after construction."""

    def __init__(self, tokenizer_json: str, template: ChatTemplate | None = None) -> None:
        self.tokenizer = _plain(tokenizer_json)
        self._literal = _plain(tokenizer_json)
        self._literal.encode_special_tokens = True  # special spellings are split up like any other text
        self._template = template
        added: Mapping[int, AddedToken] = self.tokenizer.get_added_tokens_decoder()
        self._special = {token.content: (id_, token) for id_, token in added.items() if token.special and token.content}
        # Longest first: regex alternation takes the first that fits, tokenizers the longest.
        spellings = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    def encode_prompt(self, text: str, at_most: int | None = None) -> list[int]:
        """Ids of a plain prompt, with whatever the tokenizer itself puts around a text (a BOS id, say). Of a text that is far
        longer than `at_most` tokens, only the first at_most + 1."""
        return self._beginning(text, at_most) or _encode(self._literal, text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[ChatMessage], at_most: int | None = None) -> list[int]:
        """Ids of the rendered conversation; equal to transformers' `apply_chat_template(add_generation_prompt=True)` unless
        a message spells a special token. With a message far longer than `at_most` tokens, only at_most + 1 of its own.
        Raises NO_CHAT_TEMPLATE, or InvalidRequest if the template refuses."""
        if self._template is None:
            raise FairlaneError("NO_CHAT_TEMPLATE", "this model has no chat template; send `prompt` or `token_ids`")
        for message in messages:
            beginning = self._beginning(message.content, at_most)
            if beginning:
                return beginning
        pattern = self._special_pattern
        if pattern is None or not any(pattern.search(message.content) for message in messages):
            text = self._template.render([{"role": m.role, "content": m.content} for m in messages])
            return _encode(self.tokenizer, text)
        return self._encode_disarmed(messages, self._template, pattern)

    def _beginning(self, text: str, at_most: int | None) -> list[int]:
        """at_most + 1 ids if the beginning of a very long text already has more than at_most; else none. It is cut at white
        space, where tokenizers split anyway, so the rest could not make its tokens fewer."""
        if at_most is None or len(text) <= _CHARS_PER_TOKEN * at_most:
            return []
        window = _CHARS_PER_TOKEN * at_most
        ids = _encode(self._literal, text[: max(text.rfind(" ", 0, window), text.rfind("\n", 0, window)) + 1 or window])
        return ids[: at_most + 1] if len(ids) > at_most else []

    def _encode_disarmed(self, messages: Sequence[ChatMessage], template: ChatTemplate, pattern: re.Pattern[str]) -> list[int]:
        """Renders with every special spelling in a message replaced by a placeholder, so that what is still spelled out
        afterwards is the template's own; those become ids, the runs between them are encoded literally."""
        mark = _unused_character(messages)
        spellings = list(self._special)
        number = {spelling: index for index, spelling in enumerate(spellings)}
        disarmed = [
            {"role": m.role, "content": pattern.sub(lambda match: f"{mark}{number[match[0]]}{mark}", m.content)} for m in messages
        ]
        restore = re.compile(f"{mark}([0-9]+){mark}")
        parts = _split(template.render(disarmed), pattern, self._special)
        texts = [restore.sub(lambda match: spellings[int(match[1])], run) for run, _ in parts]
        ids: list[int] = []
        for encoding, (_, special) in zip(self._literal.encode_batch_fast(texts, add_special_tokens=False), parts, strict=True):
            ids.extend(encoding.ids)
            if special is not None:
                ids.append(special)
        return ids


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    # Only the batch calls release the GIL: `encode` of 1 MiB stops every other thread, the event loop's too, for 0.5-1 s.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _plain(tokenizer_json: str) -> Tokenizer:
    # A tokenizer.json may carry its training-time truncation and padding; a prompt is never cut or padded silently.
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _unused_character(messages: Sequence[ChatMessage]) -> str:
    used = set().union(*(message.content for message in messages))
    return next(chr(point) for point in _PRIVATE_USE if chr(point) not in used)


def _split(text: str, pattern: re.Pattern[str], special: Mapping[str, tuple[int, AddedToken]]) -> list[tuple[str, int | None]]:
    """The runs of `text` and the special id after each; tokens that swallow neighbouring white space do so here too."""
    parts: list[tuple[str, int | None]] = []
    at, strip_left = 0, False
    for match in pattern.finditer(text):
        id_, token = special[match[0]]
        run = text[at : match.start()]
        run = run.lstrip() if strip_left else run
        parts.append((run.rstrip() if token.lstrip else run, id_))
        at, strip_left = match.end(), token.rstrip
    tail = text[at:]
    parts.append((tail.lstrip() if strip_left else tail, None))
    return parts


def load_encoder(model_dir: Path) -> PromptEncoder | None:
    """The encoder of a Hugging Face model folder; None if it has no tokenizer.json. Raises ConfigError for a bad file."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return None
    settings = _json(model_dir / "tokenizer_config.json")
    special = {**_special_tokens(_json(model_dir / "special_tokens_map.json")), **_special_tokens(settings)}
    try:
        source = _template_source(model_dir, settings)
        return PromptEncoder(path.read_text(encoding="utf-8"), None if source is None else ChatTemplate(source, special))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError([f"{model_dir}: chat template, line {error.lineno}: {error.message}"]) from error
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
        raise ConfigError([f"{path}: not a tokenizer this version can load: {error}"]) from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError([f"{path}: not JSON: {error}"]) from error
    return value if isinstance(value, dict) else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _template_source(model_dir: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers; of several named ones, "default"."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None
