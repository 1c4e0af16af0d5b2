"""Programmatic dependent launch, as GPUs from compute capability 9.0 on have it: a kernel may be put on the SMs while the one
before it is still ending, and waits inside for its results. That hides what a launch costs, which counts where a step is hundreds
of kernels of a few microseconds each.

Every kernel of a decode step keeps the same three rules; one that broke them would be a race, in itself or in another:

    it waits before it touches memory that any earlier kernel reads or writes (weights may be read before)
    it lets the next one start when its own loads are over, so that the next one's programs do not take the SMs' room from them
    it is launched with launch_options(), or without: then it starts when all before it has ended, as usual

That an earlier kernel than the last has ended follows from the first rule: the last one has waited for it.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_inputs(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    if DEPENDENT:
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def let_next_start(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    if DEPENDENT:
        gdc_launch_dependents()


MAX_ATTENTION_ROWS = 16  # measured on an H200: up to there attention gains, at 32 and more a step becomes 1 to 3 % slower


def launch_options(device: torch.device) -> dict[str, bool]:
    """What a launch of a kernel that has a DEPENDENT argument is given. Not to be changed: it is shared."""
    return _DEPENDENT if _supported(device) else _ALONE


def attention_options(device: torch.device, num_rows: int) -> dict[str, bool]:
    """The same for the kernels around attention, which takes every SM for itself where rows are many."""
    return launch_options(device) if num_rows <= MAX_ATTENTION_ROWS else _ALONE


_DEPENDENT = {"DEPENDENT": True, "launch_pdl": True}
_ALONE = {"DEPENDENT": False}


@cache
def _supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
