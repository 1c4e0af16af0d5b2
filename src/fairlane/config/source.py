"""From a file to a tree of nodes with positions. This is the gate: size, encoding, depth, aliases, tags and second documents
are refused on the event stream, before anything is constructed. It knows nothing of schemas."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fairlane.errors import ConfigError
from fairlane.wording import echo

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 100_000
# Nobody reads more, and each costs time.
MAX_FINDINGS = 50

# Where in a file: ("tenants", "docs-api", "keys", 0).
Where = tuple[str | int, ...]

# PyYAML's own parser looks far ahead at brackets opened in a row and needs quadratic time for them: 5,000 cost 0.2 s.
_OPENED_IN_A_ROW = re.compile(rf"(?:[\[{{][ \t\r\n]*){{{MAX_DEPTH}}}[\[{{]")
# What YAML forbids in a stream (c-printable, without NUL, which has its own message).
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PLAIN_PART = re.compile(r"[A-Za-z0-9_./:-]+")


class UnreadableFile(ConfigError):
    """There is no text to check: missing, not a regular file, or not allowed to be read."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A position, counted from 1 as editors do."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Scalar:
    """`plain` is false for quoted and block texts, which are never numbers, booleans or null."""

    text: str
    plain: bool
    mark: Mark


@dataclass(frozen=True, slots=True)
class Items:
    items: list[Node]
    mark: Mark


@dataclass(frozen=True, slots=True)
class Entries:
    """A mapping in file order, without its repeated keys."""

    entries: dict[str, Entry]
    mark: Mark


@dataclass(frozen=True, slots=True)
class Entry:
    mark: Mark
    value: Node


Node = Scalar | Items | Entries


def dotted(path: Where) -> str:
    """`tenants.docs-api.keys[0]`."""
    out = ""
    for part in path:
        if isinstance(part, int):
            out += f"[{part}]"
            continue
        plain = _PLAIN_PART.fullmatch(part) and not part.startswith("fl_") and len(part) <= 64
        out += ("." if out else "") + (part if plain else echo(part))
    return out


def in_order(findings: list[tuple[Mark, str]]) -> list[str]:
    """The findings in the order of the file: the first MAX_FINDINGS, and how many more there are."""
    texts = [text for _, text in sorted(findings, key=lambda item: (item[0].line, item[0].column))]
    return texts if len(texts) <= MAX_FINDINGS else [*texts[:MAX_FINDINGS], f"... and {len(texts) - MAX_FINDINGS} more"]


def finding(name: str, mark: Mark | None, path: Where, message: str) -> str:
    """One line of a ConfigError: `name:line:col: path: message`, without the parts that are not known."""
    where = f"{name}:{mark}" if mark else name
    return f"{where}: {dotted(path)}: {message}" if path else f"{where}: {message}"


def read_file(path: str | Path) -> bytes:
    """The bytes of a regular file, at most MAX_BYTES + 1 of them. Raises UnreadableFile with one line.

    A pipe or a device is refused without waiting for it.
    """
    try:
        # O_NONBLOCK: opening a FIFO without a writer must not hang.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnreadableFile([f"{path}: is not a regular file"])
            return file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise UnreadableFile([f"{path}: is a directory, not a file"]) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UnreadableFile([f"{path}: cannot be read: {reason}"]) from None


