"""Import this before any Triton op: it makes Triton run its kernels in the interpreter, on the CPU. Triton reads the switch when
a kernel is decorated, so it must be set before the op's module is imported."""

from __future__ import annotations

import os
import sys


def require_interpreter() -> None:
    """Raises RuntimeError when Triton was imported without the interpreter already: its kernels would want a GPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        if "triton" in sys.modules:
            raise RuntimeError("triton was imported before the interpreter was asked for")
        os.environ["TRITON_INTERPRET"] = "1"


require_interpreter()
