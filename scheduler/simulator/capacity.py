"""How many requests a second a worker can finish, so that workloads can be sized in multiples of it. An estimate from the step
model: a full batch in a steady state, every sequence at its mean length."""

from __future__ import annotations

from fairlane.scheduler.simulator.shape import WorkerShape


def requests_per_s(shape: WorkerShape, prompt: float, output: float) -> float:
    """Of requests with so many prompt and output tokens on average, for one worker."""
    context = prompt + output / 2
    pool = shape.num_blocks * shape.block_size
    tokens_per_decode = 1 + prompt / output
    decoding = min(shape.max_num_seqs, pool / context, shape.max_num_batched_tokens / tokens_per_decode)
    chunk = decoding * prompt / output
    model = shape.step
    step_s = (
        model.fixed_s
        + model.sequence_s * decoding
        + model.linear_s(decoding * tokens_per_decode)
        + model.context_s * decoding * context
        + model.attention_s * chunk * prompt / 2
    )
    return decoding / (output * step_s)
