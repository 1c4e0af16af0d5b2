"""What this GPU can do at best, measured in the process that measures the kernels: copying, reading, multiplying matrices, and
moving pinned memory over the bus."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from gpu_timing import Call, Timer
from kernel_case import World
from torch import Tensor

from fairlane.bench.results import nvidia_smi

BLOCK_BYTES = 2 << 20  # one KV block of 16 tokens of an 8B model, all layers


@dataclass(frozen=True)
class Ceilings:
    """*_block: in copies of 2 MiB, host and device blocks shuffled. sm_clock_mhz: under load; 0 where nobody says."""

    copy_tbs: float
    read_tbs: float
    matmul_tflops: float
    h2d_gbs: float
    d2h_gbs: float
    h2d_block_gbs: float
    d2h_block_gbs: float
    sm_clock_mhz: float

    def rows(self) -> list[dict[str, object]]:
        named = (
            ("copy, bytes read and written", self.copy_tbs, "TB/s"),
            ("read", self.read_tbs, "TB/s"),
            ("product of 8192^3", self.matmul_tflops, "TFLOP/s"),
            ("pinned host to device", self.h2d_gbs, "GB/s"),
            ("pinned device to host", self.d2h_gbs, "GB/s"),
            ("pinned host to device, 2 MiB each", self.h2d_block_gbs, "GB/s"),
            ("pinned device to host, 2 MiB each", self.d2h_block_gbs, "GB/s"),
            ("clock of the SMs under that product", self.sm_clock_mhz, "MHz"),
        )
        return [{"kind": "ceiling", "what": what, "measured": measured, "unit": unit} for what, measured, unit in named]


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(x, out, TILE: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    at = x + program.to(tl.int64) * (ROUNDS * TILE) + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for turn in tl.static_range(ROUNDS):
        total += tl.load(at + turn * TILE).to(tl.float32)
    tl.store(out + program, tl.sum(total, 0))


def measure_ceilings(world: World, timer: Timer) -> Ceilings:
    """Takes about three seconds on a large GPU."""
    tflops, clock = _matmul_tflops(world, timer)
    copy_tbs, read_tbs = _memory_tbs(world, timer)
    h2d, d2h, h2d_block, d2h_block = _bus_gbs(world, timer)
    return Ceilings(copy_tbs, read_tbs, tflops, h2d, d2h, h2d_block, d2h_block, clock)


def _matmul_tflops(world: World, timer: Timer) -> tuple[float, float]:
    """And the clock of the SMs under that load, in MHz."""
    n = 64 if world.tiny else 8192
    a, b = (world.normal(n, n) for _ in range(2))
    c = torch.empty_like(a)
    timing = timer.time([lambda: torch.mm(a, b, out=c)], warm=True)
    for _ in range(0 if world.tiny else 400):  # over half a second, the clock is read meanwhile
        torch.mm(a, b, out=c)
    told = nvidia_smi("clocks.sm")
    world.synchronize()
    return 2 * n**3 / timing.p50_us / 1e6, float(told[0]) if told and told[0].isdigit() else 0.0


def _memory_tbs(world: World, timer: Timer) -> tuple[float, float]:
    tile, rounds = (256, 2) if world.tiny else (8192, 4)
    programs = 4 if world.tiny else (1 << 30) // (tile * rounds)
    source = world.normal(programs * rounds * tile)
    target = torch.empty_like(source)
    sums = torch.empty(programs, dtype=torch.float32, device=world.device)
    size = source.numel() * source.element_size()
    # Not copy_(): in a graph that is a copy by the DMA engine, which is slower than a kernel here.
    copied = timer.time([lambda: torch.mul(source, 1, out=target)], bytes_per_call=size)
    read = timer.time(
        [lambda: _read_kernel[(programs,)](source, sums, TILE=tile, ROUNDS=rounds, num_warps=8)], bytes_per_call=size
    )
    return 2 * size / copied.p50_us / 1e6, size / read.p50_us / 1e6


def _bus_gbs(world: World, timer: Timer) -> tuple[float, float, float, float]:
    """GB/s: host to device and device to host in one copy, then the same in blocks."""
    blocks = 4 if world.tiny else 256
    shape = (blocks, 1024 if world.tiny else BLOCK_BYTES)
    host = torch.ones(shape, dtype=torch.uint8, pin_memory=world.device.type == "cuda")
    device = torch.ones(shape, dtype=torch.uint8, device=world.device)
    order = torch.randperm(blocks).tolist()

    def rate(call: Call) -> float:
        return host.numel() / timer.time_eager(call).p50_us / 1e3

    def in_blocks(target: Tensor, source: Tensor) -> None:
        for at, block in enumerate(order):
            target[block].copy_(source[at], non_blocking=True)

    return (
        rate(lambda: device.copy_(host, non_blocking=True)),
        rate(lambda: host.copy_(device, non_blocking=True)),
        rate(lambda: in_blocks(device, host)),
        rate(lambda: in_blocks(host, device)),
    )
