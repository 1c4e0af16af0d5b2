"""What a shadow policy knows: its queues and counters, filled with twins of the real sequences. Everything here may raise what
the policy raises; shadow.py sees to it that nobody else is hurt."""

from __future__ import annotations

from fairlane.scheduler.ceilings import Ceilings, StepParts
from fairlane.scheduler.cost import Ledger, Rate
from fairlane.scheduler.policies.bands import BandPolicy
from fairlane.scheduler.policies.base import BatchView, Policy, StepPlan
from fairlane.scheduler.policies.caps import RunningCaps
from fairlane.scheduler.request import Payer, RequestId, Sequence
from fairlane.scheduler.shadow.twin import ReadOnly, Twin
from fairlane.scheduler.tenancy import PolicySnapshot


class ShadowState:
    """Within a step charges reach the policy at once, and so do admissions as long as it agrees. From whom it would have let in
    instead on, those whom the policy in force lets in stay in its queue until the step's end: it might choose them next.

    admitted: by the policy in force, in this step. caps: who runs, by the shadow's max_running. ceilings: the shadow's, for which
    only those steps count that it would have let its tiers and nodes have.
    """

    def __init__(self, policy: Policy, snapshot: PolicySnapshot) -> None:
        self.policy = policy
        self.caps = RunningCaps({node.path: node for node in snapshot.nodes})
        self.capped = any(n.max_running is not None or n.member_max_running is not None for n in snapshot.nodes)
        self.ceilings = Ceilings(snapshot.tiers, snapshot.nodes)
        self.plan = StepPlan(0)
        self.admitted: list[Twin] = []
        self.num_steps = 0
        self._twins: dict[RequestId, Twin] = {}
        self._evicted: list[tuple[Twin, float]] = []
        self._released: list[Twin] = []
        self._settled: set[Twin] = set()  # those admitted of whom the policy knows
        self.in_step = False

    def twin(self, sequence: Sequence) -> Twin:
        """KeyError for one that has ended."""
        return self._twins[sequence.request_id]

    @property
    def num_waiting(self) -> int:
        return self.policy.num_waiting()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def keep_ceilings(self, now_s: float) -> None:
        """Before each step."""
        if self.ceilings.buckets:
            begun, ended = self.ceilings.advance(now_s)
            for gate in begun:
                self.policy.shut(gate)
            for gate in ended:
                self.policy.reopen(gate)

    def take_time(self, parts: StepParts, elapsed_s: float, now_s: float) -> None:
        """A step returned."""
        self.ceilings.take(parts, elapsed_s, now_s, unless=parts.shut)

    def begin_step(self, now_s: float) -> None:
        self.in_step = True
        self.num_steps += 1
        self.policy.begin_step(now_s)

    def make_plan(self, view: BatchView) -> None:
        self.plan = self.policy.plan(view)

    def end_step(self) -> None:
        """The world as the policy in force has made it."""
        self.policy.end_step()
        self.in_step = False
        self.flush_released()
        for twin, since_s in self._evicted:
            twin.lease_until_tokens = 0  # as the scheduler's requeue()
            self.policy.push(twin, since_s)
        for twin in self.admitted:
            if twin not in self._settled:
                self.settle(twin)
        self._evicted.clear()
        self.admitted.clear()
        self._settled.clear()

    def skip_step(self, now_s: float) -> None:
        self.num_steps += 1
        self.policy.skip_step(now_s)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def push(self, sequence: Sequence, since_s: float) -> None:
        twin = self._twins.get(sequence.request_id)
        if twin is None:
            twin = self._twins[sequence.request_id] = Twin(sequence)
        if self.in_step:
            self._evicted.append((twin, since_s))
        else:
            self.policy.push(twin, since_s)

    def remove(self, sequence: Sequence) -> None:
        """It ends waiting."""
        self.policy.remove(self._twins.pop(sequence.request_id))

    def admit(self, sequence: Sequence) -> Twin:
        twin = self.twin(sequence)
        twin.charged_before = ReadOnly(sequence.charged.copy())
        self.admitted.append(twin)
        return twin

    def adopt(self, sequence: Sequence, charged: list[int]) -> None:
        """It runs already, as the shadow begins. charged: until now."""
        twin = self._twins[sequence.request_id] = Twin(sequence)
        twin.charged_before = ReadOnly(charged.copy())
        self.caps.add(sequence.request.tenant)
        self.policy.adopt(twin)
        twin.charged_before = None

    def release(self, sequence: Sequence) -> None:
        """It ends running, or, within a step, is evicted and will be pushed."""
        self._released.append(self.twin(sequence))
        if not self.in_step:
            self.flush_released()
            del self._twins[sequence.request_id]

    def flush_released(self) -> None:
        """Those released run no longer."""
        released, self._released = self._released, []
        for twin in released:
            self.caps.remove(twin.request.tenant)
            self.policy.on_release(twin)

    def unserved(self, sequence: Sequence) -> None:
        self.policy.on_unserved(self.twin(sequence))

    def settle(self, twin: Twin) -> None:
        """It runs, in the policy's eyes too."""
        self._settled.add(twin)
        self.caps.add(twin.request.tenant)
        if isinstance(self.policy, BandPolicy) or self.policy.peek() is twin:
            self.policy.on_admit(twin)
            self.policy.pop(twin)
        else:  # others need only take out the head
            self.policy.remove(twin)
            self.policy.adopt(twin)
        twin.charged_before = None

    # -- charges -------------------------------------------------------------------------------------------------------

    def charge(self, payer: Payer, cost: int, ledger: Ledger) -> None:
        self.policy.on_charge(payer, cost, ledger)

    def recompute(self, payer: Payer, cost: int) -> None:
        self.policy.on_recompute(payer, cost)

    def decoding(self, payer: Payer, change: int, tokens: int) -> None:
        self.policy.on_decoding(payer, change, tokens)

    def steady_step(self, rate: Rate, ledger: Ledger) -> None:
        self.policy.on_steady_step(rate, ledger)

    def step_time(self, cost: int, num_tokens: int, elapsed_s: float) -> None:
        self.policy.on_step_time(cost, num_tokens, elapsed_s)
