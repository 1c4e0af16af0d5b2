"""Swapping on the CPU worker: the tokens are those of a cache with room for everybody, at every pipeline depth, and nothing is
computed twice; a block that was away has the bits it had; a host pool that cannot be is refused with what can."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fairlane.scheduler.executor import StepError
from fairlane.scheduler.output import ScheduleOutput
from fairlane.scheduler.request import RequestId, SamplingParams
from fairlane.worker import host_memory
from fairlane.worker.config import WorkerConfig
from fairlane.worker.errors import ModelLoadError
from fairlane.worker.host_memory import available_bytes
from local_engine import engine, prompt_request
from tiny_models import executor_for, save_tiny

DRAWN = SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.5, seed=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    return path


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 211, (length,), generator=generator).tolist() for length in (30, 9, 41, 17, 25, 33)]


def run(folder: Path, depth: int, sampling: SamplingParams, **settings: object) -> tuple[list[list[int]], Sequence[int]]:
    """Tokens of all prompts, and (swaps out, in, tokens computed again, preemptions)."""
    config = WorkerConfig(
        model=str(folder), block_size=8, threads=1, max_num_seqs=6, max_num_batched_tokens=32, pipeline_depth=depth,
        **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    with engine(config) as driver:
        for number, prompt in enumerate(prompts()):
            driver.add(prompt_request(number, prompt, 40, sampling))
        driver.run_until_idle(5000)
        stats = driver.scheduler.stats()
        assert (driver.blocks.num_used_blocks, stats.host_blocks_used) == (0, 0)
        tokens = [driver.transcripts[RequestId(number)].token_ids for number in range(len(prompts()))]
        return tokens, (stats.swaps_out, stats.swaps_in, stats.recomputed_tokens, stats.preemptions)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), DRAWN])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_cache_too_small_for_all_gives_the_tokens_of_a_large_one(
    folder: Path, depth: int, sampling: SamplingParams, prefix_caching: bool
) -> None:
    wanted, roomy = run(folder, depth, sampling, num_blocks=64)
    # The longest request needs 10 of the 13 blocks, all together 56.
    found, (out, back, recomputed, preemptions) = run(
        folder, depth, sampling, num_blocks=14, host_kv_cache=1 << 20, prefix_caching=prefix_caching
    )
    assert found == wanted and tuple(roomy) == (0, 0, 0, 0)
    assert out == back == preemptions > 0 == recomputed


def test_a_block_that_was_away_has_the_bits_it_had(folder: Path) -> None:
    executor = executor_for(folder, num_blocks=8, host_kv_cache=1 << 20)
    pool = executor.runner.cache.pool
    with torch.inference_mode():
        pool[1:] = torch.randn(pool[1:].shape, generator=torch.Generator().manual_seed(1))
        pool[3, 0, 0, 0, 0, 0] = float("nan")
    before = pool.clone()
    # In the same step 4 and 3 go out, 4's new owner gets a copy of 5, and 7 a block that went out earlier.
    executor.runner.execute(ScheduleOutput(1, swap_out=[(2, 6)]))
    executor.runner.execute(ScheduleOutput(2, swap_out=[(4, 0), (3, 5)], copies=[(5, 4)], swap_in=[(6, 7)]))
    executor.runner.execute(ScheduleOutput(3, swap_in=[(5, 1), (0, 5)]))
    expected = before[[0, 3, 2, 3, 5, 4, 6, 2]]
    assert torch.equal(pool.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(
    "pairs", [{"swap_out": [(0, 1)]}, {"swap_out": [(8, 1)]}, {"swap_in": [(-1, 1)]}, {"swap_in": [(10**6, 1)]}]
)
def test_pairs_that_name_no_block_fail_the_step(folder: Path, pairs: dict[str, list[tuple[int, int]]]) -> None:
    executor = executor_for(folder, num_blocks=8, host_kv_cache=1 << 20)
    with pytest.raises(StepError, match="cannot swap"):
        executor.result(executor.launch(ScheduleOutput(1, **pairs)))  # type: ignore[arg-type]


def test_a_worker_says_how_many_host_blocks_it_has(folder: Path) -> None:
    # A block: 3 layers, keys and values, 2 heads, 8 slots, 16 values of 4 bytes.
    size = 3 * 2 * 2 * 8 * 16 * 4
    sizes = [executor_for(folder, host_kv_cache=bytes_).info.num_host_blocks for bytes_ in (None, 1 << 20)]
    assert sizes == [0, (1 << 20) // size]


def test_a_pool_larger_than_memory_is_refused_with_what_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 5 << 20)
    with pytest.raises(ModelLoadError, match="host_kv_cache of 6MiB is more memory than this machine has left; 5MiB fit"):
        executor_for(folder, host_kv_cache=6 << 20)


def test_a_pool_smaller_than_a_block_is_refused_with_what_it_takes(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="host_kv_cache of 5000 bytes is too small: a block takes .* set at least 1MiB"):
        executor_for(folder, host_kv_cache=5000)


MEMINFO = "MemTotal:       2000 kB\nMemFree:         100 kB\nMemAvailable:    900 kB\n"


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 900 << 10), ("max", 900 << 10), ("600000", 600_000 - 250_000 + 50_000), ("100", 0)]
)
def test_memory_left_is_the_machines_or_the_containers(tmp_path: Path, limit: str | None, expected: int) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("250000\n")
        (tmp_path / "memory.stat").write_text("anon 200000\ninactive_file 50000\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == expected


def test_where_nothing_tells_nothing_is_refused(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path) is None