def parse(text: bytes, name: str) -> tuple[Node, list[tuple[Mark, str]]]:
    """The one document in `text`, and a finding for each repeated key (of which the first counts).

    Raises ConfigError; nothing is constructed from a text that the gate refuses.
    """
    decoded = _decode(text, name)
    builder = _Builder(name)
    try:
        # The pure parser, not libyaml's: its messages say more, and are the same on every machine.
        for event in yaml.parse(decoded, Loader=yaml.SafeLoader):
            builder.feed(event)
    except yaml.MarkedYAMLError as error:
        raise ConfigError([*in_order(builder.findings), _syntax_finding(name, error)]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([*in_order(builder.findings), f"{name}: is not YAML: {type(error).__name__}"]) from None
    return builder.finish()


def _decode(text: bytes, name: str) -> str:
    if len(text) > MAX_BYTES:
        raise ConfigError([f"{name}: is larger than 1 MiB: at most {MAX_BYTES} bytes"])
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        mark = _mark_at(text[: error.start].decode("utf-8-sig", "replace"))
        raise ConfigError([f"{name}:{mark}: is not UTF-8: byte 0x{text[error.start]:02x}; save the file as UTF-8"]) from None
    bad = _UNPRINTABLE.search(decoded)
    if bad:
        what = "a NUL byte" if bad[0] == "\0" else f"the control character U+{ord(bad[0]):04X}"
        raise ConfigError([f"{name}:{_mark_at(decoded[: bad.start()])}: contains {what}: only printable text is allowed"])
    deep = _OPENED_IN_A_ROW.search(decoded)
    if deep:
        mark = _mark_at(decoded[: deep.end() - 1])
        raise ConfigError([f"{name}:{mark}: is nested too deeply: at most {MAX_DEPTH} levels"])
    return decoded


def _mark_at(before: str) -> Mark:
    return Mark(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)


def _mark_of(event: yaml.Event) -> Mark:
    start: Any = event.start_mark
    return Mark(start.line + 1, start.column + 1)


def _syntax_finding(name: str, error: yaml.MarkedYAMLError) -> str:
    problem = (error.problem or "syntax error").replace("'\\t'", "a tab")
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    if "cannot start any token" in problem:
        problem += " (indent with spaces, quote texts that begin with a special character)"
    context = ""
    if error.context and error.context_mark and error.context_mark is not mark:
        context = f" {error.context} that starts at {error.context_mark.line + 1}:{error.context_mark.column + 1}"
    return f"{where}: is not YAML: {problem}{context}"


class _Open:
    """A mapping or sequence whose end has not come yet."""

    __slots__ = ("key", "node", "path", "seen")

    def __init__(self, node: Items | Entries, path: Where) -> None:
        self.node = node
        self.path = path
        self.key: tuple[str, Mark] | None = None
        self.seen: dict[str, Mark] = {}

    def child_path(self) -> Where:
        if isinstance(self.node, Items):
            return (*self.path, len(self.node.items))
        return (*self.path, self.key[0]) if self.key else self.path


class _Builder:
    """Builds the tree from events and refuses what the gate refuses. A structural danger ends it at once; repeated keys
    are collected, so that all are reported together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.findings: list[tuple[Mark, str]] = []
        self._stack: list[_Open] = []
        self._root: Node | None = None
        self._documents = 0
        self._nodes = 0

    def feed(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                self._refuse(event, "a second document starts here: one document per file")
        elif isinstance(event, yaml.NodeEvent):
            self._feed_node(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._stack.pop()

    def finish(self) -> tuple[Node, list[tuple[Mark, str]]]:
        if self._root is None:
            raise ConfigError([f"{self.name}:1:1: is empty: a mapping is needed"])
        return self._root, self.findings

    def _feed_node(self, event: yaml.NodeEvent) -> None:
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._refuse(event, "anchors and aliases (&, *) are not allowed: write the value out")
        if getattr(event, "tag", None) is not None:
            self._refuse(event, "tags (!) are not allowed: quote the text if it begins with !")
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._refuse(event, f"too many values: at most {MAX_NODES}")
        mark = _mark_of(event)
        if isinstance(event, yaml.ScalarEvent):
            if _UNPRINTABLE.search(event.value):  # written as an escape, such as "\x00"
                self._refuse(event, "contains a control character: only printable text is allowed")
            self._place(Scalar(event.value, event.implicit[0], mark))
            return
        node = Items([], mark) if isinstance(event, yaml.SequenceStartEvent) else Entries({}, mark)
        path = self._stack[-1].child_path() if self._stack else ()
        self._place(node)
        self._stack.append(_Open(node, path))
        if len(self._stack) > MAX_DEPTH:
            self._refuse(event, f"is nested too deeply: at most {MAX_DEPTH} levels")

    def _place(self, node: Node) -> None:
        if not self._stack:
            self._root = node
            return
        top = self._stack[-1]
        if isinstance(top.node, Items):
            top.node.items.append(node)
        elif top.key is None:
            self._take_key(top, node)
        else:
            key, mark = top.key
            top.key = None
            top.node.entries.setdefault(key, Entry(mark, node))

    def _take_key(self, top: _Open, node: Node) -> None:
        if not isinstance(node, Scalar):
            message = finding(self.name, node.mark, top.path, "a key must be a text, not a list or mapping")
            raise ConfigError([*in_order(self.findings), message])
        first = top.seen.setdefault(node.text, node.mark)
        if first is not node.mark and len(self.findings) < MAX_FINDINGS:
            message = f"duplicate key: it is already given at {first}"
            self.findings.append((node.mark, finding(self.name, node.mark, (*top.path, node.text), message)))
        top.key = (node.text, node.mark)

    def _refuse(self, event: yaml.Event, message: str) -> None:
        mark = _mark_of(event)
        path = self._stack[-1].child_path() if self._stack else ()
        # A path 33 levels long helps nobody.
        raise ConfigError([*in_order(self.findings), finding(self.name, mark, path if len(path) <= 8 else (), message)])
