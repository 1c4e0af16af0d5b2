"""The policy in force and how another takes its place: the worker first, so that no request names a tier it does not know, then
everything in the gateway in one go. Where a policy comes from is reload.py's; what it says is policy/model.py's."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Collection

from fairlane.gateway.admission import Admission
from fairlane.gateway.auth import PolicyAuthenticator
from fairlane.gateway.history import PolicyHistory
from fairlane.gateway.policy.model import Policy
from fairlane.gateway.worker_client import PolicyRefused, WorkerClient
from fairlane.scheduler.tenancy import PolicySnapshot

logger = logging.getLogger("fairlane.gateway.policy")


class PolicyInForce:
    """Generations grow by one with each policy, over restarts too where there is a history."""

    def __init__(
        self,
        policy: Policy,
        generation: int,
        worker: WorkerClient,
        authenticator: PolicyAuthenticator,
        admission: Admission,
        history: PolicyHistory,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.policy = policy
        self.generation = generation
        self.applied_s = wall()  # since the epoch
        self._worker = worker
        self._authenticator = authenticator
        self._admission = admission
        self._history = history
        self._wall = wall
        self._applying = asyncio.Lock()
        self._snapshot = policy.snapshot(generation)

    async def start(self) -> None:
        """The worker gets the first policy, and the history an entry."""
        self._worker.start(self._snapshot)
        await self._record("start")

    async def apply(self, policy: Policy, origin: str) -> int:
        """Puts a policy in force and returns its generation. Raises PolicyRefused, and everything stays as it was; a request
        is judged by the one it was authenticated by, and what was admitted goes on."""
        async with self._applying:
            generation = self.generation + 1
            snapshot = with_retired(policy.snapshot(generation), self._snapshot, self.policy, self._admission.in_flight_by_tier())
            try:
                await self._worker.apply_policy(snapshot)
            except PolicyRefused as refusal:
                if not refusal.answered:
                    self._stay()
                    await self._record("kept")
                raise
            except asyncio.CancelledError:
                self._stay()
                raise
            self._snapshot = snapshot
            self.policy, self.generation, self.applied_s = policy, generation, self._wall()
            self._authenticator.replace(policy, generation)
            self._admission.members.keep_only(policy.nodes)
            logger.info("policy generation %d in force (%s), sha256 %s", generation, origin, policy.sha256)
            for warning in policy.warnings:
                logger.warning("%s", warning)
            await self._record(origin)
            return generation

    def _stay(self) -> None:
        """Nobody knows whether the worker has taken the new policy: the old one becomes a newer generation still, because
        workers refuse older ones."""
        self.generation += 2
        self._snapshot = dataclasses.replace(self._snapshot, generation=self.generation)
        self._worker.restate(self._snapshot)
        self._authenticator.replace(self.policy, self.generation)

    async def _record(self, origin: str) -> None:
        policy, generation = self.policy, self.generation
        await asyncio.to_thread(self._history.record, generation, policy.sha256, policy.text, origin)


def with_retired(new: PolicySnapshot, before: PolicySnapshot, replaced: Policy, in_flight: Collection[str]) -> PolicySnapshot:
    """The new snapshot, with tiers it no longer has but which requests may still name that have not reached the worker: those
    of the policy being replaced, and older ones in flight. They keep their order and lose their guarantee."""
    names = {tier.name for tier in new.tiers}
    kept = tuple(
        dataclasses.replace(tier, min_share=0.0)
        for tier in before.tiers
        if tier.name not in names and (tier.name in replaced.tiers or tier.name in in_flight)
    )
    return dataclasses.replace(new, tiers=(*new.tiers, *kept))
