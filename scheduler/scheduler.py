"""The Scheduler: which sequences compute which tokens in the next step, on which blocks. It does no I/O and takes the time
from its Clock; the engine loop (engine.py) launches what it returns and feeds the results back through update(). One ranked pass
(step_pass.py) builds a step; this file keeps the state around it: requests in, results in, requests out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from fairlane.blockmgr.hashing import HashChain
from fairlane.blockmgr.manager import BlockManager
from fairlane.clock import Clock
from fairlane.scheduler.ceilings import Ceilings, TimeMeter, keep_ceilings, launched_parts, set_ceilings, take_time
from fairlane.scheduler.census import Census
from fairlane.scheduler.cost import Cost, Ledger, TokensCost, make_cost
from fairlane.scheduler.decisions import DecisionLog
from fairlane.scheduler.events import DecodedTokens, Delta, Ended, EndReason, PreemptionKind
from fairlane.scheduler.holding import Holding
from fairlane.scheduler.integrity import check_integrity
from fairlane.scheduler.kv_quotas import KVQuotas, above_limit
from fairlane.scheduler.lane import DecodeLane
from fairlane.scheduler.locality import Locality
from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.scheduler.placement import Placement
from fairlane.scheduler.policies.base import Policy
from fairlane.scheduler.prediction import OutputPredictor
from fairlane.scheduler.request import Request, RequestId, Sequence, SequenceStatus
from fairlane.scheduler.results import LaunchedStep, fail_results, take_results
from fairlane.scheduler.room import Room
from fairlane.scheduler.running import RunningSet
from fairlane.scheduler.settlement import Settlement
from fairlane.scheduler.shadow.shadow import Shadow
from fairlane.scheduler.shadow.tee import without_shadow
from fairlane.scheduler.stats import SchedulerStats, stats_of
from fairlane.scheduler.step_pass import StepPass
from fairlane.scheduler.swaps import Swaps
from fairlane.scheduler.tenancy import CostName
from fairlane.scheduler.victims import VictimRule, cheapest
from fairlane.scheduler.wait_estimate import WaitEstimate

# Reasons for which a request fails through no doing of its own: nobody pays for it.
OUR_FAULTS = frozenset({"STEP_FAILED", "NUMERICAL_ERROR"})


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step and the engine may hold.

    max_num_seqs: placed in one step. max_num_resident: holding KV and a slot at once. max_num_batched_tokens: a step's
    tokens; at least max_num_seqs, so that a full decode batch still leaves a token for whoever ranks first.
    max_prefill_chunk: of one sequence in a step, 0: no cap. watermark: part of the blocks an admission leaves free at least,
    so that running sequences can grow (room.py). max_skips: steps a waiting head may be passed over before nothing overtakes
    it. lookahead: heads that do not fit which one step may pass over. min_swap_tokens: an evicted sequence that would compute
    fewer than these again is not swapped to host memory.
    """

    max_num_seqs: int = 64
    max_num_resident: int = 256
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int = 0
    max_model_len: int = 8192
    watermark: float = 0.01
    max_skips: int = 16
    lookahead: int = 8
    min_swap_tokens: int = 128

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every decode needs a token of the step"
            )

    def watermark_blocks(self, num_usable_blocks: int, num_running: int) -> int:
        """Blocks that an admission leaves free beside others that run."""
        return max(1, int(self.watermark * num_usable_blocks)) if num_running else 0


