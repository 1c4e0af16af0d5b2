"""What the kernels are judged by on one H200: times to reach (median, cold L2 cache, shuffled blocks, graph replays) and the best
published figures that they follow from, with their sources. It judges nothing itself.

TileOPs: tile-ai/TileOPs, nightly run of 2026-08-22 on an H200 and pull request 2136; its best decode kernels read contiguous KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Unit(Enum):
    US = "us"
    TFLOPS = "TFLOP/s"
    SHARE = "% of ceiling"


@dataclass(frozen=True)
class Target:
    """accept, good and the published reference in `unit`; good is None where accept is all that is asked, reference where nothing
    is published."""

    accept: float
    good: float | None = None
    reference: float | None = None
    source: str = ""
    unit: Unit = Unit.US

    def verdict(self, us: float, tflops: float, share: float) -> str:
        """good, accept or FAIL."""
        measured = {Unit.US: -us, Unit.TFLOPS: tflops, Unit.SHARE: share}[self.unit]
        sign = -1.0 if self.unit is Unit.US else 1.0
        if self.good is not None and measured >= sign * self.good:
            return "good"
        return "accept" if measured >= sign * self.accept else "FAIL"

    def reference_us(self, flops: float) -> float | None:
        if self.reference is None or self.unit is Unit.SHARE:
            return None
        return self.reference if self.unit is Unit.US else flops / self.reference / 1e6


_VLLM = "vllm#43232"

# 32 query heads, 8 KV heads (MHA: 32), head_dim 128, bfloat16.
DECODE = {
    "1x1k": Target(12, 9, 11.0, f"{_VLLM}, FA3"),
    "1x8k": Target(22, 18, 18.0, "TileOPs, 1x16k with 4 KV heads: the same bytes"),
    "1x32k": Target(48, 42, 43.5, f"{_VLLM}, FA3"),
    "1x128k": Target(160, 142, 136.5, "TileOPs, 1x256k with 4 KV heads: the same bytes"),
    "8x1k": Target(20, 16.5, 16.3, f"{_VLLM}, FlashInfer XQA"),
    "8x4k": Target(48, 41, 41.6, f"{_VLLM}, FA3"),
    "32x1k": Target(48, 41, 41.6, f"{_VLLM}, FA3, 8x4k: the same bytes"),
    "32x4k": Target(156, 140, 135.0, "TileOPs"),
    "64x4k": Target(300, 268, 253.0, f"{_VLLM}, FA3, 8x32k: the same bytes"),
    "8x32k": Target(300, 268, 253.0, f"{_VLLM}, FA3"),
    "256x64": Target(40, 28),
    "32x4k MHA": Target(590, 535, 511.0, "TileOPs"),
    "1x128k+31x4k": Target(310, 275),
}

# A prompt's keys and values shared by all sequences; each alone would read 1.1 GB.
CASCADE = {"64x(4k shared + 256)": Target(75, 50, 265.0, f"{_VLLM}, FA3, 8x32k: about the bytes read without sharing")}

PREFILL = {
    "4x512": Target(150, 190, 218.0, "TileOPs, FlashInfer", Unit.TFLOPS),
    "2x2048": Target(320, 390, 425.0, "TileOPs, FlashInfer", Unit.TFLOPS),
    "1x8192": Target(400, 470, 487.0, "facebookexperimental/triton#206, plain Triton at best", Unit.TFLOPS),
    "2x(512 on 4096)": Target(350, 430, 513.0, "TileOPs, FlashInfer", Unit.TFLOPS),
}

SMALL = {
    ("add_rmsnorm", 1): Target(3, None, 2.4, "TileOPs"),
    ("add_rmsnorm", 64): Target(3),
    ("add_rmsnorm", 2048): Target(21, None, 19.1, "TileOPs"),
    ("silu_mul", 1): Target(3, None, 1.5, "TileOPs"),
    ("silu_mul", 64): Target(3),
    ("silu_mul", 2048): Target(47, None, 43.3, "TileOPs"),
    ("rope_norm_write", 32): Target(4),
    ("rope_norm_write", 4096): Target(32),
    ("decode_combine", 64): Target(5),
}

SAMPLE = {1: Target(15), 64: Target(30)}  # by rows, greedy or drawn, 128k tokens
SAMPLE_FILTERED = Target(90)  # 64 rows

LINEAR = Target(88, None, None, "of the rate of 8192^3", Unit.SHARE)
BUS_BLOCKS = Target(85, None, None, "of one large copy", Unit.SHARE)
