"""A decode's rope, norm, cache write and attention in one kernel, in the interpreter: the bits of the two kernels that it stands
for, in the result and in the whole cache. The new tokens' slots are NaN before, so whoever read one too early would show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from fairlane.kernels import reference
from fairlane.kernels.decode_sched import DecodeWorkspace, Form
from fairlane.kernels.decode_tuning import ChunkRule, DecodeTuning
from fairlane.kernels.new_tokens import NewTokens
from fairlane.kernels.paged_decode import paged_decode
from fairlane.kernels.prefix_groups import PrefixGroup
from fairlane.kernels.prefix_tuning import PrefixTuning
from fairlane.kernels.rope_decode import rope_decode
from paged_oracle import LAYER, PagedCase, dense_attention, make_case

COPY_BACK = "triton.runtime.interpreter.GridExecutor._restore_args_dev"  # of whole arguments: it would commit every page
NAN, NOWHERE, SCALE, EPS, POSITIONS = float("nan"), 2**31 - 1, 0.2, 1e-6, 700
TUNING = DecodeTuning(block_n=16, chunks=ChunkRule((32, 48, 64), (96, 128)), combine_rows=2)


@dataclass(frozen=True)
class Step:
    """new.qkv is as the product gave it. case.pool holds all keys but the new ones."""

    case: PagedCase
    new: NewTokens

    @property
    def lens(self) -> Tensor:
        return torch.tensor(self.case.seq_lens, dtype=torch.int32)


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_step(
    lens: list[int], num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16, *, block_size: int = 16,
    dtype: torch.dtype = torch.float32, normed: bool = False, unwritten: tuple[int, ...] = (), seed: int = 0,
) -> Step:  # fmt: skip
    """Tables beyond a sequence lead nowhere, and the null block is as poisonous as the rest. unwritten: rows whose token has no
    slot though they have keys."""
    case = make_case(
        [(n, 1) for n in lens], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=dtype, seed=seed,
    )  # fmt: skip
    slots = []
    for row, n in enumerate(lens):
        case.block_table[row, -(-n // block_size) :] = NOWHERE
        slots.append(-1)
        if n:
            block, offset = int(case.block_table[row, (n - 1) // block_size]), (n - 1) % block_size
            if row not in unwritten:
                case.pool[block, :, :, :, offset] = NAN
                slots[row] = block * block_size + offset
    case.pool[0] = NAN
    half = head_dim // 2
    angles = torch.arange(POSITIONS).double().unsqueeze(1) * (10000.0 ** -(torch.arange(half).double() / half))
    norms = [random(head_dim, seed=seed + n, dtype=dtype) if normed else None for n in (1, 2)]
    qkv = random(len(lens), (num_heads + 2 * num_kv_heads) * head_dim, seed=seed + 3, dtype=dtype)
    positions = torch.tensor([max(n - 1, 0) for n in lens], dtype=torch.int64)
    new = NewTokens(
        qkv, positions, torch.tensor(slots, dtype=torch.int64), angles.cos().float(), angles.sin().float(), *norms, EPS
    )
    return Step(case, new)


@dataclass(frozen=True)
class Result:
    """Of a call on copies: out, the cache, and qkv. form: the schedule's."""

    out: Tensor
    pool: Tensor
    qkv: Tensor
    form: Form