class Scheduler:
    """Owns the sequences, the blocks and the slots. Not thread-safe: one engine thread calls it."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager, policy: Policy, clock: Clock) -> None:
        self.limits = limits
        self.blocks = blocks
        self.policy, self.policy_generation = policy, 0
        self.shadow: Shadow | None = None
        self.running = RunningSet(limits.max_num_resident)
        self.lane = DecodeLane(blocks)
        self.locality = Locality(blocks)
        self.swaps = Swaps(blocks, limits.min_swap_tokens, limits.max_num_batched_tokens)
        self.room = Room(blocks.num_usable_blocks, blocks.block_size, limits.watermark, self.swaps)
        self.pick_victims: VictimRule = cheapest
        self.settlement: Settlement | None = None
        self.cost: Cost = TokensCost()
        self.holding = Holding(clock.now())
        self.ceilings = Ceilings()
        self.meter: TimeMeter | None = None  # while somebody has a ceil
        self.outputs = OutputPredictor()
        self.census = Census()
        self.decisions = DecisionLog()
        self.waits = WaitEstimate()
        self.num_preemptions = self.num_recomputed_tokens = 0
        self._clock = clock
        self._sequences: dict[RequestId, Sequence] = {}
        self.launched: deque[LaunchedStep] = deque()  # and not returned
        self._released_slots: list[int] = []
        self.deltas: dict[RequestId, Delta] = {}
        self.decoded: list[DecodedTokens] = []
        self._arrivals = 0
        self._step_id = 0

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request, or ends it at once when it could never run here (a `failed` delta; it is never queued)."""
        refusal = self._refusal(request)
        if refusal is not None:
            self.refuse(request, *refusal)
            return
        sequence = Sequence(request, self._arrivals, HashChain(request.cache_domain, self.blocks.block_size))
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        now_s, ahead = self._clock.now(), self.waits.num_waiting(sequence.payer)
        self.policy.push(sequence, now_s)
        self.census.waits(sequence, 1)
        self.waits.enter(sequence, now_s, self._step_id)
        settlement = None if self.ceilings.shut else self.settlement  # it may take the place of one that rests
        if settlement is None or not settlement.outlasts_arrival(sequence, self.policy, self.census):
            self.settlement = None  # by KV guarantee or by rank, it may get in
        delta = self.delta(sequence)
        delta.queue_position = position = self.policy.position(sequence)
        delta.estimated_wait_s = self.waits.wait_s(sequence.payer, ahead, position, now_s)

    def refuse(self, request: Request, reason: str, message: str) -> None:
        """Records a `failed` outcome for a request that was never queued."""
        ended = Ended(EndReason.FAILED, error_reason=reason, error_message=message)
        self.deltas[request.request_id] = Delta(request.request_id, ended=ended)

    def _refusal(self, request: Request) -> tuple[str, str] | None:
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id} is in use")
        total = len(request.prompt_token_ids) + request.max_tokens
        if not request.prompt_token_ids or request.max_tokens <= len(request.output_token_ids):
            return ("INVALID_REQUEST", "a request needs a prompt and room for a token")
        if total > self.limits.max_model_len:
            return ("CONTEXT_LENGTH_EXCEEDED", f"{total} tokens do not fit the context of {self.limits.max_model_len}")
        needed = self._blocks_at_most(request)
        if needed > self.blocks.num_usable_blocks:
            return ("KV_CAPACITY_EXCEEDED", f"needs {needed} KV blocks, there are {self.blocks.num_usable_blocks}")
        full = None if self.census.quotas is None else self.census.quotas.never_fits(request.cache_domain, needed)
        return None if full is None else ("KV_CAPACITY_EXCEEDED", above_limit(needed, full))

    def _blocks_at_most(self, request: Request) -> int:
        """The last token's KV is never written, so it needs no slot."""
        return self.blocks.blocks_for(len(request.prompt_token_ids) + request.max_tokens - 1)

    def abort(self, request_id: RequestId, reason: EndReason = EndReason.ABORTED, error: tuple[str, str] = ("", "")) -> bool:
        """Ends a request now; its blocks are free when this returns. False for an id that is not (or no longer) here."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self.finish(sequence, reason, error=error)
        return True

    def finish(
        self, sequence: Sequence, reason: EndReason, *, stop_token_id: int | None = None, error: tuple[str, str] = ("", "")
    ) -> None:
        """The one way out: releases everything the sequence holds and records its terminal outcome."""
        if sequence.status is SequenceStatus.WAITING:
            self.policy.remove(sequence)
            self.swaps.drop(sequence)
            self.census.waits(sequence, -1)
            self.waits.leave(sequence)
            self._unsettle_unless_only_a_slot_helps()
        else:
            self._leave(sequence)
            self.blocks.free(sequence.request_id)
        if error[0] in OUR_FAULTS:
            self._refund(sequence)
        self.outputs.ended(sequence)
        if sequence.started:
            self.room.ended(sequence.num_output_tokens)
        sequence.status = SequenceStatus.FINISHED
        if not sequence.started:
            sequence.queue_s = self._clock.now() - sequence.request.arrival_s
        del self._sequences[sequence.request_id]
        self.delta(sequence).ended = Ended(
            reason, stop_token_id, *error, sequence.num_preemptions, sequence.num_recomputed_tokens, sequence.queue_s
        )

    def _refund(self, sequence: Sequence) -> None:
        """All that its payer was charged for it. What others were charged for its recompute stays: they had gained by that."""
        for ledger in Ledger:
            if sequence.charged[ledger]:
                self.policy.on_charge(sequence.payer, -sequence.charged[ledger], ledger)

    def _unsettle_unless_only_a_slot_helps(self) -> None:
        if self.settlement is not None and not self.settlement.only_a_slot_helps:
            self.settlement = None

    def _leave(self, sequence: Sequence) -> None:
        """A running sequence gives back everything but its blocks."""
        self.settlement = None
        self.lane.leave([sequence], self.policy)
        self.holding.leave(sequence, self.policy, self.cost, self._clock.now())
        self.commit(sequence)
        self.policy.on_release(sequence)
        self.census.runs(sequence, -1)
        self._released_slots.append(self.running.remove(sequence))

    def admit(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """A waiting sequence, which has got its blocks, runs: it leaves the queue and gets a slot."""
        self.outputs.expect(sequence, self.policy, self.cost, num_cached_tokens)
        self.policy.on_admit(sequence)
        self.policy.pop(sequence)
        self.running.add(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.census.waits(sequence, -1)
        self.census.runs(sequence, 1)
        self.waits.admit(sequence, self._clock.now(), self._step_id)

    def requeue(self, sequence: Sequence) -> PreemptionKind:
        """Takes a running sequence's blocks and slot; it waits again, with its arrival and its tokens, and with what it has
        computed if that was worth swapping."""
        now_s = self._clock.now()
        self._leave(sequence)
        swapped = self.swaps.evict(sequence)
        sequence.lease_until_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        sequence.queued_at_s = now_s
        self.num_preemptions += 1
        self.policy.push(sequence, now_s)
        self.census.waits(sequence, 1)
        self.waits.enter(sequence, now_s, self._step_id, again=True)
        return PreemptionKind.SWAPPED if swapped else PreemptionKind.RECOMPUTED

    # -- steps ---------------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduleOutput | None:
        """The next step, or None when nothing can be computed now (all waits for results, or there is nothing).

        The caller launches what it gets, in order, and owes one update() or fail_step() for each.
        """
        if not self._sequences:
            return None
        if self.shadow is not None and self.shadow.fault:
            self.policy = without_shadow(self.policy)
        now_s = self._clock.now()
        self.holding.accrue(self.running, self.lane, self.policy, self.cost, now_s)
        if self.meter is not None:
            keep_ceilings(self, now_s)
        self.lane.change(self.policy)
        self.cost.begin_step(len(self.running))
        if self._is_steady(now_s):
            self.policy.skip_step(now_s)
            return self._launch(None)
        self.policy.begin_step(now_s)
        step = StepPass(self, now_s)
        try:
            step.run()
            if self.shadow is not None:
                self.shadow.tell(self.shadow.end_step, step)
        finally:
            self.policy.end_step()
        placed = step.placement
        if placed.is_empty and not step.places_lane and not self.swaps.leaving:
            return None
        output = self._launch(placed, with_lane=step.places_lane)
        self.lane.joining = placed.sequences
        self.settlement = step.settlement()
        return output

    def _is_steady(self, now_s: float) -> bool:
        """Whether this step can only be: everything that runs decodes one token, and nothing that waits gets in."""
        lane, settlement = self.lane, self.settlement
        return (
            settlement is not None
            and len(lane) == len(self.running)
            and len(lane) > 0
            and settlement.holds(self._step_id, now_s)
            and lane.num_new_blocks() <= self.blocks.num_free_blocks
            and (self.census.quotas is None or self._is_steady_for(self.census.quotas))
        )

    def _is_steady_for(self, quotas: KVQuotas) -> bool:
        """Whether every limit leaves room for the lane, and enough blocks are left that no guarantee must be seen to."""
        return self.blocks.num_free_blocks - self.lane.num_new_blocks() >= quotas.alarm and self.lane.fits()

    def _launch(self, placed: Placement | None, *, with_lane: bool = True) -> ScheduleOutput:
        """Notes a step as launched: what was placed one by one, and the lane, all of whose members it places."""
        self._step_id += 1
        output = ScheduleOutput(self._step_id) if placed is None else placed.output(self._step_id)
        sequences, brought, cost = ([], [], 0) if placed is None else (placed.sequences, placed.brought, placed.cost)
        parts = None if self.meter is None else launched_parts(self, self.meter, with_lane=with_lane)
        members: list[Sequence] = []
        if with_lane:
            members = self.lane.members
            output.decode_slots = self.lane.slots
            cost += self.lane.charge(self.policy, self.cost.decode(), Ledger.WORK)
            output.grown_slots, output.grown_blocks = self.lane.place()
            if self.lane.has_done:  # the next step has a seat more, even if their last tokens are still out
                self.settlement = None
        output.released_slots, self._released_slots = self._released_slots, []
        swapped = self.swaps.launch(output)
        self.launched.append(LaunchedStep(output, sequences, members, swapped, brought, cost, self.holding.charged, parts))
        return output

    def update(self, result: StepResult) -> None:
        """Takes in the results of the oldest launched step: tokens, stops, errors of single sequences.

        Tokens of a sequence that has ended since are dropped; those of one that was evicted since are kept.
        """
        step = self._pop_launched(result.step_id)
        self.cost.observe(step.work_cost, result.elapsed_s)
        num_tokens = step.output.num_scheduled_tokens
        self.swaps.observe(step.output, num_tokens, result.elapsed_s)
        self.policy.on_step_time(max(step.work_cost, step.held_cost), num_tokens, result.elapsed_s)
        if step.parts is not None:
            take_time(self, step.parts, result.elapsed_s, self._clock.now())
        take_results(self, step, result)

    def fail_step(self, step_id: int, message: str) -> None:
        """The oldest launched step failed: everything scheduled in it ends, whatever else runs goes on."""
        fail_results(self, self._pop_launched(step_id), message)

    def _pop_launched(self, step_id: int) -> LaunchedStep:
        if not self.launched or self.launched[0].output.step_id != step_id:
            raise ValueError(f"step {step_id} is not the oldest launched step")
        return self.launched.popleft()

    def commit(self, sequence: Sequence) -> None:
        """Makes the full blocks that have retired findable. Those filled in the lane are when the sequence leaves the running
        set."""
        writes = self.blocks.enable_prefix_caching and sequence.request.cache_mode.writes
        if writes and sequence.num_retired_tokens >= self.blocks.block_size:
            sequence.chain.extend(sequence.token_ids)
            self.blocks.commit(sequence.request_id, sequence.chain, sequence.num_retired_tokens)
            self._unsettle_unless_only_a_slot_helps()  # a head may need fewer blocks now
            if self.census.quotas is not None and self.census.quotas.accounts.found_prefix(sequence.request.cache_domain):
                self.settlement = None

    def forget(self, sequence: Sequence) -> None:
        """What a failed step may have written is not to be found in the prefix cache."""
        if sequence.status is SequenceStatus.RUNNING:
            self.blocks.forget(sequence.request_id)

    # -- policy and reports --------------------------------------------------------------------------------------------

    def apply_policy(
        self,
        policy: Policy,
        generation: int,
        cost: CostName = CostName.TOKENS,
        quotas: KVQuotas | None = None,
        ceilings: Ceilings | None = None,
    ) -> None:
        """Swaps the policy, what it charges, its KV quotas and ceilings between two steps; waiting sequences keep their arrival,
        nothing is lost but requests that are larger than a limit is now."""
        self.holding.accrue(self.running, self.lane, self.policy, self.cost, self._clock.now())
        if cost is not self.cost.name:
            self.cost = make_cost(cost, self.blocks.num_usable_blocks * self.blocks.block_size)
        self.lane.leave(self.lane.members, self.policy)
        self.settlement = None
        for sequence in sorted(self._sequences.values(), key=lambda sequence: sequence.place):
            if sequence.status is SequenceStatus.WAITING:
                policy.push(sequence, sequence.queued_at_s)
            else:
                self.outputs.expect(sequence, policy, self.cost, 0)
                policy.adopt(sequence)
        self.policy = policy
        set_ceilings(self, ceilings or Ceilings(), self._clock.now())
        self.room.forget_tiers()
        self.policy_generation = generation
        self.running.mark_unsorted()
        self.census.quotas = quotas
        self.blocks.pool.keep_accounts(None if quotas is None else quotas.accounts)
        if quotas is not None:
            self._count_for(quotas)

    def _count_for(self, quotas: KVQuotas) -> None:
        """Who waits; and ends what can never run on."""
        for sequence in list(self._sequences.values()):
            domain = sequence.request.cache_domain
            if sequence.status is SequenceStatus.WAITING:
                quotas.accounts.wait(domain, 1)
            needed = self._blocks_at_most(sequence.request)
            full = quotas.never_fits(domain, needed)
            if full is not None:
                self.finish(sequence, EndReason.FAILED, error=("KV_CAPACITY_EXCEEDED", above_limit(needed, full)))

    def delta(self, sequence: Sequence) -> Delta:
        """This step's delta of a sequence, made on first use."""
        delta = self.deltas.get(sequence.request_id)
        if delta is None:
            delta = self.deltas[sequence.request_id] = Delta(sequence.request_id)
        return delta

    def take_decoded(self) -> list[DecodedTokens]:
        """Tokens since the last call that no Delta tells of; older than what take_deltas() gives of the same requests."""
        decoded, self.decoded = self.decoded, []
        return decoded

    def take_deltas(self) -> list[Delta]:
        """What happened since the last call, one Delta per request."""
        deltas = list(self.deltas.values())
        self.deltas.clear()
        return deltas

    @property
    def num_unfinished(self) -> int:
        return len(self._sequences)

    @property
    def step_id(self) -> int:
        """Of the last step scheduled; 0 before the first."""
        return self._step_id

    def request(self, request_id: RequestId) -> Request | None:
        """The unfinished request of that id."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else sequence.request

    def sequence(self, request_id: RequestId) -> Sequence | None:
        """The unfinished sequence of that id; its counts are in arrears while it is in the lane."""
        return self._sequences.get(request_id)

    def sequences(self) -> Iterable[Sequence]:
        """All unfinished ones, in order of arrival."""
        return self._sequences.values()

    def has_started(self, request_id: RequestId) -> bool:
        """Whether an unfinished request was ever placed in a step. KeyError for one that is not here."""
        return self._sequences[request_id].started

    def live_tiers(self) -> set[str]:
        """Names of the tiers that unfinished requests belong to."""
        return {sequence.request.tier for sequence in self._sequences.values()}

    def stats(self) -> SchedulerStats:
        return stats_of(self, self._clock.now())

    def check_integrity(self) -> None:
        """Raises when blocks, slots and sequences disagree. For idle moments and tests; walks everything."""
        check_integrity(self)
