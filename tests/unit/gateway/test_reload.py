"""When a changed file is judged: at rest, once, with patience for a write in progress. The file is a script of what each look at
it shows; every look after the script's end shows the last entry."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fairlane.config.source import UnreadableFile
from fairlane.errors import ConfigError, FairlaneError
from fairlane.gateway.policy.model import Policy
from fairlane.gateway.policy_source import Reading
from fairlane.gateway.reload import PolicyReloader, Timing
from fairlane.gateway.worker_client import PolicyRefused
from fairlane.scheduler.tenancy import TiersPolicy

# One look a tick; five ticks of patience, twenty in all; the poll stays out of the way.
TIMING = Timing(settle_s=0.001, patience_s=0.005, limit_s=0.020, poll_s=60.0)
OLD = Policy("old", "", "p", TiersPolicy.VIP, {}, {}, {}, {})


class Script:
    """A policy source. Names that begin with "bad" cannot be used, "gone" cannot be read."""

    def __init__(self, *looks: str) -> None:
        self.looks = list(looks)
        self.loaded: list[str] = []
        self.path: Any = type("P", (), {"parent": "/nonexistent", "__str__": lambda self: "p"})()

    def look(self) -> Reading:
        name = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if name == "gone":
            raise UnreadableFile(["p: cannot be read: gone"])
        self.now = name
        return Reading(name, False)

    def load(self) -> Policy:
        self.loaded.append(self.now)
        if self.now.startswith("bad"):
            raise ConfigError([f"p:1:1: {self.now}"])
        return dataclasses.replace(OLD, sha256=self.now)


class World:
    def __init__(self, source: Script, *refusals: str) -> None:
        self.in_force = OLD
        self.applied: list[str] = []
        self.refusals = list(refusals)
        self.failures = 0
        self.reloader = PolicyReloader(
            source,  # type: ignore[arg-type]
            lambda: self.in_force,
            self.apply,
            TIMING,
            on_failure=self.failed,
        )

    async def apply(self, policy: Policy, origin: str) -> int:
        if self.refusals:
            raise PolicyRefused(self.refusals.pop(0), answered=True)
        self.in_force = policy
        self.applied.append(policy.sha256)
        return len(self.applied) + 1

    def failed(self) -> None:
        self.failures += 1


async def looked(world: World) -> None:
    """One round of following, from a change to its judgement."""
    await world.reloader._look()


async def test_a_file_that_rests_is_applied_once() -> None:
    source = Script("new")
    world = World(source)
    await looked(world)
    await looked(world)
    assert (world.applied, source.loaded) == (["new"], ["new"])


async def test_what_changes_at_every_look_is_not_read_until_it_rests() -> None:
    # "a" and "b" would be policies: a file cut in the right place is one.
    source = Script("a", "b", "c", "d", "d")
    world = World(source)
    await looked(world)
    assert (world.applied, source.loaded) == (["d"], ["d"])


async def test_a_write_that_goes_on_within_the_patience_is_no_alarm() -> None:
    source = Script("bad1", "bad1", "bad1", "bad1", "new", "new")
    world = World(source)
    await looked(world)
    assert (world.applied, world.failures, world.reloader.error) == (["new"], 0, ())


async def test_a_file_that_stays_broken_is_reported_once_however_often_it_is_looked_at() -> None:
    world = World(Script("bad"))
    for _ in range(3):
        await looked(world)
    assert (world.failures, world.reloader.error, world.applied) == (1, ("p:1:1: bad",), [])
    assert world.reloader.counters.failures == 1


async def test_a_nudge_reports_it_again() -> None:
    world = World(Script("bad"))
    await looked(world)
    world.reloader.nudge()
    await looked(world)
    assert world.failures == 2


async def test_a_file_that_never_rests_is_judged_in_the_end() -> None:
    world = World(Script(*(f"v{number}" for number in range(40))))
    await looked(world)
    assert len(world.applied) == 1


async def test_a_file_that_is_gone_is_reported_and_its_return_clears_it() -> None:
    source = Script("gone")
    world = World(source)
    source.load = lambda: (_ for _ in ()).throw(UnreadableFile(["p: cannot be read: gone"]))  # type: ignore[method-assign]
    await looked(world)
    gone = world.reloader.error
    source.looks = ["old"]
    await looked(world)
    assert (gone, world.reloader.error, world.failures) == (("p: cannot be read: gone",), (), 1)


async def test_a_refusal_of_the_worker_is_tried_again_and_reported_once_per_reason() -> None:
    world = World(Script("new"), "busy", "busy", "hung")
    for _ in range(4):
        await looked(world)
    assert (world.applied, world.failures, world.reloader.error) == (["new"], 2, ())


async def test_a_bug_while_following_does_not_end_the_following() -> None:
    source = Script("new")
    world = World(source)
    calls = 0
    apply = world.reloader._apply
    applied = asyncio.Event()

    async def fails_once(policy: Policy, origin: str) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("a bug")
        applied.set()
        return await apply(policy, origin)

    world.reloader._apply = fails_once
    async with started(world):
        world.reloader.nudge()
        await until(lambda: calls == 1)
        world.reloader.nudge()
        await asyncio.wait_for(applied.wait(), 10)
    assert world.applied == ["new"]


@asynccontextmanager
async def started(world: World) -> AsyncIterator[None]:
    world.reloader.start()
    try:
        yield
    finally:
        await world.reloader.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_a_caller_that_goes_away_does_not_stop_a_replacement_half_way() -> None:
    events: list[str] = []
    going, go_on = asyncio.Event(), asyncio.Event()

    class Staged:
        def commit(self) -> None:
            events.append("commit")

        def discard(self) -> None:
            events.append("discard")

    source: Any = Script("old")
    source.parse = lambda text: dataclasses.replace(OLD, sha256="new")
    source.stage = lambda text: Staged()
    world = World(source)
    apply: Callable[[Policy, str], Awaitable[int]] = world.reloader._apply

    async def slowly(policy: Policy, origin: str) -> int:
        going.set()
        await go_on.wait()
        return await apply(policy, origin)

    world.reloader._apply = slowly
    caller = asyncio.create_task(world.reloader.replace(b"new", "", "apply"))
    await going.wait()
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    go_on.set()
    await world.reloader.close()
    assert (caller.cancelled(), world.applied, events) == (True, ["new"], ["commit"])


async def test_a_file_that_cannot_be_replaced_after_all_puts_the_old_policy_back() -> None:
    class Staged:
        def commit(self) -> None:
            raise FairlaneError("POLICY_READ_ONLY", "the disk went away")

        def discard(self) -> None:
            raise AssertionError("commit has cleaned up")

    source: Any = Script("old")
    source.parse = lambda text: dataclasses.replace(OLD, sha256="new")
    source.stage = lambda text: Staged()
    world = World(source)
    with pytest.raises(FairlaneError, match="went away"):
        await world.reloader.replace(b"new", "", "apply")
    assert (world.applied, world.in_force.sha256) == (["new", "old"], "old")