def run(
    step: Step, fuse_rows: int, *, window: int | None = None, softcap: float | None = None, max_seq_len: int | None = None,
    group: PrefixGroup | None = None, max_items: int = 60, num_programs: int = 3, num_warps: int = 4,
) -> Result:  # fmt: skip
    """Also claims that nothing around `out` was written."""
    case, lens = step.case, step.lens
    batch, num_heads, head_dim = case.q.shape
    workspace = DecodeWorkspace(
        batch + 1, max_items, num_heads, case.kv.shape[2], head_dim, torch.device("cpu"), case.q.dtype,
        block_size=case.kv.shape[3], windows=frozenset({window}),
        tuning=replace(TUNING, fuse_rope_rows=fuse_rows, num_warps=num_warps),
        num_programs=num_programs, prefix=None if group is None else PrefixTuning(block_n=16),
    )  # fmt: skip
    workspace.part_o.fill_(NAN)
    workspace.part_lse.fill_(NAN)
    if group is not None and workspace.groups is not None:
        workspace.groups.fill([group])
    workspace.schedule(lens, window, max_seq_len=max_seq_len, cascade=group is not None)
    pool, qkv = case.pool.clone(), torch.full((batch, step.new.qkv.shape[1] + 8), NAN, dtype=case.q.dtype)[:, 4:-4]
    qkv.copy_(step.new.qkv)
    around = torch.full((batch + 2, num_heads + 2, head_dim), NAN, dtype=case.q.dtype)
    out = around[1:-1, 1:-1]
    result = rope_decode(
        replace(step.new, qkv=qkv), pool[:, LAYER], case.block_table, lens,
        num_heads=num_heads, scale=SCALE, workspace=workspace, out=out, window=window, softcap=softcap,
    )  # fmt: skip
    assert result is out
    found = out.clone()
    out.fill_(NAN)
    assert bool(around.isnan().all())
    return Result(found, pool, qkv, workspace.schedule_of(window).form)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def same_bits(step: Step, *, fused: bool = True, **options: object) -> bool:
    """Whether result and cache have the bits of the two kernels, and qkv shows that one kernel did it (or, if not `fused`, that
    two did): that one only reads it."""
    one, two = run(step, 64, **options), run(step, 0, **options)  # type: ignore[arg-type]
    only_read = torch.equal(bits(one.qkv), bits(step.new.qkv))
    equal = torch.equal(bits(one.out), bits(two.out)) and torch.equal(bits(one.pool), bits(two.pool))
    assert not torch.equal(bits(two.qkv), bits(step.new.qkv))
    return equal and only_read is fused and bool(one.out.isfinite().all())


@pytest.mark.parametrize(
    ("group_size", "normed"), [(1, False), (1, True), (2, True), (4, False), (4, True), (5, True), (8, False)]
)
def test_query_heads_that_share_a_kv_head(group_size: int, normed: bool) -> None:
    assert same_bits(make_step([5, 64], 2 * group_size, 2, normed=normed))


@pytest.mark.parametrize(
    ("head_dim", "normed"), [(64, False), (64, True), (80, True), (96, False), (96, True), (128, False), (128, True), (256, True)]
)
def test_head_dims(head_dim: int, normed: bool) -> None:
    assert same_bits(make_step([37, 3], 4, 2, head_dim, normed=normed))


@pytest.mark.parametrize("normed", [False, True])
def test_half_precision(normed: bool) -> None:
    assert same_bits(make_step([50, 33, 1], 4, 2, 64, dtype=torch.float16, normed=normed))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_lengths_around_tile_block_and_chunk_boundaries(block_size: int) -> None:
    step = make_step([1, 16, 17, 33, 64, 97], block_size=block_size, normed=True)
    assert same_bits(step) and run(step, 64).form is Form.SPLIT


