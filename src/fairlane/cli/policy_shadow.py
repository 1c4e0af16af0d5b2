"""`fairlane policy shadow`: a policy on live traffic that is asked what it would do and never obeyed. Here: what its counts look
like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from fairlane.cli import admin, client, policy_admin
from fairlane.cli.exits import FAILED, USAGE, stop

_SHOWN_PAIRS = 10
# A column is shown where anybody has something in it.
_COLUMNS: tuple[tuple[str, Callable[[Any], int]], ...] = (
    ("steps", lambda row: row.steps),
    ("admitted", lambda row: row.instead + row.sooner),
    ("left waiting", lambda row: row.displaced + row.later),
    ("evicts", lambda row: row.evicting),
    ("evicted", lambda row: row.evicted),
    ("spared", lambda row: row.spared),
    ("paused", lambda row: row.paused),
    ("not paused", lambda row: row.not_paused),
    ("tokens cut", lambda row: row.cut_tokens),
)
_WORDS = {  # by ShadowKind
    1: "{n} × {whom} admitted instead of {other}",
    2: "{n} × {whom} admitted where nobody is now",
    3: "{n} × {whom} left waiting",
    4: "{n} × blocks of {other} taken for {whom}",
    5: "{n} × blocks of {whom} not taken for {other}",
    6: "{n} × a token of {whom} paused",
    7: "{n} × a token of {whom} not paused",
    8: "{n} prompt tokens of {whom} not read in that step",
}


def shadow(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE|-]", help="The policy to try; - reads standard input. None: show the counts.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="End the trial; print its last counts.")] = False,
    as_json: admin.AsJson = False,
    target: admin.Target = admin.DEFAULT_TARGET,
    state_dir: client.StateDir = None,
) -> None:
    """Try a policy on live traffic without obeying it, and count where it would decide otherwise.

    With FILE, the worker asks that policy in every step what it would do; the policy in force alone is obeyed, and requests get
    the very same tokens at the same time. Without FILE: the counts since then. One policy is tried at a time; another FILE takes
    its place, the same one goes on counting. A policy that fails is dropped, and nobody's request is concerned.

    How to read the table, a row for each tenant and tier:

    **steps**: in which its requests would have fared differently. **admitted**, **left waiting**: requests that only the tried
    policy would have let in, or only the one in force. **evicts**, **evicted**, **spared**: it would have got others' blocks,
    lost its own, or kept what it lost. **paused**, **not paused**: its tokens, a step each. **tokens cut**: of prompts, read
    later.

    Each step is compared on its own, in the world that the policy in force has made: the counts say how often the two part ways,
    not where the other way leads. For that: fairlane policy simulate. Only what the worker decides is compared, not keys and caps
    on requests.

    Exit code 0: done, 1: it has errors, was refused, or was dropped, 2: used wrongly or it cannot be read.

    Examples:

    fairlane policy shadow new.yaml

    fairlane policy shadow

    fairlane policy shadow --off
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    if off and file is not None:
        stop(USAGE, "give FILE to try a policy, or --off to end the trial, not both")
    if file is not None:
        _start(file, as_json, target, state_dir)
        return
    method, request = ("StopShadow", pb.StopShadowRequest()) if off else ("GetShadow", pb.GetShadowRequest())
    answer = admin.call(target, state_dir, method, request)
    if as_json:
        admin.print_json(answer)
    else:
        _show(answer)
    if answer.dropped:
        raise typer.Exit(FAILED)


def _start(file: str, as_json: bool, target: str, state_dir: Any) -> None:
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    text = policy_admin.read(file)
    check = admin.call(target, state_dir, "CheckPolicy", pb.CheckPolicyRequest(text=text, name=file))
    policy_admin.say_findings(check.findings)
    if not check.ok:
        raise typer.Exit(FAILED)
    answer = admin.call(target, state_dir, "ShadowPolicy", pb.ShadowPolicyRequest(text=text, name=file))
    if as_json:
        admin.print_json(answer)
        return
    typer.echo(f"{file}: tried beside generation {answer.generation}, which alone is obeyed; sha256 {answer.sha256}")
    typer.echo("fairlane policy shadow shows what it would do otherwise, fairlane policy shadow --off ends it")


# -- what it looks like ----------------------------------------------------------------------------------------------------


def _show(answer: Any) -> None:
    from rich.console import Console
    from rich.text import Text

    # Names are data, never markup; a line that is too long is the terminal's to wrap.
    console = Console(highlight=False, soft_wrap=True)
    if not (answer.running or answer.dropped or answer.HasField("report") or answer.name):
        console.print("No policy is tried. fairlane policy shadow FILE begins.")
        return
    since = f", since {admin.when(answer.since)}" if answer.HasField("since") else ""
    name = answer.name or "a policy that somebody else began to try"
    console.print(Text(f"{name}, sha256 {answer.sha256[:12]}{since}: {_state(answer)}", style="bold"))
    if answer.HasField("report"):
        _show_report(console, answer.report)
    if answer.dropped:
        console.print(Text(f"\nDROPPED, it is not tried any more: {answer.dropped}", style="bold red"))


def _state(answer: Any) -> str:
    if answer.running:
        return "tried beside the policy in force"
    return "dropped" if answer.dropped else "not tried just now"


def _show_report(console: Any, report: Any) -> None:
    from rich.text import Text

    part = report.different_steps / report.steps if report.steps else 0.0
    console.print(
        f"{report.steps} steps in {report.over_s:.0f} s; in {report.different_steps} of them ({part:.1%}) it would have done"
        f" something else; in force: {report.admissions} admissions, {report.evictions} evictions"
    )
    if report.over_s:
        console.print(f"it takes {report.spent_s / report.over_s:.2%} of the engine's time")
    if not report.rows:
        console.print("\nno difference so far")
        return
    console.print()
    _show_rows(report.rows)
    console.print("\nWhat it would do, most often first")
    for one in list(report.largest)[:_SHOWN_PAIRS]:
        whom, other = _party(one.whom_node, one.whom_tier), _party(one.other_node, one.other_tier)
        console.print(Text("  " + _WORDS.get(one.kind, "{n} × {whom}").format(n=one.count, whom=whom, other=other)))


def _show_rows(rows: Any) -> None:
    columns = [(title, count) for title, count in _COLUMNS if any(count(row) for row in rows)]
    admin.print_table(
        ("node", "tier", *(title for title, _ in columns)),
        [(row.node or "(others)", row.tier, *(str(count(row)) for _, count in columns)) for row in rows],
    )


def _party(node: str, tier: str) -> str:
    return f"{node or 'others'} in {tier}"
