"""`fairlane policy plan`: what a new policy would change, for whom, before anybody applies it. Here: which two policies are
compared and what the answer looks like; what is in it, the gateway decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from fairlane.cli import admin, client, policy, policy_admin
from fairlane.cli.exits import DIFFERENT, FAILED, USAGE, needs, stop

_SHOWN_NAMES = 5
_ADDED, _REMOVED, _CHANGED, _MOVED = 1, 2, 3, 4  # PolicyChange.Kind
_SIGNS = {_ADDED: ("+", "green"), _REMOVED: ("-", "red"), _CHANGED: ("~", "yellow"), _MOVED: (">", "cyan")}


def plan(
    files: Annotated[
        list[str],
        typer.Argument(metavar="[OLD] NEW", help="Policy files, - for standard input. NEW alone: against the one in force."),
    ],
    detailed_exitcode: Annotated[
        bool, typer.Option("--detailed-exitcode", help="Exit code 3 if there are changes, for scripts.")
    ] = False,
    as_json: admin.AsJson = False,
    target: admin.Target = admin.DEFAULT_TARGET,
    state_dir: client.StateDir = None,
) -> None:
    """Show what a policy would change, for whom, and what that means to requests; change nothing.

    With one file: against the policy that the server has in force, with the requests in flight that each point is about. With
    two: between files, without a server. Values are effective ones: inherited limits and shares by weight are worked out.

    Exit code 0: it has no errors (what only a worker can judge, apply says), 1: it has some, 2: used wrongly or it cannot be
    read; with --detailed-exitcode 0: no changes, 3: changes.

    Examples:

    fairlane policy plan tenants.yaml

    git show HEAD:tenants.yaml | fairlane policy plan - tenants.yaml --detailed-exitcode
    """
    if len(files) > 2 or files == ["-", "-"]:
        stop(USAGE, "plan takes NEW, or OLD and NEW, and - for one of them")
    answer = _between(*files) if len(files) == 2 else _against_server(files[0], target, state_dir)
    policy_admin.say_findings(answer.findings)
    if not answer.ok:
        raise typer.Exit(FAILED)
    if as_json:
        admin.print_json(answer)
    else:
        _show(answer, files)
    if detailed_exitcode and answer.changes:
        raise typer.Exit(DIFFERENT)


def _between(old: str, new: str) -> Any:
    with needs("server"):
        from fairlane.gateway.plan_message import plan_message
    return plan_message(policy.load_or_stop(old), policy.load_or_stop(new))


def _against_server(file: str, target: str, state_dir: Any) -> Any:
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    return admin.call(target, state_dir, "PlanPolicy", pb.PlanPolicyRequest(text=policy_admin.read(file), name=file))


# -- what it looks like ----------------------------------------------------------------------------------------------------


def _show(answer: Any, files: Sequence[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    # Names and values are data, never markup; a line that is too long is the terminal's to wrap.
    console = Console(highlight=False, soft_wrap=True)
    old = files[0] if len(files) == 2 else f"generation {answer.generation}, in force"
    if not answer.changes:
        console.print(Text(f"No changes: {files[-1]} says what {old} says."))
        return
    console.print(Text(f"{old} → {files[-1]}\n", style="bold"))
    for names, changes in _groups(answer.changes):
        _show_group(console, names, changes)
    if answer.notes:
        console.print(Text("\nWhat that means", style="bold"))
    for subjects, note in _alike(answer.notes):
        sign, style = ("!", "red") if note.risk else ("·", "")
        console.print(Text.assemble((f"  {sign} ", style), (subjects, "bold"), f": {note.message}{_concerned(note)}"))
    console.print(Text(f"\n{_summary(answer)}"))


def _show_group(console: Any, names: list[str], changes: list[Any]) -> None:
    from rich.text import Text

    first = changes[0]
    sign, style = _SIGNS[first.kind]
    title = f"{first.what} {_few(names)}".rstrip() + (f", was {first.moved_from}" if first.moved_from else "")
    console.print(Text.assemble((f"{sign} {title}", style), (_reach(first, len(names)), "dim")))
    values = [change for change in changes if change.key]
    width = max((len(change.key) for change in values), default=0)
    for change in values:
        before = f"{change.before} → " if change.kind == _CHANGED else ""
        origin = change.after_from or change.before_from
        later = "" if change.enforced else "; not enforced yet"
        console.print(Text.assemble(f"    {change.key:<{width}}  {before}{change.after}", (f"  ({origin}{later})", "dim")))


def _groups(changes: Iterable[Any]) -> list[tuple[list[str], list[Any]]]:
    """The changes of each thing together, and things with the very same changes as one."""
    things: dict[tuple[str, str], list[Any]] = {}
    for change in changes:
        things.setdefault((change.what, change.name), []).append(change)
    groups: dict[tuple[Any, ...], tuple[list[str], list[Any]]] = {}
    for (what, name), found in things.items():
        same = (what, *((change.kind, change.key, change.before, change.after, change.moved_from) for change in found))
        groups.setdefault(same, ([], found))[0].append(name)
    return list(groups.values())


def _alike(notes: Iterable[Any]) -> list[tuple[str, Any]]:
    """Notes that say the same of several, as one."""
    subjects: dict[tuple[Any, ...], tuple[list[str], Any]] = {}
    for note in notes:
        counts = (note.HasField("in_flight"), note.in_flight, note.waiting)
        subjects.setdefault((note.risk, note.message, *counts), ([], note))[0].append(note.subject)
    return [(_few(names), note) for names, note in subjects.values()]


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def _reach(change: Any, things: int) -> str:
    """How many a change is for, where its name does not say it."""
    parts = []
    if change.what not in ("tenant", "members", "key") and change.tenants != 1:
        parts.append(f"{change.tenants} tenants")
    if change.members:
        parts.append(f"up to {change.members} members{' each' if things > 1 else ''}")
    return f"  {', '.join(parts)}" if parts else ""


def _concerned(note: Any) -> str:
    if not note.HasField("in_flight"):
        return ""
    return f" [now in flight: {note.in_flight}, of them waiting: {note.waiting}]"


def _summary(answer: Any) -> str:
    def count(kind: int, *, whole: bool) -> int:
        return sum(change.kind == kind and (not change.key) == whole for change in answer.changes)

    parts = [
        f"{count(_ADDED, whole=True)} added",
        f"{count(_REMOVED, whole=True)} removed",
        f"{count(_MOVED, whole=True)} moved",
        f"{count(_CHANGED, whole=False)} values changed",
    ]
    risks = sum(note.risk for note in answer.notes)
    return ", ".join(parts) + (f"; {risks} to look at twice (!)" if risks else "")
