"""ServeGen: real clients' arrival processes and length distributions, drawn from again. The rates file names, per client and
10 minutes, a rate and a distribution of gaps; the lengths file beside it (`_lengths` for `_rates`) has quantiles of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.trace_files import Row, csv_rows, lines
from fairlane.scheduler.simulator.workload import SimRequest, Workload, in_order

RATE_COLUMNS = ("client", "t_s", "rate_rps", "cv", "dist", "shape", "scale")
WINDOW_S = 600.0
TIER = "default"
MAX_PROMPT, MAX_OUTPUT = 32_000, 8_000
# Of one client in one window.
MAX_REQUESTS = 10_000_000
# The smallest of ServeGen's own is 0.0067, and below 0.0051 a Weibull draw can be larger than any float.
LEAST_SHAPE = 0.006


class Window(NamedTuple):
    """One client's arrivals in 10 minutes."""

    start_s: float
    rate: float
    dist: str
    shape: float


class Quantiles(NamedTuple):
    """A distribution: values at the given shares."""

    shares: tuple[float, ...]
    values: tuple[float, ...]

    def draw(self, random: Random) -> int:
        share = random.random()
        at = min(max(bisect_right(self.shares, share), 1), len(self.shares) - 1)
        (low, high), (left, right) = self.shares[at - 1 : at + 1], self.values[at - 1 : at + 1]
        return max(1, round(left + (right - left) * (share - low) / (high - low)))


class Clients(NamedTuple):
    """windows and lengths (prompt, output) by client; start_s: of the first window."""

    windows: dict[str, list[Window]]
    lengths: dict[str, tuple[Quantiles, Quantiles]]
    start_s: float

    def lengths_of(self, client: str, random: Random) -> tuple[Quantiles, Quantiles]:
        """A client without lengths has another's."""
        return self.lengths.get(client) or self.lengths[random.choice(sorted(self.lengths))]

    def mean_rate(self, client: str, end_s: float) -> float:
        """Requests a second before end_s, counted from the start of the file."""
        spans = [(w.rate, min(WINDOW_S, self.start_s + end_s - w.start_s)) for w in self.windows[client]]
        return sum(rate * span for rate, span in spans if span > 0) / end_s


def load_servegen(path: Path, text: Sequence[str], seed: int, duration_s: float | None, speed: float) -> Workload:
    """The first duration_s seconds of the rates file (default: all of it), each client a tenant, at `speed` times its rates."""
    clients = read_clients(path, text)
    random = Random(seed)  # noqa: S311 - a simulation's
    end_s = max(window.start_s for windows in clients.windows.values() for window in windows) + WINDOW_S - clients.start_s
    end_s = end_s if duration_s is None else min(end_s, duration_s)
    requests: list[SimRequest] = []
    for client in clients.windows:
        own = Random(random.random())  # noqa: S311
        requests += draw_client(clients, client, f"servegen/c{client}", own, end_s, speed=speed)
    return Workload(path.name, in_order(requests), (TIER,), end_s)


def read_clients(path: Path, text: Sequence[str]) -> Clients:
    """Raises SimulationInputError, as well when the lengths file is not there."""
    windows: dict[str, list[Window]] = {}
    for row in csv_rows(path, text, RATE_COLUMNS):
        dist = row.text("dist")
        if dist not in ("Gamma", "Weibull"):
            row.wrong("dist", "Gamma or Weibull is needed")
        window = Window(row.number("t_s"), row.number("rate_rps"), dist, row.number("shape", least=LEAST_SHAPE))
        windows.setdefault(row.text("client"), []).append(window)
    if not windows:
        raise SimulationInputError(f"{path}: has no clients")
    beside = path.with_name(path.name.replace("_rates", "_lengths"))
    if beside == path:
        raise SimulationInputError(f"{path}: its name must contain _rates, and the same name with _lengths must lie beside it")
    return Clients(windows, _lengths(beside), min(w.start_s for entries in windows.values() for w in entries))


def _lengths(path: Path) -> dict[str, tuple[Quantiles, Quantiles]]:
    """The first six hours that the file has of each client."""
    text = lines(path)
    names = [name for name in text[0].split(",") if name[:1] == "q"]
    try:
        shares = tuple(float(name[1:]) for name in names)
    except ValueError:
        raise SimulationInputError(f"{path}:1: quantile columns are called q and a number from 0 to 1") from None
    if len(shares) < 2 or any(low >= high for low, high in pairwise(shares)):
        raise SimulationInputError(f"{path}:1: at least two quantile columns, in rising order, are needed")
    found: dict[str, dict[str, Quantiles]] = {}
    for row in csv_rows(path, text, ("client", "field")):
        field = row.text("field")
        if field in ("input_tokens", "output_tokens"):
            found.setdefault(row.text("client"), {}).setdefault(field, Quantiles(shares, _values(row, names)))
    both = {client: (f["input_tokens"], f["output_tokens"]) for client, f in found.items() if len(f) == 2}
    if not both:
        raise SimulationInputError(f"{path}: has no client with input_tokens and output_tokens")
    return both


def _values(row: Row, names: Sequence[str]) -> tuple[float, ...]:
    values = tuple(row.number(name) for name in names)
    if any(left > right for left, right in pairwise(values)):
        row.wrong(names[0], "quantiles must not fall")
    return values


def draw_client(
    clients: Clients, client: str, node: str, random: Random, end_s: float, *, speed: float = 1.0
) -> list[SimRequest]:
    """One client's requests before end_s, `speed` times as many as recorded."""
    prompts, outputs = clients.lengths_of(client, random)
    requests = []
    for window in clients.windows[client]:
        start_s = window.start_s - clients.start_s
        if start_s >= end_s:
            continue
        count = int(window.rate * speed * WINDOW_S + random.random())
        if count > MAX_REQUESTS:
            raise SimulationInputError(
                f"client {client} asks for {count:,} requests in the {WINDOW_S:g} s from {window.start_s:g} s on: at most "
                f"{MAX_REQUESTS:,} are allowed"
            )
        for at_s in _arrivals(window, count, random):
            if start_s + at_s >= end_s:
                break
            prompt, output = min(prompts.draw(random), MAX_PROMPT), min(outputs.draw(random), MAX_OUTPUT)
            requests.append(SimRequest(start_s + at_s, node, TIER, prompt, output))
    return requests


def _arrivals(window: Window, count: int, random: Random) -> list[float]:
    """So many in one window: gaps of its distribution, stretched to fill it, since the recorded scale is not in seconds and the
    shapes are so skewed that a mean alone would not give the rate."""
    gaps = [
        random.gammavariate(window.shape, 1.0) if window.dist == "Gamma" else random.weibullvariate(1.0, window.shape)
        for _ in range(count + 1)
    ]
    stretch = WINDOW_S / (sum(gaps) or 1.0)
    return [end * stretch for end in accumulate(gaps[:-1])]
