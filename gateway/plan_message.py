"""A policy plan as the message of the Admin API. `fairlane policy plan` of two files makes the same message in its own process,
so that both say the same."""

from __future__ import annotations

from collections.abc import Iterable

from fairlane.errors import ConfigError
from fairlane.gateway import tree
from fairlane.gateway.admin_parts import finding
from fairlane.gateway.admission import Ticket
from fairlane.gateway.policy.loader import load_policy_text
from fairlane.gateway.policy.model import Policy
from fairlane.gateway.policy.plan import Change, Kind, plan
from fairlane.gateway.policy.plan_notes import Note
from fairlane.protos.fairlane.v1 import admin_pb2 as pb

_KINDS = {
    Kind.ADDED: pb.PolicyChange.KIND_ADDED,
    Kind.REMOVED: pb.PolicyChange.KIND_REMOVED,
    Kind.CHANGED: pb.PolicyChange.KIND_CHANGED,
    Kind.MOVED: pb.PolicyChange.KIND_MOVED,
}


def plan_policy(in_force: Policy, text: bytes, name: str, tickets: Iterable[Ticket]) -> pb.PlanPolicyResponse:
    """The plan of putting a text in force, or its errors. tickets: the requests in flight. Blocks."""
    try:
        policy = load_policy_text(text, name)
    except ConfigError as error:
        return pb.PlanPolicyResponse(ok=False, findings=[finding(line, error=True) for line in error.findings])
    return plan_message(in_force, policy, tickets)


def plan_message(old: Policy, new: Policy, tickets: Iterable[Ticket] | None = None) -> pb.PlanPolicyResponse:
    """tickets: the requests in flight; None: nobody was asked. Raises ValueError for a policy that no file made."""
    found = plan(old, new)
    in_flight = None if tickets is None else tuple(tickets)
    return pb.PlanPolicyResponse(
        ok=True,
        findings=[finding(warning, error=False) for warning in found.warnings],
        changes=[_change(change) for change in found.changes],
        notes=[_note(note, in_flight) for note in found.notes],
        old_sha256=old.sha256,
        new_sha256=new.sha256,
    )


def _change(change: Change) -> pb.PolicyChange:
    return pb.PolicyChange(
        kind=_KINDS[change.kind],
        what=change.what,
        name=change.name,
        key=change.key,
        before=change.before,
        after=change.after,
        before_from=change.before_from,
        after_from=change.after_from,
        moved_from=change.moved_from,
        enforced=change.enforced,
        tenants=change.tenants,
        members=change.members,
    )


def _note(note: Note, in_flight: tuple[Ticket, ...] | None) -> pb.PolicyNote:
    message = pb.PolicyNote(subject=note.subject, message=note.message, risk=note.risk)
    if in_flight is not None and (note.node or note.tier):
        concerned = [
            ticket
            for ticket in in_flight
            if (not note.node or tree.is_below(ticket.node, note.node)) and note.tier in ("", ticket.tier)
        ]
        message.in_flight = len(concerned)
        message.waiting = sum(not ticket.started for ticket in concerned)
    return message
