"""Named ranges for a profiler round the parts of a step: schedule, launch (forward, sample), result. They exist in a worker that
was started with FAIRLANE_NVTX=1; elsewhere they are nothing, and nothing here decides what a step does."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

VARIABLE = "FAIRLANE_NVTX"

_ENABLED = os.environ.get(VARIABLE) == "1"
_NOTHING = nullcontext()


def span(name: str) -> AbstractContextManager[None]:
    """A range on the calling thread, as Nsight shows it. Where ranges are enabled, torch must be built for CUDA."""
    if not _ENABLED:
        return _NOTHING
    from torch.cuda import nvtx

    return nvtx.range(name)
