"""Puts a shadow beside the policy in force, and takes it away again; both between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from fairlane.scheduler.ceilings import set_meter
from fairlane.scheduler.cost import Ledger
from fairlane.scheduler.policies import make_policy
from fairlane.scheduler.request import SequenceStatus
from fairlane.scheduler.shadow.facts import World
from fairlane.scheduler.shadow.shadow import Shadow
from fairlane.scheduler.shadow.tee import Tee, without_shadow
from fairlane.scheduler.tenancy import PolicySnapshot

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler


class ShadowRefused(Exception):
    """This policy cannot be a shadow of the one in force; the text says why."""


def start_shadow(
    scheduler: Scheduler, snapshot: PolicySnapshot, now_s: float, timer: Callable[[], float] = time.perf_counter
) -> None:
    """From now on the snapshot's policy is told of everything and obeyed in nothing. It starts with the counters of the policy in
    force, as it would if it were applied; nothing of what is in force changes, so that no step is another for it. Needs every
    tier that live requests have. Raises PolicyUnavailable and ShadowRefused, and an earlier shadow stays then."""
    if snapshot.cost is not scheduler.cost.name:
        raise ShadowRefused(
            f"cost: {snapshot.cost.value} cannot be shadowed while {scheduler.cost.name.value} is in force: "
            "a shadow sees the charges of the policy in force; fairlane policy simulate compares costs"
        )
    policy = make_policy(snapshot, without_shadow(scheduler.policy))
    stop_shadow(scheduler)
    lane = scheduler.lane
    lane.settle()
    shadow = Shadow(policy, snapshot, World(scheduler), now_s, timer)
    shadow.state.ceilings.take_over(scheduler.ceilings, now_s)
    for sequence in sorted(scheduler.sequences(), key=lambda sequence: sequence.place):
        if sequence.status is SequenceStatus.WAITING:
            shadow.tell(shadow.state.push, sequence, sequence.queued_at_s)
        else:
            charged = lane.charged(sequence) if sequence.steady_until else sequence.charged
            if not scheduler.policy.predicts:  # so nobody has, and nobody else reads it
                scheduler.outputs.expect(sequence, policy, scheduler.cost, 0)
                sequence.expected_charge += charged[Ledger.WORK] - sequence.charged[Ledger.WORK]
            shadow.tell(shadow.state.adopt, sequence, charged)
    lane.tell_decoding(lambda payer, change, tokens: shadow.tell(shadow.state.decoding, payer, change, tokens))
    shadow.begin()
    scheduler.shadow = shadow
    scheduler.policy = Tee(scheduler.policy, shadow)
    set_meter(scheduler)


def stop_shadow(scheduler: Scheduler) -> None:
    """Without one it does nothing."""
    scheduler.policy = without_shadow(scheduler.policy)
    scheduler.shadow = None
    set_meter(scheduler)
