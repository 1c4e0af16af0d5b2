"""F9: every unit that is charged is useful work or waste, exactly, in integers, under every cost. KV: every block is free or held
by exactly those whose tables name it, in every step; and every request ends once, with its tokens, in one place at a time.

The meter here knows what the runner was told to do, and nothing of payers, policies and the lane.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from books import Books
from engine_world import expected_tokens
from fairlane.scheduler.cost import Ledger
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.events import EndReason
from fairlane.scheduler.request import RequestId, Sequence
from fairlane.scheduler.tenancy import CostName
from histories import History, histories, many, run
from step_watch import Step, StepWatch, paths


@dataclass
class Meter:
    """Prices what the runner does. work: by request, what it computed for the first time. again: what was computed before.
    held: of KV cache, by who holds it, from one moment to the next."""

    driver: EngineDriver
    work: Counter[RequestId] = field(default_factory=Counter)
    again: Counter[RequestId] = field(default_factory=Counter)
    held: Counter[RequestId] = field(default_factory=Counter)
    _computed: Counter[RequestId] = field(default_factory=Counter)  # the most tokens it ever had
    _came_with: Counter[RequestId] = field(default_factory=Counter)
    _room: Counter[RequestId] = field(default_factory=Counter)  # all it came with, until one is left; then what it has computed
    _since_s: float = 0.0

    def __post_init__(self) -> None:
        scheduler = self.driver.scheduler
        self._since_s = self.driver.clock.now()
        schedule, leave = scheduler.schedule, scheduler.holding.leave

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

        scheduler.schedule = scheduled  # type: ignore[method-assign]
        scheduler.holding.leave = left  # type: ignore[method-assign]

    def _hold(self, request_id: RequestId, now_s: float) -> None:
        self.held[request_id] += self.driver.scheduler.cost.holding(self._since_s, now_s) * self._room[request_id]

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
                self._note(request_id, prices.chunk(entry.start, known - entry.start), again=True)
                self._note(request_id, prices.chunk(known, entry.end - known), again=False)
            else:
                again = entry.start < self._computed[request_id]
                self._note(request_id, prices.decode().of(entry.start), again=again)
            self._computed[request_id] = max(self._computed[request_id], entry.end)

    def _note(self, request_id: RequestId, price: int, *, again: bool) -> None:
        (self.again if again else self.work)[request_id] += price


@many
@given(history=histories(), cost=st.sampled_from(CostName))
def test_f9_every_unit_charged_is_useful_or_waste(history: History, cost: CostName) -> None:
    """Useful: what those did for the first time who got all their tokens. Waste: what was done again, and for who did not."""
    driver = history.start(cost=cost)
    books, meter = Books(driver), Meter(driver)
    StepWatch(driver, meter)
    run(driver)
    ended = {number: transcript.ended for number, transcript in driver.transcripts.items()}
    served = {number for number, end in ended.items() if end is not None and end.reason in (EndReason.STOP, EndReason.LENGTH)}
    useful = sum(cost for number, cost in meter.work.items() if number in served)
    waste = sum(cost for number, cost in meter.work.items() if number not in served) + sum(meter.again.values())
    assert (books.sum(Ledger.WORK), books.sum(Ledger.HELD)) == (useful + waste, sum(meter.held.values()))


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
