"""How many KV blocks fit on a GPU beside everything else: weights, the runner's own state, the largest step and the graphs. What
can be measured before the cache is there is measured; the graphs, captured after it, are reckoned."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.worker.cascade import rule_for
from fairlane.worker.config import WorkerConfig
from fairlane.worker.cuda_graphs import bucket_sizes
from fairlane.worker.cuda_mixed import token_buckets
from fairlane.worker.cuda_runner import CudaRunner
from fairlane.worker.errors import ModelLoadError
from fairlane.worker.kv_cache import block_bytes
from fairlane.worker.loading import LoadedModel

log = logging.getLogger("fairlane.worker")

_RESERVE = 1 << 30  # for graphs beyond their tensors, library workspaces and fragmentation


def num_blocks_beside(
    loaded: LoadedModel, config: WorkerConfig, mixed_tokens: int, make_runner: Callable[[int], CudaRunner]
) -> int:
    """As many as the configured part of the device's memory holds. mixed_tokens: of the largest graph with prompt chunks.
    make_runner: a runner over so many blocks. Raises ModelLoadError if not even one usable block fits."""
    size = block_bytes(loaded.config, config.block_size, loaded.dtype)
    state, step = _measure(loaded, config, make_runner)
    graphs = graph_bytes(loaded, config, mixed_tokens, step)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    used = total - free
    beside = state + max(step, sampling_bytes(loaded, config)) + graphs + _RESERVE
    room = int(total * config.gpu_memory_utilization) - used - beside
    if room < 2 * size:
        raise ModelLoadError(out_of_memory(config))
    shown = [part / 2**30 for part in (used, state, step, graphs, room)]
    log.info("GiB: %.1f weights and context, %.1f state, %.1f a step, %.1f graphs; %.1f are left for KV", *shown)
    return room // size


def sampling_bytes(loaded: LoadedModel, config: WorkerConfig) -> int:
    """Logits of a full batch as they come, and as float32 for penalties; activations are gone by then."""
    return config.max_num_seqs * loaded.config.vocab_size * (loaded.dtype.itemsize + torch.float32.itemsize)


def graph_bytes(loaded: LoadedModel, config: WorkerConfig, mixed_tokens: int, step: int) -> int:
    """What the graphs keep, at most. step: activations of max_num_batched_tokens tokens.

    Their common pool holds the largest decode graph's activations and logits, and the largest mixed graph's; beside it, each
    graph's hidden states, those of small decode batches twice, all once more for the form with prefix groups, and the common
    inputs, of which block tables are the bulk.
    """
    model, seqs, itemsize = loaded.config, config.max_num_seqs, loaded.dtype.itemsize
    activations = step * (seqs + mixed_tokens) // config.max_num_batched_tokens
    logits = seqs * model.vocab_size * itemsize
    decode_rows = sum(bucket_sizes(seqs)) + sum(size for size in bucket_sizes(seqs) if size <= 8)
    if config.batch_invariant:
        decode_rows = 0
    mixed_rows = sum(token_buckets(mixed_tokens))
    if rule_for(loaded, config) is not None:
        decode_rows, mixed_rows = decode_rows + sum(bucket_sizes(seqs)), 2 * mixed_rows
    hidden = (decode_rows + mixed_rows) * model.hidden_size * itemsize
    tables = (3 * seqs + mixed_tokens // 16) * (loaded.max_model_len // config.block_size + 1) * torch.int32.itemsize
    return activations + logits + hidden + tables


def _measure(loaded: LoadedModel, config: WorkerConfig, make_runner: Callable[[int], CudaRunner]) -> tuple[int, int]:
    """Bytes of the runner's state, staging for swaps among it, the cache not counted, and of a largest step's activations."""
    before = torch.cuda.memory_allocated()
    tokens = min(config.max_num_batched_tokens, loaded.max_model_len)
    runner = make_runner(1 + -(-tokens // config.block_size))
    with_runner = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_largest_step(runner, config, loaded.max_model_len)
    return with_runner - before - runner.cache.pool.nbytes, torch.cuda.max_memory_allocated() - with_runner


def run_largest_step(runner: CudaRunner, config: WorkerConfig, max_model_len: int) -> None:
    """A step of max_num_batched_tokens prompt tokens, as far as the cache and max_num_seqs allow. Its sequences share their
    blocks: what they compute is of no use."""
    block_size = config.block_size
    tokens = min(config.max_num_batched_tokens, max_model_len, (runner.cache.num_blocks - 1) * block_size)
    slots = range(min(config.max_num_seqs, config.max_num_batched_tokens // tokens))
    table = list(range(1, 1 + -(-tokens // block_size)))
    new = [NewSequence(slot, [0] * tokens, tokens, [table], {"temperature": 0.0}) for slot in slots]
    scheduled = [ScheduledSequence(slot, 0, tokens, True) for slot in slots]
    runner.result(runner.launch(ScheduleOutput(0, new=new, scheduled=scheduled)))
    runner.result(runner.launch(ScheduleOutput(0, released_slots=list(slots))))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory left: torch says so of its own allocations, CUDA and its libraries each in their way,
    and a capture that ends with an error may hide it behind another."""
    known: BaseException | None = error
    while known is not None:
        text = str(known).lower()
        if isinstance(known, torch.cuda.OutOfMemoryError) or "out of memory" in text or "alloc_failed" in text:
            return True
        known = known.__cause__ or known.__context__
    return False


def num_blocks_that_fit(
    loaded: LoadedModel, config: WorkerConfig, mixed_tokens: int, make_runner: Callable[[int], CudaRunner]
) -> int:
    """num_blocks_beside once an attempt has failed, whose memory nobody holds any more; 0 if not even one usable block fits."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        return num_blocks_beside(loaded, config, mixed_tokens, make_runner)
    except ModelLoadError:
        return 0
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return 0


def weights_too_large() -> str:
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    return (
        f"the GPU's memory ({free:.1f} of {total:.1f} GiB free) does not hold the model's weights: take a smaller model, or free "
        "memory that other processes hold (nvidia-smi lists them)"
    )


def out_of_memory(config: WorkerConfig, fits: int = 0, block_bytes: int = 0) -> str:
    """What to do about it, for whoever starts the worker. fits: blocks that would fit beside the model and a step."""
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    names = ("max_num_batched_tokens", "max_num_seqs", "max_num_resident")
    settings = ", ".join(f"{name} ({getattr(config, name)})" for name in names)
    text = f"the GPU's memory ({free:.1f} of {total:.1f} GiB free) does not hold the model, its KV cache and a step; "
    if fits < 2:
        return f"{text}not one block fits: lower {settings} or max_model_len"
    mib = fits * block_bytes >> 20
    return (
        f"{text}about {(fits - 1) * config.block_size:,} tokens of KV cache fit: set kv_cache to at most {mib}MiB and num_blocks "
        f"to null; with less for {settings} or max_model_len, more fit"
    )
