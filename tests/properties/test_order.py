"""V4: a lower tier is never admitted while a higher one that fits waits. C3: no step is left empty, nor a place in it, while
somebody waits who fits. What "fits" means is written out here, from the promise and not from the pass: caps, slots, blocks, and
what is kept for a head that was passed over too often."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine_world import request
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.request import Sequence
from fairlane.scheduler.room import LARGEST_PART
from fairlane.scheduler.tenancy import Shaping, TiersPolicy
from fairlane.scheduler.victims import MAX_EVICTIONS
from histories import History, histories, many, requests, run
from step_watch import Step, StepWatch, paths


class Room:
    """Who would fit beside those that run."""

    def __init__(self, driver: EngineDriver, history: History) -> None:
        self.limits = driver.scheduler.limits
        self.blocks = driver.blocks
        self.priorities = {tier.name: tier.priority for tier in history.options["tiers"]}
        self.shaped = {tier.name for tier in history.options["tiers"] if tier.shaping is not Shaping.OFF}
        self._owed = {tier.name for tier in history.options["tiers"] if tier.min_share}
        self._caps = {node.path: node.max_running for node in history.options["nodes"]}
        self._member_caps = {node.path: node.member_max_running for node in history.options["nodes"]}

    def has_cap(self, one: Sequence, running: list[Sequence]) -> bool:
        """Whether a max_running keeps it out."""
        counts = Counter(path for other in running for path in paths(other.request.tenant))
        for path in paths(one.request.tenant):
            cap = self._caps.get(path, self._member_caps.get(path.rpartition("/")[0]))
            if cap is not None and counts[path] >= cap:
                return True
        return False

    def has_blocks(self, one: Sequence, num_free: int, left_free: int | None = None) -> bool:
        """For all its tokens and what it has to leave free: the most that anybody may have to, unless that is known."""
        if left_free is None:
            left_free = self._part(max(self.limits.watermark, LARGEST_PART))
        return self.blocks.blocks_for(one.num_tokens) + left_free <= num_free

    def left_by(self, high: Sequence, low: Sequence, step: Step) -> int | None:
        """What it has to leave free, that waits after the step that admitted a lower one: the least, if it had the right to evict
        somebody when it was looked at, or nothing beside those alone. None: not known."""
        placed = {entry.sequence for entry in step.placed}.difference(step.admitted)
        others = [one for one in step.running if one is not low]
        evictable = [one for one in others if one in placed and self._may_evict(high, one)]
        if not evictable or step.evicted:
            return None
        return 0 if evictable == others else self._part(self.limits.watermark)

    def _may_evict(self, high: Sequence, one: Sequence) -> bool:
        """For rank; who is owed a minimum share may be placed before it is looked at."""
        is_guarded = one.num_evictions >= MAX_EVICTIONS or one.lease_until_tokens or one.request.tier in self._owed
        return self.priority(high) > self.priority(one) and not is_guarded

    def _part(self, share: float) -> int:
        return max(1, int(share * self.blocks.num_usable_blocks))

    def priority(self, one: Sequence) -> int:
        return self.priorities[one.request.tier]


def can_start(one: Sequence, step: Step) -> bool:
    """Not while the steps are out in which it was before it was evicted, nor in the step that evicts it."""
    return not one.steps_in_flight and one.request_id not in step.evicted


@st.composite
def crowds(draw: st.DrawFn) -> History:
    """Large requests of the upper tiers beside small ones of the lowest, whose blocks do not do for them: what they must leave
    free decides."""
    drawn = draw(histories(policies=(TiersPolicy.VIP,), shaping=False, lifts=False))
    options = drawn.options | {"num_blocks": draw(st.integers(44, 100)), "max_num_seqs": 8, "max_resident": 12}
    options |= {"budget": 64, "max_prefill_chunk": 0, "nodes": ()}
    upper = draw(requests(options["tiers"][:2], most=16, prompts=100, outputs=40, prefixes=False))
    lower = [
        request(100 + number, "batch", prompt=draw(st.integers(1, 7)), max_tokens=draw(st.integers(1, 9)), arrival_s=arrival_s)
        for number, arrival_s in enumerate(draw(st.lists(st.floats(0, 0.6), min_size=4, max_size=20)))
    ]
    return History(upper + lower, {}, options)


@many
@given(history=st.one_of(histories(policies=(TiersPolicy.VIP,)), crowds()))
def test_v4_no_lower_tier_is_admitted_while_a_higher_one_that_fits_waits(history: History) -> None:
    """But for those that patience or a minimum share brought forward, which hold a lease."""
    driver = history.start()
    room = Room(driver, history)
    inversions: list[tuple[Sequence, Sequence]] = []

    def rule(step: Step) -> None:
        for low in step.admitted:
            if low.lease_until_tokens:
                continue
            # What this step evicted for somebody else's sake still ran when the higher one was looked at.
            others = [
                s for s in (*step.running, *step.waiting) if s is not low and (s.slot is not None or s.request_id in step.evicted)
            ]
            num_free = driver.blocks.num_free_blocks + driver.blocks.freed_by(low.request_id)
            inversions.extend(
                (low, high)
                for high in step.waiting
                if room.priority(high) > room.priority(low)
                and can_start(high, step)
                and not room.has_cap(high, others)
                and room.has_blocks(high, num_free, room.left_by(high, low, step))
            )

    StepWatch(driver, rule)
    run(driver)
    assert inversions == []


@many
@given(history=histories())
def test_c3_no_place_in_a_step_stays_empty_while_somebody_waits_who_fits(history: History) -> None:
    driver = history.start()
    room = Room(driver, history)
    left_out: list[object] = []

    def idle() -> None:
        left_out.extend(driver.scheduler.sequences())

    def rule(step: Step) -> None:
        placed = {entry.sequence for entry in step.placed}
        idle_ones = [s for s in step.running if s not in placed and is_due(s)]
        stuck = [s for s in idle_ones if must_grow(s)]  # a token was kept for each
        tokens = room.limits.max_num_batched_tokens - step.output.num_scheduled_tokens - len(stuck)
        if tokens <= 0 or len(step.placed) >= room.limits.max_num_seqs:
            return
        protects = [s for s in (*step.running, *step.waiting) if s.request.tier in room.shaped]
        left_out.extend(s for s in idle_ones if s not in stuck and not protected_from(s, protects))
        waiting = [s for s in step.waiting if can_start(s, step) and not room.has_cap(s, step.running)]
        fitting = [s for s in waiting if room.has_blocks(s, driver.blocks.num_free_blocks)]
        kept_for_others = any(s.num_skips >= room.limits.max_skips for s in step.waiting)
        looked_at_enough = len(step.waiting) - len(fitting) >= room.limits.lookahead
        if kept_for_others or looked_at_enough or idle_ones or not driver.scheduler.running.has_free_slot:
            return
        left_out.extend(s for s in fitting if not protected_from(s, protects))

    def is_due(one: Sequence) -> bool:
        last_is_out = one.num_output_tokens + one.num_in_flight >= one.request.max_tokens
        return one.num_pending_tokens > 0 and not (one.num_pending_tokens == 1 and one.num_in_flight and last_is_out)

    def must_grow(one: Sequence) -> bool:
        return driver.blocks.num_new_blocks(one.request_id, one.num_computed_tokens + 1, one.num_computed_tokens) > 0

    def protected_from(one: Sequence, protects: list[Sequence]) -> bool:
        """Whether somebody of a shaped tier above it is here, so that it may have to pause or to wait for tokens."""
        shaping = history.options["policy"] is TiersPolicy.VIP
        return shaping and any(room.priority(other) > room.priority(one) for other in protects)

    StepWatch(driver, rule, idle=idle)
    run(driver)
    assert left_out == []
