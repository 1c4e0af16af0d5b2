"""Every kernel once, on shapes so small that compute-sanitizer, which makes kernels hundreds of times slower, is through with
all of them in a few minutes. It is run as a program, by `make sanitize-gpu`; each result is compared with the reference, too.

    python tests/support/kernel_smoke.py [PART OF A NAME ...]

Tensors are as long as their content and not a byte longer, tables lead nowhere where nothing may be read, and the sizes are
multiples of nothing, so that an access out of bounds leaves its allocation. Exit codes: 0 all right, 1 a kernel is wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from draws import Ask, misdrawn, tensors
from fairlane.kernels import reference, reference_step
from fairlane.kernels.add_rmsnorm import add_rmsnorm, gather_add_rmsnorm, join_add_rmsnorm, rmsnorm
from fairlane.kernels.copy_blocks import copy_blocks, gather_blocks, scatter_blocks
from fairlane.kernels.decode_sched import DecodeWorkspace, Form
from fairlane.kernels.paged_decode import paged_decode
from fairlane.kernels.paged_prefill import paged_prefill
from fairlane.kernels.prefill_sched import plan_prefill
from fairlane.kernels.prefill_tuning import tuning_for
from fairlane.kernels.prefix_tuning import tuning_for as prefix_tuning
from fairlane.kernels.reference_step import DecodeInputs, SlotState
from fairlane.kernels.rope_norm_write import rope_norm_write
from fairlane.kernels.sample import SampleWorkspace, mode_for, sample
from fairlane.kernels.silu_mul import silu_mul
from fairlane.kernels.skinny_linear import skinny_linear
from fairlane.kernels.step_prep import step_prep, store_sampled
from fairlane.kernels.thin_linear import gated_linear, split_linear, thin_linear
from paged_oracle import PagedCase, dense_attention, make_case
from prefix_cases import share

NOWHERE = 2**31 - 1
EPS = 1e-6
SCALE = 0.2


class WrongError(Exception):
    """A kernel's result is not the reference's."""


class Smoke:
    """The cases, on one device and in one dtype. head_dim and longest are of the attention cases."""

    def __init__(self, device: torch.device, dtype: torch.dtype, head_dim: int = 128, longest: int = 900) -> None:
        self.device = device
        self.dtype = dtype
        self.head_dim = head_dim
        self.longest = longest
        self.cases: dict[str, Callable[[], None]] = {
            "rmsnorm": self.rmsnorm,
            "add_rmsnorm": self.add_rmsnorm,
            "gather_add_rmsnorm": self.gather_add_rmsnorm,
            "silu_mul": self.silu_mul,
            "copy_blocks": self.copy_blocks,
            "rope_norm_write": self.rope_norm_write,
            "step_prep": self.step_prep,
            "store_sampled": self.store_sampled,
            "skinny_linear": self.skinny_linear,
            "thin_linear": self.thin_linear,
            "split_linear": self.split_linear,
            "gated_linear": self.gated_linear,
            "sample": self.sample,
            "paged_decode short": lambda: self.decode([1, 7, 16], Form.SHORT),
            "paged_decode whole": lambda: self.decode([3, 0, 31, 133], Form.WHOLE),
            "paged_decode split": lambda: self.decode([1, 17, self.longest, self.longest // 2 + 3], Form.SPLIT),
            "paged_decode window": lambda: self.decode([1, self.longest], Form.SPLIT, window=self.longest - 29, softcap=20.0),
            "prefix_decode": self.cascade,
            "paged_prefill": lambda: self.prefill([(37, 37), (70, 21), (17, 2), (1, 1)]),
            "paged_prefill window": lambda: self.prefill([(61, 45), (19, 5)], window=13, softcap=20.0),
        }

    # -- rows ----------------------------------------------------------------------------------------------------------------

    def rmsnorm(self) -> None:
        x, weight = self.random(3, 997), self.random(997, seed=1)
        self.same(rmsnorm(x, weight, EPS), reference.rmsnorm(x.cpu(), weight.cpu(), EPS))

    def add_rmsnorm(self) -> None:
        x, residual, weight = self.random(3, 997), self.random(3, 997, seed=1), self.random(997, seed=2)
        expected = residual.cpu().clone()
        self.same(add_rmsnorm(x, residual, weight, EPS), reference.add_rmsnorm(x.cpu(), expected, weight.cpu(), EPS))
        self.same(residual, expected)

    def gather_add_rmsnorm(self) -> None:
        x, residual, weight = self.random(5, 997), self.random(5, 997, seed=1), self.random(997, seed=2)
        rows = self.ints([4, -1, 0])
        out, total = gather_add_rmsnorm(x, residual, rows, weight, EPS)
        sums = residual.cpu()[[4, 0]]
        self.same(out.cpu()[[0, 2]], reference.add_rmsnorm(x.cpu()[[4, 0]], sums, weight.cpu(), EPS))
        self.same(total.cpu()[[0, 2]], sums)
        self.same(out[1], torch.zeros(997, dtype=self.dtype))

    def silu_mul(self) -> None:
        gate_up = self.random(3, 2 * 1031)
        self.same(silu_mul(gate_up), reference.silu_mul(gate_up.cpu()))

    def skinny_linear(self) -> None:
        for outputs, width in ((37, 200), (16, 136), (35, 1032)):
            x, weight, bias = self.linear(1, outputs, width)
            self.same(skinny_linear(x, weight, bias), product(x, weight) + bias.cpu().double(), steps=4)

    def thin_linear(self) -> None:
        for rows, outputs, width in ((1, 37, 200), (19, 70, 136)):
            x, weight, bias = self.linear(rows, outputs, width)
            self.same(thin_linear(x, weight, bias), product(x, weight) + bias.cpu().double(), steps=4)

    def split_linear(self) -> None:
        x, weight, scales = self.linear(19, 70, 1160)
        residual = self.random(19, 70, seed=3)
        expected = residual.cpu().clone()
        summed = product(x, weight).to(self.dtype)
        normed = reference.add_rmsnorm(summed, expected, scales.cpu(), EPS)
        self.same(join_add_rmsnorm(split_linear(x, weight), residual, scales, EPS), normed, steps=4)
        self.same(residual, expected, steps=4)

    def gated_linear(self) -> None:
        x, weight, _ = self.linear(19, 2 * 37, 136)
        self.same(gated_linear(x, weight), reference.silu_mul(product(x, weight)), steps=8)

    def linear(self, rows: int, outputs: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, weight and something per output."""
        return self.random(rows, width), self.random(outputs, width, seed=1) / 16, self.random(outputs, seed=2)

    # -- the cache -----------------------------------------------------------------------------------------------------------

    def copy_blocks(self) -> None:
        pool = self.random(6, 3, 2, 1, 4, 5)
        expected, pairs = pool.cpu().clone(), self.ints([[1, 2], [2, 5], [-1, -1]])
        reference.copy_blocks(expected, pairs.cpu()[:2].long())
        copy_blocks(pool, pairs)
        self.same(pool, expected)
        ids, blocks = self.ints([5, 1]), torch.empty_like(pool[:2])
        self.same(gather_blocks(pool, ids, blocks), expected[[5, 1]])
        scatter_blocks(pool, ids.flip(0), blocks)
        expected[[1, 5]] = expected[[5, 1]]
        self.same(pool, expected)

    def rope_norm_write(self) -> None:
        heads, kv_heads, dim, positions = 6, 2, 80, 40
        angles = torch.arange(positions).unsqueeze(1) * 10000.0 ** -(torch.arange(dim // 2) / (dim // 2))
        cos, sin = (table.to(torch.float32).contiguous() for table in (angles.cos(), angles.sin()))
        pool = self.random(4, 3, 2, kv_heads, 8, dim)
        qkv, expected = self.random(5, (heads + 2 * kv_heads) * dim, seed=1), pool.cpu().clone()
        at, slots = self.ints([0, 39, 7, 0, 8], torch.int64), self.ints([9, 31, 17, -1, 8], torch.int64)
        q_norm, k_norm = self.random(dim, seed=2), self.random(dim, seed=3)
        q = reference.rope_norm_write(
            *(qkv.cpu().clone(), at.cpu(), slots.cpu(), cos, sin, expected[:, 1]),
            num_heads=heads,
            q_norm=q_norm.cpu(),
            k_norm=k_norm.cpu(),
        )
        found = rope_norm_write(
            *(qkv, at, slots, cos.to(self.device), sin.to(self.device), pool[:, 1]),
            num_heads=heads,
            q_norm=q_norm,
            k_norm=k_norm,
        )
        self.same(found, q, steps=4)
        self.same(pool, expected, steps=4)

    def step_prep(self) -> None:
        state, slots = self.state(), self.ints([2, -1, 0, 1, 9])
        out, expected = (DecodeInputs.allocate(5, 9, self.device) for _ in range(2))
        step_prep(slots, state, 8, out=out)
        reference_step.step_prep(slots, state, 8, out=expected)
        for name in DecodeInputs.__slots__:
            self.same(getattr(out, name), getattr(expected, name))

    def store_sampled(self) -> None:
        states = [self.state() for _ in range(2)]
        tokens = [torch.full((3, 80), -5, dtype=torch.int32, device=self.device) for _ in range(2)]
        slots, sampled = self.ints([2, -1, 0]), self.ints([11, 12, 13], torch.int64)
        for store, state, ids in zip((store_sampled, reference_step.store_sampled), states, tokens, strict=True):
            store(slots, sampled, ids, state.num_tokens, state.last_token)
        self.same(tokens[0], tokens[1])
        self.same(states[0].num_tokens, states[1].num_tokens)
        self.same(states[0].last_token, states[1].last_token)

    def state(self) -> SlotState:
        """Three sequences of 1, 33 and 72 tokens in blocks of 8, which table entries beyond them do not lead to."""
        table = torch.arange(1, 28, dtype=torch.int32, device=self.device).view(3, 9).clone()
        for slot, used in enumerate((1, 5, 9)):
            table[slot, used:] = NOWHERE
        return SlotState(self.ints([41, 42, 43]), self.ints([1, 33, 72]), table)

    # -- sampling ------------------------------------------------------------------------------------------------------------

    def sample(self) -> None:
        drawn = Ask(0.8, seed=3, position=5)
        for asks in ([Ask(0.0)] * 3, [Ask(0.0), drawn], [Ask(0.0), drawn, Ask(top_k=5), Ask(top_p=0.8), Ask(min_p=0.2)]):
            logits = self.random(len(asks), 1003) * 2
            workspace = SampleWorkspace.allocate(len(asks), 1003, self.device)
            ids, ok = (torch.zeros(len(asks), dtype=kind, device=self.device) for kind in (torch.int64, torch.int8))
            mode = mode_for((ask.temperature, ask.top_k, ask.top_p, ask.min_p) for ask in asks)
            logprobs = torch.zeros(len(asks), dtype=torch.float32, device=self.device)
            params = tensors(asks, self.device)
            sample(logits, params, workspace=workspace, out_ids=ids, out_ok=ok, out_logprobs=logprobs, mode=mode)
            wrong = misdrawn(logits.cpu(), asks, ids.cpu())
            self.require(bool(ok.cpu().all()) and not wrong, f"{mode}: {wrong}")

    # -- attention -----------------------------------------------------------------------------------------------------------

    def decode(self, lens: list[int], form: Form, *, window: int | None = None, softcap: float | None = None) -> None:
        case, table = self.paged([(length, 1) for length in lens])
        heads, kv_heads = case.q.shape[1], case.kv.shape[2]
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": self.head_dim, "device": self.device}
        windows: frozenset[int | None] = frozenset({window})
        workspace = DecodeWorkspace(
            len(lens), 64, dtype=self.dtype, windows=windows, **({"num_programs": 3} if self.interpreted else {}), **sizes
        )  # type: ignore[arg-type]
        seq_lens, limit = self.ints(lens), None if form is Form.SPLIT else max(lens)
        workspace.schedule(seq_lens, window, max_seq_len=limit)
        self.require(workspace.schedule_of(window).form is form, f"the form is {workspace.schedule_of(window).form}")
        q, kv = case.q.to(self.device), case.pool.to(self.device)[:, 1]
        out = torch.empty_like(q)
        options = {"scale": SCALE, "window": window, "softcap": softcap}
        paged_decode(q, kv, table, seq_lens, workspace=workspace, out=out, **options)  # type: ignore[arg-type]
        self.same(out.cpu(), dense_attention(case, SCALE, window, softcap), steps=8)

    def cascade(self) -> None:
        """Four sequences of which three share a chunk and a half, so that one chunk of each is computed for all of them."""
        case, _ = self.paged([(length, 1) for length in (self.longest, 40, self.longest - 5, self.longest)])
        group = share(case, [0, 2, 3], 384)
        heads, kv_heads = case.q.shape[1], case.kv.shape[2]
        workspace = DecodeWorkspace(
            4, 64, heads, kv_heads, self.head_dim, self.device, self.dtype,
            num_programs=3 if self.interpreted else None, prefix=prefix_tuning(self.head_dim, self.dtype),
        )  # fmt: skip
        self.require(workspace.groups is not None, "no room for groups")
        assert workspace.groups is not None
        workspace.groups.fill([group])
        seq_lens = self.ints(list(case.seq_lens))
        workspace.schedule(seq_lens, cascade=True)
        q, kv = case.q.to(self.device), case.pool.to(self.device)[:, 1]
        out = torch.empty_like(q)
        table = case.block_table.to(self.device)
        paged_decode(q, kv, table, seq_lens, scale=SCALE, workspace=workspace, out=out)
        self.require(int(workspace.groups.num_items[0]) > 0, "nothing was computed for several")
        self.same(out.cpu(), dense_attention(case, SCALE), steps=8)

    def prefill(self, lens: list[tuple[int, int]], *, window: int | None = None, softcap: float | None = None) -> None:
        case, table = self.paged(lens)
        heads, kv_heads = case.q.shape[1], case.kv.shape[2]
        tuning = tuning_for(self.head_dim, heads // kv_heads, self.dtype)
        starts, seq_lens = np.array(case.query_start_loc), np.array(case.seq_lens)
        plan = plan_prefill(starts, seq_lens, heads, kv_heads, tuning=tuning, device=self.device)
        q, kv = case.q.to(self.device), case.pool.to(self.device)[:, 1]
        out = paged_prefill(q, kv, table, plan, scale=SCALE, window=window, softcap=softcap)
        self.same(out.cpu(), dense_attention(case, SCALE, window, softcap), steps=8)

    def paged(self, lens: list[tuple[int, int]]) -> tuple[PagedCase, Tensor]:
        """A case of 6 heads on 2, and its table on the device, whose unused entries lead nowhere."""
        sizes = {"num_heads": 6, "num_kv_heads": 2, "head_dim": self.head_dim, "block_size": 16}
        case = make_case(lens, dtype=self.dtype, **sizes)
        for row, (seq_len, _) in enumerate(lens):
            case.block_table[row, -(-seq_len // 16) :] = NOWHERE
        return replace(case, q=case.q * 2), case.block_table.to(self.device)

    # -- what cases are made of ----------------------------------------------------------------------------------------------

    @property
    def interpreted(self) -> bool:
        return self.device.type == "cpu"

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype).to(self.device)

    def ints(self, values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def same(self, found: Tensor, expected: Tensor, *, steps: int = 2) -> None:
        """As near as so many roundings of the dtype at the size of the largest value; integers exactly."""
        exact = not found.is_floating_point()
        found, expected = found.cpu().double(), expected.cpu().double()
        error = float((found - expected).abs().nan_to_num(nan=float("inf")).max())
        bound = 0.0 if exact else steps * torch.finfo(self.dtype).eps * max(1.0, float(expected.abs().max()))
        self.require(found.shape == expected.shape and error <= bound, f"off by {error:.3g}, {bound:.3g} is allowed")

    @staticmethod
    def require(right: bool, text: str) -> None:
        if not right:
            raise WrongError(text)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x.cpu().double() @ weight.cpu().double().t()


def main(wanted: list[str]) -> int:
    smoke, began_s = Smoke(torch.device("cuda"), torch.bfloat16), time.monotonic()
    failed = 0
    for name, case in smoke.cases.items():
        if wanted and not any(part in name for part in wanted):
            continue
        try:
            case()
            torch.cuda.synchronize()
            verdict = "ok"
        except WrongError as error:
            failed += 1
            verdict = f"WRONG: {error}"
        print(f"[{time.monotonic() - began_s:6.1f} s] {name}: {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
