"""How a request ended, as one word: for metrics and for the recorded trace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fairlane.errors import FairlaneError
from fairlane.protos.fairlane.v1 import inference_pb2

# How a request ends when its client cancels the call or goes away; all other failures have a reason of errors.REASONS.
CLIENT_GONE = "CLIENT_GONE"
_FINISHED = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}


def finish_name(reason: inference_pb2.FinishReason) -> str:
    """Of a request that finished."""
    return _FINISHED.get(reason, "unknown")


@contextmanager
def ending(tell: Callable[[str], None]) -> Iterator[None]:
    """Around everything that is done for one request: tells the reason of every exception it is left by, and lets it pass."""
    try:
        yield
    except asyncio.CancelledError:
        tell(CLIENT_GONE)
        raise
    except FairlaneError as error:
        tell(error.reason)
        raise
    except BaseException:
        tell("INTERNAL")
        raise
