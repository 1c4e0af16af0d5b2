"""How much memory this machine has left, and how many KV blocks of it a worker may take for sequences that are swapped out."""

from __future__ import annotations

from pathlib import Path

import torch

from fairlane.worker.errors import ModelLoadError
from fairlane.worker.kv_cache import block_bytes
from fairlane.worker.models.config import ModelConfig

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def num_host_blocks_for(host_kv_cache: int | None, config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Host blocks that so many bytes hold; 0 for None. Raises ModelLoadError if not even one fits into them, or if the machine
    has less memory than that."""
    if host_kv_cache is None:
        return 0
    size = block_bytes(config, block_size, dtype)
    if host_kv_cache < size:
        needed = -(-size >> 20)
        raise ModelLoadError(
            f"host_kv_cache of {host_kv_cache} bytes is too small: a block takes {size} bytes; set at least {needed}MiB"
        )
    available = available_bytes()
    if available is not None and host_kv_cache > available:
        raise ModelLoadError(
            f"host_kv_cache of {host_kv_cache >> 20}MiB is more memory than this machine has left; {available >> 20}MiB fit"
        )
    return host_kv_cache // size


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Memory that can be taken without swapping or a container's limit getting in the way; None where nothing says so."""
    known = [bytes_left for bytes_left in (_of_machine(meminfo), _of_container(cgroup)) if bytes_left is not None]
    return min(known) if known else None


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _of_container(cgroup: Path) -> int | None:
    """What its limit leaves (cgroup v2). Pages of files count as used but are given up on demand."""
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():  # "max"
        return None
    return max(0, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
