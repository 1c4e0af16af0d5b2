"""What the demo asks for, and the policies it asks under: files that the real loader takes."""

from __future__ import annotations

import pytest

from fairlane.demo.scenario import (
    LOADS,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    TIERS,
    TOKENS_PER_S,
    Load,
    Pattern,
    PhasePolicy,
    pace_of,
    paced,
    policy_text,
    prompt,
)
from fairlane.gateway.policy.loader import load_policy_text

BLOCK_SIZE = 16


@pytest.mark.parametrize("policy", PhasePolicy)
def test_the_policy_of_each_phase_is_valid_and_says_what_it_is_called(policy: PhasePolicy) -> None:
    loaded = load_policy_text(policy_text(policy).encode(), "tenants.yaml")
    assert (loaded.tiers_policy.value, tuple(loaded.tiers)) == (policy.value, TIERS)
    assert {load.tenant for load in LOADS} <= set(loaded.nodes)


def test_every_tenant_has_its_own_demo_key_in_every_phase() -> None:
    for policy in PhasePolicy:
        loaded = load_policy_text(policy_text(policy).encode(), "tenants.yaml")
        assert set(loaded.nodes_without_keys()) == {load.tenant for load in LOADS}


def test_each_load_arrives_as_it_says() -> None:
    def load(pattern: Pattern, size: int, every_s: float) -> Load:
        return Load("a/b", "gold", pattern, size, every_s, 1, 1, 1)

    arrivals = [
        list(load(Pattern.FLOOD, 3, 0).arrivals(10)),
        list(load(Pattern.STEADY, 1, 4).arrivals(10)),
        list(load(Pattern.BURSTS, 2, 4).arrivals(8)),
    ]
    assert arrivals == [[0, 0, 0], [2, 6], [2, 2, 6, 6]]


def test_a_burst_fits_and_leaves_no_room_so_that_preemption_is_seen() -> None:
    blocks = [load.size * -(-(load.prompt_tokens + load.output_tokens) // BLOCK_SIZE) for load in LOADS]
    gold, _, flood = blocks
    usable = NUM_BLOCKS - 1
    assert gold <= usable < gold + flood
    assert LOADS[0].size <= MAX_NUM_SEQS


def test_a_slower_machine_is_asked_less_often_within_reason() -> None:
    assert [pace_of(speed) for speed in (TOKENS_PER_S, TOKENS_PER_S / 2, 0.0, 1e9)] == [1.0, 2.0, 3.0, 0.25]
    gold, standard, batch = paced(LOADS, 2.0)
    assert (gold.says, standard.says, batch.says) == (
        "a burst of 8 every 16 s",
        "one request every 2.4 s",
        "12 requests at all times",
    )


def test_no_two_requests_begin_alike() -> None:
    prompts = {tuple(prompt(load, number, 49152)[:16]) for load in LOADS for number in range(50)}
    assert len(prompts) == len(LOADS) * 50
