"""What a configuration value may be. A schema is a frozen dataclass whose fields are annotated with these markers:

    port: Annotated[int, Bounds(1, 65535)] = 50051
    drain_grace: Annotated[float, Duration(min_s=0)] = 30.0      # written "30s" in the file, seconds in the program

The loader (strict.py) reads them, and json_schema.py tells editors the same; nothing else interprets them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """A number in [low, high]; None leaves that side open. `low_open` excludes low itself."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False


@dataclass(frozen=True, slots=True)
class Duration:
    """A text like 250ms, 10s, 5m, 1h or 2d; seconds (float) in the program."""

    min_s: float = 0.0
    max_s: float = 366 * 86400.0


@dataclass(frozen=True, slots=True)
class Size:
    """A text like 64KiB or 4MiB; bytes (int) in the program."""

    min_bytes: int = 0
    max_bytes: int = 1 << 40


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number or a text like 100k, 4M; int in the program."""

    low: int = 0
    high: int = 10**15


@dataclass(frozen=True, slots=True)
class Percent:
    """A text like 5% or 12.5%; a fraction (0.05) in the program."""

    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True, slots=True)
class Text:
    """A text matching `pattern` (whole); `what` says so in words for the error message."""

    pattern: str = r"(?s).*"
    what: str = "a text"


@dataclass(frozen=True, slots=True)
class Amount:
    """A part of something (`share`, a fraction) or a number of it (`count`): exactly one of them is set."""

    share: float | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class ShareOrCount:
    """A text like 30%, or a whole number or a text like 100k; an Amount in the program."""

    share: Percent = Percent()
    count: Count = Count(1)


@dataclass(frozen=True, slots=True)
class Doc:
    """What a key is for, in one line, as editors show it. `enforced` is false while it is read and checked but has no effect."""

    text: str
    enforced: bool = True


def planned(text: str) -> Doc:
    """The Doc of a key that is not enforced yet."""
    return Doc(text, enforced=False)
