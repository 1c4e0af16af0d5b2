"""KV quotas on the CPU worker, with a real model: the limit holds in every step, the guarantee is taken back from a higher
tier, and everybody still gets the tokens that a cache with room for all gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_world import snapshot
from fairlane.scheduler.request import Request, RequestId
from fairlane.scheduler.tenancy import KVAmount, NodeShare
from fairlane.worker.config import WorkerConfig
from local_engine import GREEDY, engine
from tiny_models import save_tiny

BLOCK = 8
QUOTAS = (
    NodeShare("o/hoarder", kv_limit=KVAmount(tokens=14 * BLOCK)),
    NodeShare("o/guarded", kv_guarantee=KVAmount(tokens=10 * BLOCK)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    return path


def asked() -> list[Request]:
    """Two higher tenants that would take everything, and a low one that comes last. At most 8 blocks each."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(8):
        tenant, tier = ("hoarder", "gold") if number < 4 else ("borrower", "gold") if number < 6 else ("guarded", "batch")
        prompt = tuple(torch.randint(3, 211, (24 + number,), generator=generator).tolist())
        found.append(Request(RequestId(number), f"o/{tenant}", tier, prompt, 30, GREEDY, cache_domain=f"tenant:o/{tenant}"))
    return found


def run(folder: Path, num_blocks: int, nodes: tuple[NodeShare, ...], depth: int, **settings: object) -> tuple[object, ...]:
    """Tokens of all, the hoarder's most blocks, and evictions by reason. The low tenant comes when the others run."""
    config = WorkerConfig(
        model=str(folder), block_size=BLOCK, num_blocks=num_blocks, threads=1, max_num_seqs=8, max_num_batched_tokens=128,
        pipeline_depth=depth, **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    most = 0
    with engine(config) as driver:
        driver.apply(replace(snapshot(generation=2), nodes=nodes))
        for one in asked()[:6]:
            driver.add(one)
        for turn in range(2000):
            if turn == 6:
                for one in asked()[6:]:
                    driver.add(one)
            busy = driver.turn()
            most = max(most, driver.blocks.used_by("tenant:o/hoarder"))
            if not busy and turn > 6 and not driver.scheduler.num_unfinished:
                break
        tokens = [driver.transcripts[one.request_id].token_ids for one in asked()]
        return tokens, most, driver.scheduler.stats().evictions_by_reason


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("settings", [{}, {"host_kv_cache": 1 << 20}])
def test_the_limit_holds_the_guarantee_is_given_back_and_nobody_loses_a_token(
    folder: Path, depth: int, settings: dict[str, object]
) -> None:
    wanted, roomy, none = run(folder, 80, (), depth)
    tokens, most, reasons = run(folder, 25, QUOTAS, depth, **settings)
    assert isinstance(roomy, int) and isinstance(most, int) and isinstance(reasons, dict)
    assert (tokens == wanted, roomy > 14, most <= 14, none, reasons.get("kv_guarantee", 0) > 0) == (True, True, True, {}, True)
