"""F9: every unit that is charged is useful work or waste, exactly, in integers, under every cost, and what a failing step costs
is refunded to who was charged for it. KV: every block is free or held
by exactly those whose tables name it, in every step; and every request ends once, with its tokens, in one place at a time.

The meter here knows what the runner was told to do and who gained by which eviction, and nothing of policies and the lane.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from books import Books
from engine_world import expected_tokens
from fairlane.scheduler.cost import Ledger
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.events import EndReason, PreemptionKind, PreemptionReason
from fairlane.scheduler.request import Payer, RequestId, Sequence
from fairlane.scheduler.tenancy import CostName
from histories import History, histories, many, run
from step_watch import Step, StepWatch, paths

failing = st.frozensets(st.integers(2, 60), max_size=2)  # ids of steps
TIGHT = {"num_blocks": 18, "max_resident": 8}


@dataclass
class Meter:
    """Prices what the runner does. work: by request, what it computed for the first time. again: what was computed before.
    held: of KV cache, by who holds it, from one moment to the next. others: what of all that is for others to pay, by request
    and ledger: recompute, and what is held meanwhile, if another's account gained by the eviction."""

    driver: EngineDriver
    work: Counter[RequestId] = field(default_factory=Counter)
    again: Counter[RequestId] = field(default_factory=Counter)
    held: Counter[RequestId] = field(default_factory=Counter)
    others: Counter[tuple[RequestId, Ledger]] = field(default_factory=Counter)
    steps_again: list[int] = field(default_factory=list)  # ids of those that computed something again
    _displaced: set[RequestId] = field(default_factory=set)  # by somebody of another account
    _at: Counter[RequestId] = field(default_factory=Counter)  # tokens it has computed
    _computed: Counter[RequestId] = field(default_factory=Counter)  # the most tokens it ever had
    _came_with: Counter[RequestId] = field(default_factory=Counter)
    _room: Counter[RequestId] = field(default_factory=Counter)  # all it came with, until one is left; then what it has computed
    _since_s: float = 0.0

    def __post_init__(self) -> None:
        scheduler = self.driver.scheduler
        self._since_s = self.driver.clock.now()
        schedule, leave, evicted = scheduler.schedule, scheduler.holding.leave, scheduler.decisions.evicted

        def scheduled():  # type: ignore[no-untyped-def]
            if scheduler.num_unfinished:
                now_s = self.driver.clock.now()
                for sequence in scheduler.running:
                    self._hold(sequence.request_id, now_s)
                self._since_s = now_s
            return schedule()

        def left(sequence: Sequence, *rest) -> None:  # type: ignore[no-untyped-def]
            self._hold(sequence.request_id, rest[-1])
            leave(sequence, *rest)

        def displaced(victim: Sequence, kind: PreemptionKind, reason: PreemptionReason, now_s: float, gainer: Payer) -> None:
            request_id = victim.request_id
            if kind is PreemptionKind.RECOMPUTED or self._at[request_id] >= self._computed[request_id]:
                (self._displaced.discard if gainer == victim.payer else self._displaced.add)(request_id)
            evicted(victim, kind, reason, now_s, gainer)

        scheduler.decisions.evicted = displaced  # type: ignore[method-assign]
        scheduler.schedule = scheduled  # type: ignore[method-assign]
        scheduler.holding.leave = left  # type: ignore[method-assign]

    def _hold(self, request_id: RequestId, now_s: float) -> None:
        price = self.driver.scheduler.cost.holding(self._since_s, now_s) * self._room[request_id]
        self.held[request_id] += price
        if request_id in self._displaced and self._at[request_id] < self._computed[request_id]:
            self.others[request_id, Ledger.HELD] += price

    def __call__(self, step: Step) -> None:
        prices = self.driver.scheduler.cost
        starts: dict[RequestId, int] = {}
        for entry in step.placed:
            starts.setdefault(entry.sequence.request_id, entry.start)
        for new, one in zip(step.output.new, step.admitted, strict=True):
            self._came_with[one.request_id] = len(new.token_ids)
            # Where it starts further on than at 0 and did not come back from host memory, the cache had it.
            swapped_in = {block for _, block in step.output.swap_in} & set(new.block_tables[0])
            if not swapped_in:
                self._note(one.request_id, prices.cached(starts[one.request_id]), again=bool(self._computed[one.request_id]))
        for entry in step.placed:
            request_id = entry.sequence.request_id
            came_with = self._came_with[request_id]
            self._room[request_id] = came_with if entry.end < came_with - 1 else entry.end
            if entry.is_chunk:
                known = max(entry.start, min(entry.end, self._computed[request_id]))
                price = prices.chunk(entry.start, known - entry.start)
                self._note(request_id, price, again=True)
                if known > entry.start and step.output.step_id not in self.steps_again:
                    self.steps_again.append(step.output.step_id)
                if request_id in self._displaced:
                    self.others[request_id, Ledger.WORK] += price
                self._note(request_id, prices.chunk(known, entry.end - known), again=False)
            else:
                again = entry.start < self._computed[request_id]
                self._note(request_id, prices.decode().of(entry.start), again=again)
            self._at[request_id] = entry.end
            self._computed[request_id] = max(self._computed[request_id], entry.end)

    def _note(self, request_id: RequestId, price: int, *, again: bool) -> None:
        (self.again if again else self.work)[request_id] += price


