"""How long something is, on the command line."""

from __future__ import annotations

import re

from fairlane.cli.exits import USAGE, stop

_DURATION = re.compile(r"([0-9]{1,9})(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(option: str, text: str) -> int:
    """30m -> 1800. Ends the command for anything that is no time, and for none at all."""
    match = _DURATION.fullmatch(text)
    if match is None or not int(match[1]):
        stop(USAGE, f"{option} {text}: a time such as 90s, 30m, 12h or 2d is needed")
    return int(match[1]) * _SECONDS[match[2]]
