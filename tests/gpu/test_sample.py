"""The sampling kernels on the device, at a real vocabulary's size: the torch reference's tokens in every mode, type and
distribution, whatever the company, in a CUDA graph as outside one."""

from __future__ import annotations

from device import cuda

# isort: split
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from draws import Ask, misdrawn, tensors
from fairlane.kernels import reference_sampling as reference
from fairlane.kernels.sample import SampleMode, SampleWorkspace, mode_for, sample
from fairlane.kernels.sample_noise import divide, minus_log

VOCAB, ODD = 128256, 50003  # Llama 3's; one that is no multiple of anything
ROWS = 64


def rows_of(count: int, vocab: int, scale: float, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Logits whose rows lie apart, with NaN between them."""
    generator = torch.Generator(device=cuda).manual_seed(seed)
    apart = torch.full((count, vocab + 16), float("nan"), dtype=dtype, device=cuda)
    apart[:, :vocab] = (torch.randn(count, vocab, generator=generator, device=cuda) * scale).to(dtype)
    return apart[:, :vocab]


class Sampler:
    """One call's buffers, poisoned before each call."""

    def __init__(self, count: int, vocab: int, index: torch.dtype = torch.int64) -> None:
        self.workspace = SampleWorkspace.allocate(count, vocab, cuda)
        self.ids = torch.full((count,), -7, dtype=index, device=cuda)
        self.ok = torch.zeros(count, dtype=torch.bool, device=cuda)
        self.logprobs = torch.full((count,), float("inf"), device=cuda)

    def poison(self) -> None:
        for name in ("best", "peak", "mass", "raw_peak", "raw_mass"):
            getattr(self.workspace, name).fill_(float("nan"))
        self.workspace.token.fill_(2**31 - 1)
        self.workspace.listed.fill_(2**31 - 1)
        self.ids.fill_(-7)
        self.ok.fill_(False)
        self.logprobs.fill_(float("inf"))

    def launch(self, logits: Tensor, params: reference.SamplingTensors, mode: SampleMode) -> None:
        out = {"out_ids": self.ids, "out_ok": self.ok, "out_logprobs": self.logprobs}
        sample(logits, params, workspace=self.workspace, mode=mode, **out)

    def __call__(self, logits: Tensor, asks: list[Ask], mode: SampleMode | None = None) -> Tensor:
        self.poison()
        mode = mode or mode_for((ask.temperature, ask.top_k, ask.top_p, ask.min_p) for ask in asks)
        self.launch(logits, tensors(asks, cuda), mode)
        return self.ids.clone()


def asks_of(count: int, *, filters: bool, position: int = 0) -> list[Ask]:
    """Every kind of row, greedy ones too."""
    heats = (1.0, 0.7, 1.3, 0.0, 0.2)
    ks, ps, least = (0, 1, 50, 7, 1000, 0, 20000), (1.0, 0.9, 0.5, 0.99, 0.01, 0.0), (0.0, 0.0, 0.05, 0.0)
    return [
        Ask(
            temperature=heats[row % 5],
            top_k=ks[row % 7] if filters else 0,
            top_p=ps[row % 6] if filters else 1.0,
            min_p=least[row % 4] if filters else 0.0,
            seed=(row - 20) * 0x1234567890AB,
            position=position + row,
            sibling=row % 3,
        )
        for row in range(count)
    ]


@triton.jit
def _log_probe(x, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, minus_log(tl.load(x + at)))


@triton.jit
def _divide_probe(x, divisor, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * N + tl.arange(0, N)
    d = tl.load(divisor)
    tl.store(out + at, divide(tl.load(x + at), d, tl.div_rn(1.0, d)))


def test_logarithms_of_all_uniforms_are_torchs_to_the_last_bit_but_one() -> None:
    uniform = (torch.arange(2**23, device=cuda).float() + 0.5) * 2.0**-23
    inner, outer = torch.full_like(uniform, float("nan")), torch.full_like(uniform, float("nan"))
    _log_probe[(2**13,)](uniform, inner, N=1024)
    _log_probe[(2**13,)](inner, outer, N=1024)
    steps = [(made.view(torch.int32) - (-torch.log(x)).view(torch.int32)).abs() for made, x in ((inner, uniform), (outer, inner))]
    print(f"not bit-identical to torch: {[int((step > 0).sum()) for step in steps]} of {2**23}")
    assert [int(step.max()) <= 1 for step in steps] == [True, True]


@pytest.mark.parametrize("divisor", [0.7, 1e-5, 1.3])
def test_division_by_the_temperature_is_rounded_correctly(divisor: float) -> None:
    x = torch.randn(2**20, device=cuda) * torch.logspace(-3, 3, 2**20, device=cuda)
    out = torch.full_like(x, float("nan"))
    _divide_probe[(2**10,)](x, torch.tensor([divisor], device=cuda), out, N=1024)
    assert torch.equal(out.cpu(), x.cpu() / torch.tensor(divisor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_get_the_first_of_their_largest_logits(dtype: torch.dtype) -> None:
    logits = rows_of(ROWS, VOCAB, 3.0, dtype)
    logits[0, [40000, 9, 128255]] = 100.0
    sampler = Sampler(ROWS, VOCAB, torch.int32)
    ids = sampler(logits, [Ask(temperature=0.0)] * ROWS)
    assert (ids.tolist(), sampler.ok.all().item(), ids[0].item()) == (logits.float().argmax(dim=-1).tolist(), True, 9)


@pytest.mark.parametrize(("vocab", "dtype"), [(VOCAB, torch.float32), (VOCAB, torch.bfloat16), (ODD, torch.float32)])
@pytest.mark.parametrize("filters", [False, True])
def test_draws_are_the_references(vocab: int, dtype: torch.dtype, filters: bool) -> None:
    sampler, wrong, differing, drawn = Sampler(ROWS, vocab), [], 0, 0
    for step, scale in enumerate((0.05, 1.0, 2.5, 5.0)):
        logits = rows_of(ROWS, vocab, scale, dtype, seed=step)
        asks = asks_of(ROWS, filters=filters, position=100 * step)
        ids = sampler(logits, asks)
        wrong += misdrawn(logits, asks, ids)
        differing += int((ids != reference.sample(logits, tensors(asks, cuda))).sum())
        drawn += ROWS
    print(f"tokens that rounding changed: {differing} of {drawn}")
    assert (wrong, sampler.ok.all().item()) == ([], True)


def test_logprobs_are_the_raw_logits() -> None:
    logits = rows_of(ROWS, VOCAB, 2.5, torch.float32)
    sampler = Sampler(ROWS, VOCAB)
    ids = sampler(logits, asks_of(ROWS, filters=True))
    expected = torch.log_softmax(logits.double(), dim=-1).gather(1, ids[:, None]).squeeze(1)
    assert float((sampler.logprobs - expected).abs().max()) < 1e-5


def test_a_token_depends_on_its_row_alone_ten_times_over() -> None:
    logits, asks = rows_of(ROWS, VOCAB, 1.0, torch.float32), asks_of(ROWS, filters=True)
    sampler, outcomes = Sampler(ROWS, VOCAB), set()
    for turn in range(10):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(turn))
        ids = sampler(logits[order.to(cuda)], [asks[i] for i in order.tolist()]).cpu()
        outcomes.add((tuple(ids[order.argsort()].tolist()), tuple(sampler.logprobs.cpu()[order.argsort()].tolist())))
    single = Sampler(1, VOCAB)
    alone = tuple(int(single(logits[i : i + 1], asks[i : i + 1], SampleMode.FILTERED)) for i in range(8))
    assert (len(outcomes), alone) == (1, next(iter(outcomes))[0][:8])


def test_a_graph_replays_what_a_call_gives_as_its_inputs_change() -> None:
    logits, sampler = rows_of(ROWS, VOCAB, 2.0, torch.float32), Sampler(ROWS, VOCAB)
    params = tensors(asks_of(ROWS, filters=True), cuda)
    sampler.launch(logits, params, SampleMode.FILTERED)  # compiled outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.launch(logits, params, SampleMode.FILTERED)
    replayed, called = [], []
    for step in range(4):
        logits.copy_(rows_of(ROWS, VOCAB, 1.0 + step, torch.float32, seed=50 + step))
        params.position.add_(1)
        sampler.poison()
        graph.replay()
        replayed.append(sampler.ids.tolist())
        sampler.poison()
        sampler.launch(logits, params, SampleMode.FILTERED)
        called.append(sampler.ids.tolist())
    assert (replayed == called, len({tuple(ids) for ids in called})) == (True, 4)


def test_padding_and_broken_rows_stay_inside_the_vocabulary_and_harm_no_other() -> None:
    logits, asks = rows_of(8, VOCAB, 2.0, torch.float32), asks_of(8, filters=True)
    sampler = Sampler(8, VOCAB)
    healthy = sampler(logits, asks)
    logits[1, 77], logits[3], logits[5, 128255], logits[6, 0] = float("nan"), float("nan"), float("-inf"), float("inf")
    ids = sampler(logits, asks)
    whole = [0, 2, 4, 7]
    assert (sampler.ok.tolist(), ids[whole].tolist(), bool(((ids >= 0) & (ids < VOCAB)).all())) == (
        [row in whole for row in range(8)], healthy[whole].tolist(), True,
    )  # fmt: skip


def test_rows_beyond_an_int32_of_elements_are_found() -> None:
    stride = 2**30 + 8
    logits = torch.empty(2 * stride + ODD, dtype=torch.bfloat16, device=cuda).as_strided((3, ODD), (stride, 1))
    logits.copy_(rows_of(3, ODD, 2.0, torch.bfloat16))
    asks = asks_of(3, filters=True)
    ids = Sampler(3, ODD)(logits, asks)
    assert misdrawn(logits.contiguous(), asks, ids) == []
