"""KV blocks between a GPU and pinned host memory, without stopping either the host or, as long as there is staging room, the
stream that computes. Blocks go through staging buffers on the device: a kernel gathers them there (terabytes a second), so that
the pool's blocks may be overwritten by the very next launch, while the slow copy to the host goes on beside the steps.

    compute    gather ──▶ step n ─────────▶ step n+1 ...                        scatter ──▶ step m
                  │ staging                                                      ▲ staging
    side          └─────▶ to the host ─────────────▶      from the host ─────────┘

Two rings of staging pieces, one each way. A piece is used again once its last blocks have left it; until then the stream that has
to wait waits. The side stream runs its copies in order, so a host block is read after the copy that filled it.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from fairlane.kernels.copy_blocks import gather_blocks, scatter_blocks
from fairlane.worker.errors import ModelLoadError
from fairlane.worker.host_cache import Pairs, check_pairs
from fairlane.worker.kv_cache import KVCache
from fairlane.worker.side_stream import SideStream
from fairlane.worker.upload import to_device

log = logging.getLogger("fairlane.worker")

_PIECE_BYTES = 32 << 20  # 16 blocks of 2 MiB: large enough for full bandwidth, small enough to fill one and drain another
_PIECES_OUT = 8  # 256 MiB leave the pool at once, a sequence of 2000 tokens of an 8B model; more waits for the bus
_PIECES_IN = 2  # one is filled while the other is scattered


class PinnedBlocks:
    """pool [num_blocks, *shape] in host memory, pinned while this object lives. torch's own allocator of pinned memory would
    round it up to a power of two."""

    def __init__(self, num_blocks: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """For `device`; only a GPU needs pinning. Raises ModelLoadError if the system does not pin that much."""
        self.pool = torch.empty((num_blocks, *shape), dtype=dtype)
        if num_blocks and device.type == "cuda":
            self._pin()

    def _pin(self) -> None:
        address, size, started = self.pool.data_ptr(), self.pool.nbytes, time.monotonic()
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]
        if error:
            raise ModelLoadError(f"host_kv_cache: CUDA cannot pin {size >> 20}MiB of host memory (error {error}); set it to less")
        weakref.finalize(self, _unpin, self.pool).atexit = False
        log.info("pinned %d MiB of host memory in %.1f s", size >> 20, time.monotonic() - started)


def _unpin(pool: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(pool.data_ptr())  # type: ignore[no-untyped-call]


class _Ring:
    """Staging pieces, used in turn. rows: blocks of a piece."""

    def __init__(self, num_pieces: int, rows: int, cache: KVCache, side: SideStream) -> None:
        shape = (num_pieces, rows, *cache.pool.shape[1:])
        staging = torch.empty(shape, dtype=cache.pool.dtype, device=cache.pool.device)
        self._pieces = [(piece, side.mark()) for piece in staging]
        self._next = 0

    def take(self) -> tuple[Tensor, torch.cuda.Event]:
        """The next piece [rows, ...], and the mark after which nobody uses it any more."""
        piece = self._pieces[self._next]
        self._next = (self._next + 1) % len(self._pieces)
        return piece


class CudaHostCache:
    """A HostCache. Its calls must come from the stream that the steps run on."""

    def __init__(self, cache: KVCache, host: PinnedBlocks, side: SideStream, piece_bytes: int = _PIECE_BYTES) -> None:
        self._cache = cache
        self._host = host
        self._side = side
        block_bytes = cache.pool[0].nbytes
        self._rows = min(max(1, piece_bytes // block_bytes), self.num_blocks)
        self._out = _Ring(_PIECES_OUT, self._rows, cache, side)
        self._in = _Ring(_PIECES_IN, self._rows, cache, side)
        self._arrived = side.mark()

    @property
    def num_blocks(self) -> int:
        return len(self._host.pool)

    def swap_out(self, pairs: Pairs) -> None:
        side, pool = self._side, self._cache.pool
        for ids, hosts in self._in_pieces([device for device, _ in pairs], [host for _, host in pairs]):
            piece, emptied = self._out.take()
            side.hold_compute(emptied)
            gather_blocks(pool, ids, piece[: len(hosts)])
            side.record_compute(emptied)
            side.wait(emptied)
            side.copy([(self._host.pool[host], piece[row]) for row, host in runs(hosts)])
            side.record(emptied)

    def swap_in(self, pairs: Pairs) -> None:
        side, pool = self._side, self._cache.pool
        for ids, hosts in self._in_pieces([device for _, device in pairs], [host for host, _ in pairs]):
            piece, emptied = self._in.take()
            side.wait(emptied)
            side.copy([(piece[row], self._host.pool[host]) for row, host in runs(hosts)])
            side.record(self._arrived)
            side.hold_compute(self._arrived)
            scatter_blocks(pool, ids, piece[: len(hosts)])
            side.record_compute(emptied)

    def _in_pieces(self, devices: list[int], hosts: list[int]) -> Iterator[tuple[Tensor, list[int]]]:
        """Device block ids int64 on the device and host block ids, as many at a time as a piece holds."""
        if not devices:
            return
        check_pairs(devices, hosts, self._cache, self.num_blocks)
        ids = to_device(torch.tensor(devices, dtype=torch.int64), self._cache.pool.device)
        for start in range(0, len(hosts), self._rows):
            yield ids[start : start + self._rows], hosts[start : start + self._rows]


def runs(hosts: list[int]) -> list[tuple[slice, slice]]:
    """(rows of a piece, host blocks) of each run of neighbours: each is one copy."""
    found: list[tuple[slice, slice]] = []
    start = 0
    for end in range(1, len(hosts) + 1):
        if end == len(hosts) or hosts[end] != hosts[end - 1] + 1:
            found.append((slice(start, end), slice(hosts[start], hosts[end - 1] + 1)))
            start = end
    return found
