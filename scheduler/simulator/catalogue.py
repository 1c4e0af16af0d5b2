"""The workloads by name."""

from __future__ import annotations

from collections.abc import Callable

from fairlane.scheduler.simulator import sampled, synthetic
from fairlane.scheduler.simulator.scene import Scene
from fairlane.scheduler.simulator.workload import Workload

WORKLOADS: dict[str, Callable[[Scene], Workload]] = {
    "W1": synthetic.overload,
    "W2": synthetic.eight_clients,
    "W3": synthetic.weighted,
    "W4": synthetic.on_off,
    "W5": synthetic.short_long,
    "W6": synthetic.prefill_decode,
    "W7": synthetic.ramp_shift,
    "W8": sampled.arena,
    "W9": sampled.vip_overload,
    "W10": sampled.many_tenants,
    "W11": sampled.conversations,
    "W12": synthetic.adversaries,
}