def fail_again(meter: Meter, step: Step, number: int) -> None:
    """Fails the step, if it is the one with that number of those that compute again: few steps that fail by chance do."""
    if meter.steps_again[number - 1 : number] == [step.output.step_id]:
        executor: Any = meter.driver.engine._executor
        executor._fail_steps |= {step.output.step_id}


@many
@given(
    history=histories(),
    cost=st.sampled_from(CostName),
    fails=failing,
    fails_to_launch=failing,
    fails_again=st.integers(0, 4),
    tight=st.booleans(),
)
def test_f9_every_unit_charged_is_useful_or_waste(
    history: History, cost: CostName, fails: frozenset[int], fails_to_launch: frozenset[int], fails_again: int, tight: bool
) -> None:
    """Useful: what those did for the first time who got all their tokens. Waste: what was done again, and for who did not; of
    those that a step failed for, only what others gained by, who keep paying for it."""
    driver = history.start(cost=cost, fail_steps=fails, fail_launches=fails_to_launch, **(TIGHT if tight else {}))
    books, meter = Books(driver), Meter(driver)
    StepWatch(driver, meter, lambda step: fail_again(meter, step, fails_again))
    run(driver)
    ended = {number: transcript.ended for number, transcript in driver.transcripts.items()}
    served = {number for number, end in ended.items() if end is not None and end.reason in (EndReason.STOP, EndReason.LENGTH)}
    failed = {number for number, end in ended.items() if end is not None and end.error_reason == "STEP_FAILED"}
    useful = sum(cost for number, cost in meter.work.items() if number in served)
    waste = sum(cost for number, cost in meter.work.items() if number not in served | failed)
    waste += sum(cost for number, cost in meter.again.items() if number not in failed)
    held = sum(cost for number, cost in meter.held.items() if number not in failed)
    work_of_others, held_for_others = (sum(meter.others[number, ledger] for number in failed) for ledger in Ledger)
    assert (books.sum(Ledger.WORK), books.sum(Ledger.HELD)) == (useful + waste + work_of_others, held + held_for_others)


@many
@given(history=histories(), depth=st.sampled_from([0, 1, 2]))
def test_kv_every_block_is_free_or_held_by_those_whose_tables_name_it(history: History, depth: int) -> None:
    driver = history.start(depth=depth, check=True)
    blocks, caps = driver.blocks, {node.path: node.max_running for node in history.options["nodes"]}
    wrong: list[str] = []

    def rule(step: Step) -> None:
        holders = Counter(block for one in step.running for block in set(blocks.block_table(one.request_id)))
        if len(holders) + blocks.num_free_blocks != blocks.num_usable_blocks or 0 in holders:
            wrong.append(f"step {step.output.step_id}: {len(holders)} held, {blocks.num_free_blocks} free")
        wrong.extend(
            f"block {block} counts {blocks.pool.ref_counts[block]} holders, {count} have it"
            for block, count in holders.items()
            if blocks.pool.ref_counts[block] != count
        )
        for entry in step.placed:
            if len(blocks.block_table(entry.sequence.request_id)) * blocks.block_size < entry.end:
                wrong.append(f"{entry} has no room")
        counts = Counter(path for one in step.running for path in paths(one.request.tenant))
        wrong.extend(f"{path}: {count} run" for path, count in counts.items() if (cap := caps.get(path)) and count > cap)
        states = [one.request_id for one in (*step.running, *step.waiting)]
        if len(set(states)) != len(states) or len(states) != driver.scheduler.num_unfinished:
            wrong.append("a sequence is in two states, or in none")
        if any(one.num_evictions > 3 for one in (*step.running, *step.waiting)):
            wrong.append("one was evicted for rank more than three times")

    StepWatch(driver, rule)
    run(driver)
    got = {one.request_id: driver.transcripts[one.request_id] for one in history.asked}
    for one in history.asked:
        end, tokens = got[one.request_id].ended, got[one.request_id].token_ids
        whole = expected_tokens(one)
        if end is None or tokens != (whole[: len(tokens)] if end.reason is EndReason.ABORTED else whole):
            wrong.append(f"{one.request_id} ended as {end} with {len(tokens)} of {len(whole)} tokens")
    assert (wrong, blocks.num_used_blocks, blocks.host.num_used_blocks) == ([], 0, 0)