@pytest.mark.parametrize("window", [1, 16, 17, 45, 200])
def test_a_window_whose_older_blocks_are_gone(window: int) -> None:
    step = make_step([1, 16, 45, 70])
    for row, n in enumerate(step.case.seq_lens):
        step.case.block_table[row, : max(0, n - window) // 16] = NOWHERE
    assert same_bits(step, window=window, fused=window > 16)  # the short kernel takes no new tokens


def test_softcap() -> None:
    assert same_bits(make_step([7, 50], 4, 4), softcap=2.0)


def test_rows_without_keys_are_exactly_zero_and_write_nothing() -> None:
    step = make_step([0, 9, 0, 40, 0], 6, 3, normed=True)
    step.case.block_table[0] = 0  # a padding row of a captured graph
    found = run(step, 64)
    assert same_bits(step) and int(bits(found.out[[0, 2, 4]]).count_nonzero()) == 0


def test_a_token_without_a_slot_is_not_written_and_attends_to_what_its_table_names() -> None:
    step = make_step([40, 21, 33], unwritten=(1,))
    assert same_bits(step)


def test_a_stale_table_entry_that_names_a_new_tokens_block_is_not_followed() -> None:
    # Row 0 still lists, behind its end, the block that row 1 now writes to.
    step = make_step([40, 70])
    step.case.block_table[0, 3:] = step.case.block_table[1, 4]
    assert same_bits(step)


@pytest.mark.parametrize(("num_items", "written"), [(2, False), (3, True)])
def test_only_the_item_with_the_last_key_writes_it(num_items: int, written: bool) -> None:
    step = make_step([70])  # the items of 32, 32 and 6 keys, in this order
    case, pool = step.case, step.case.pool.clone()
    workspace = DecodeWorkspace(1, 8, 4, 2, 16, torch.device("cpu"), torch.float32, tuning=TUNING, num_programs=2)
    workspace.schedule(step.lens)
    workspace.schedule_of(None).num_items.fill_(num_items)
    rope_decode(
        step.new, pool[:, LAYER], case.block_table, step.lens,
        num_heads=4, scale=SCALE, workspace=workspace, out=torch.empty(1, 4, 16),
    )  # fmt: skip
    assert torch.equal(bits(pool), bits(case.pool)) is not written


@pytest.mark.parametrize("num_programs", [1, 2, 64])
def test_whoever_draws_an_item(num_programs: int) -> None:
    assert same_bits(make_step([100, 20, 64]), num_programs=num_programs)


@pytest.mark.parametrize("max_items", [0, 3])
def test_a_sequence_that_is_left_whole_writes_its_key_too(max_items: int) -> None:
    assert same_bits(make_step([90, 17, 90]), max_items=max_items)


@pytest.mark.parametrize(("max_seq_len", "form", "fused"), [(32, Form.WHOLE, True), (16, Form.SHORT, False)])
def test_forms_for_short_sequences(max_seq_len: int, form: Form, fused: bool) -> None:
    step = make_step([16, 0, 1, 13])
    assert same_bits(step, max_seq_len=max_seq_len, fused=fused) and run(step, 64, max_seq_len=max_seq_len).form is form


def test_steps_with_prefix_groups_take_two_kernels() -> None:
    step = make_step([70, 75])
    step.case.block_table[1, :4] = step.case.block_table[0, :4]
    assert same_bits(step, group=PrefixGroup([0, 1], 64), fused=False)


def test_groups_that_fill_the_tile_take_two_kernels() -> None:
    assert same_bits(make_step([20], 16, 1), fused=False)


def test_models_that_norm_one_of_q_and_k_take_two_kernels() -> None:
    step = make_step([20, 5], normed=True)
    assert same_bits(replace(step, new=replace(step.new, k_norm=None)), fused=False)


@pytest.mark.parametrize(("normed", "num_warps", "fused"), [(True, 4, True), (True, 16, False), (False, 16, True)])
def test_a_norm_that_would_be_summed_in_another_order_takes_two_kernels(normed: bool, num_warps: int, fused: bool) -> None:
    # Of 64 columns a thread of 128 holds 4 neighbours at float32, one of 512 holds 2.
    assert same_bits(make_step([20, 5], 4, 2, 64, normed=normed), num_warps=num_warps, fused=fused)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_fusing_ends_where_the_tuning_says(rows: int) -> None:
    step = make_step([5] * rows)
    assert torch.equal(run(step, 3).qkv, step.new.qkv) is (rows <= 3)


def test_positions_may_be_of_32_bits() -> None:
    step = make_step([33, 5])
    assert same_bits(replace(step, new=replace(step.new, positions=step.new.positions.int())))


@pytest.mark.parametrize("normed", [False, True])
def test_the_result_is_the_references(normed: bool) -> None:
    step = make_step([70, 1, 16, 33], 6, 2, 32, normed=normed)
    case, new = step.case, replace(step.new, qkv=step.new.qkv.clone())
    q = reference.rope_norm_write(
        new.qkv, new.positions, new.slot_mapping, new.cos, new.sin, case.kv.clone(),
        num_heads=6, q_norm=new.q_norm, k_norm=new.k_norm, eps=EPS,
    )  # fmt: skip
    turned = new.qkv.view(4, 10, 32)
    for row, n in enumerate(case.seq_lens):
        case.keys[row][n - 1], case.values[row][n - 1] = turned[row, 6:8], turned[row, 8:]
    truth = dense_attention(replace(case, q=q), SCALE)
    assert float((run(step, 64).out.double() - truth).abs().max()) < 1e-5


def test_a_row_has_the_same_bits_in_any_company() -> None:
    lens = [130, 3, 97, 33]
    step = make_step(lens, normed=True)
    together = run(step, 64).out
    alone = []
    for row in range(4):
        case, new = step.case, step.new
        one = replace(case, q=case.q[row : row + 1], block_table=case.block_table[row : row + 1], seq_lens=[lens[row]])
        token = {name: getattr(new, name)[row : row + 1].clone() for name in ("qkv", "positions", "slot_mapping")}
        alone.append(run(Step(one, replace(new, **token)), 64).out)
    assert torch.equal(bits(torch.cat(alone)), bits(together))


def test_blocks_beyond_two_to_the_31_elements_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks 8 and 9 start at elements 2^31 and more; offsets of 32 bits would wrap to places before the cache."""
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    step = make_step([20], 2, 1, dtype=torch.float16)
    case, stride = step.case, 2**28
    memory = torch.empty(9 * stride + 2**10, dtype=torch.float16)
    far = memory.as_strided((10, *case.kv.shape[1:]), (stride, *case.kv[0].contiguous().stride()))
    for place, block in zip((9, 8), case.block_table[0, :2].tolist(), strict=True):
        far[place] = case.kv[block]
    workspace = DecodeWorkspace(1, 4, 2, 1, 16, torch.device("cpu"), torch.float16, tuning=TUNING, num_programs=2)
    workspace.schedule(step.lens)
    out = torch.full_like(case.q, NAN)
    table, slot = torch.tensor([[9, 8, NOWHERE]], dtype=torch.int32), torch.tensor([8 * 16 + 3])
    new = replace(step.new, slot_mapping=slot)
    rope_decode(new, far, table, step.lens, num_heads=2, scale=SCALE, workspace=workspace, out=out)
    near = run(step, 0)
    written = bits(far[8]), bits(near.pool[int(case.block_table[0, 1]), LAYER])
    assert torch.equal(bits(out), bits(near.out)) and torch.equal(*written)


def test_a_step_without_sequences_does_nothing() -> None:
    assert run(make_step([]), 64).out.shape == (0, 4, 16)


def bad_calls() -> dict[str, Callable[[NewTokens], NewTokens]]:
    return {
        "width": lambda new: replace(new, qkv=new.qkv[:, :-16]),
        "rows": lambda new: replace(new, qkv=new.qkv[:1]),
        "columns apart": lambda new: replace(new, qkv=new.qkv.t().contiguous().t()),
        "dtype": lambda new: replace(new, qkv=new.qkv.half()),
        "positions": lambda new: replace(new, positions=new.positions.float()),
        "too few positions": lambda new: replace(new, positions=new.positions[:1]),
        "slots int32": lambda new: replace(new, slot_mapping=new.slot_mapping.int()),
        "table width": lambda new: replace(new, cos=torch.ones(4, 16)),
        "table dtype": lambda new: replace(new, sin=new.sin.double()),
        "norm width": lambda new: replace(new, q_norm=torch.ones(8)),
        "norm dtype": lambda new: replace(new, k_norm=torch.ones(16).half()),
    }


@pytest.mark.parametrize("what", sorted(bad_calls()))
@pytest.mark.parametrize("fuse_rows", [0, 64])
def test_what_does_not_fit_is_refused(what: str, fuse_rows: int) -> None:
    step = make_step([5, 6], normed=True)
    workspace = DecodeWorkspace(
        2, 8, 4, 2, 16, torch.device("cpu"), torch.float32, tuning=replace(TUNING, fuse_rope_rows=fuse_rows), num_programs=2
    )
    workspace.schedule(step.lens)
    spoilt, case = bad_calls()[what](step.new), step.case
    with pytest.raises(ValueError, match=r"must be|queries"):
        rope_decode(
            spoilt, case.kv, case.block_table, step.lens,
            num_heads=4, scale=SCALE, workspace=workspace, out=torch.empty(2, 4, 16),
        )  # fmt: skip


@pytest.mark.parametrize("reason", ["another q", "a schedule of the short kernel", "one norm"])
def test_new_tokens_where_the_kernel_cannot_take_them_are_refused(reason: str) -> None:
    step = make_step([5, 6], normed=True)
    workspace = DecodeWorkspace(2, 8, 4, 2, 16, torch.device("cpu"), torch.float32, tuning=TUNING, num_programs=2)
    workspace.schedule(step.lens, max_seq_len=16 if reason == "a schedule of the short kernel" else None)
    case, new = step.case, replace(step.new, k_norm=None) if reason == "one norm" else step.new
    q = case.q if reason == "another q" else new.qkv[:, :64].unflatten(1, (4, 16))
    with pytest.raises(ValueError, match=r"query heads|no new tokens|both given"):
        paged_decode(
            q, case.kv, case.block_table, step.lens, scale=SCALE, workspace=workspace, out=torch.empty(2, 4, 16), new=new
        )


@settings(max_examples=12, derandomize=True, deadline=None)
@given(st.data())
def test_any_mix_of_sequences(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([8, 16, 32, 64]))
    edges = [0, 2, block_size - 1, block_size, block_size + 1, 31, 32, 33, 65, 96, 97]
    lens = [20, *data.draw(st.lists(st.sampled_from(edges), max_size=3))]
    kv_heads, group_size = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2, 4, 5, 7, 8]))
    step = make_step(
        lens, kv_heads * group_size, kv_heads, block_size=block_size, normed=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    assert same_bits(step, window=data.draw(st.sampled_from([None, 17, 40])), softcap=data.draw(st.sampled_from([None, 2.0])))
