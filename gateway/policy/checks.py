"""What every check of the policy file shares: the walk over its nodes, findings in the order of the file, and the search for
live secrets in its text. The checks themselves are references.py, shares.py and enforcement.py."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fairlane.config.source import MAX_FINDINGS, Mark, Where, finding
from fairlane.config.strict import Located
from fairlane.gateway.policy.schema import LimitsPart, NodePart, OrganisationPart, PolicyFile, TenantPart

# Live secrets that ops paste by mistake. Ours first; the others by their published, self-describing prefixes. Each begins with a
# fixed text, so that a file without it (nearly every file) is not searched: the patterns take 0.2 s per MiB.
_SECRETS = {
    "fl_": re.compile(r"fl_[A-Za-z0-9_-]{32,}"),
    "sk-": re.compile(r"\bsk-[A-Za-z0-9_-]{20,}"),
    "AKIA": re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    "gh": re.compile(r"\bgh[pousr]_[A-Za-z0-9]{30,}"),
    "hf_": re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    "eyJ": re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\."),
    "-----BEGIN ": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"),
}

# Where it is, and what is wrong there.
Found = tuple[Where, str]


@dataclass(frozen=True, slots=True)
class Entry:
    """An organisation or tenant of the file, and the organisation of a tenant."""

    where: Where
    path: str
    part: NodePart
    above: Entry | None = None

    @property
    def tiers(self) -> tuple[str, ...]:
        """Its own tiers, or those it has from its organisation."""
        return self.part.tiers or (self.above.tiers if self.above else ())

    @property
    def cache_domain(self) -> str:
        return self.part.cache_domain or (self.above.cache_domain if self.above else "tenant")


def entries(file: PolicyFile) -> Iterator[Entry]:
    """Every organisation, each followed by its tenants."""
    for name, part in file.organisations.items():
        organisation = Entry(("organisations", name), name, part)
        yield organisation
        for tenant, tenant_part in part.tenants.items():
            yield Entry((*organisation.where, "tenants", tenant), f"{name}/{tenant}", tenant_part, organisation)


def tenants_of(organisation: Entry, part: OrganisationPart) -> list[Entry]:
    return [
        Entry((*organisation.where, "tenants", name), f"{organisation.path}/{name}", tenant, organisation)
        for name, tenant in part.tenants.items()
    ]


def limited(file: PolicyFile) -> Iterator[tuple[Where, LimitsPart, Entry | None, Entry]]:
    """Everything that has limits: where, its limits, what is above it, and the node whose tiers its requests use."""
    for entry in entries(file):
        yield entry.where, entry.part, entry.above, entry
        if isinstance(entry.part, TenantPart) and entry.part.members is not None:
            yield (*entry.where, "members"), entry.part.members, entry, entry


def in_file_order(located: Located[PolicyFile], found: Iterable[Found]) -> list[str]:
    """The findings as lines, in the order of the file."""

    def position(item: Found) -> tuple[int, int]:
        mark = located.mark(*item[0])
        return (mark.line, mark.column) if mark else (0, 0)

    return [located.finding(where, message) for where, message in sorted(found, key=position)]


def secrets(text: str, name: str) -> list[str]:
    """A finding for each thing in the text, comments included, that looks like a live secret. Its value is never repeated."""
    out = []
    for start in sorted(itertools.islice(_starts(text), MAX_FINDINGS)):
        before = text[:start]
        mark = Mark(before.count("\n") + 1, len(before) - before.rfind("\n"))
        message = "SECRET_IN_POLICY: looks like a live key in clear text: only its hash belongs here; revoke the key"
        out.append(finding(name, mark, (), message))
    return out


def without_secrets(lines: Iterable[str]) -> list[str]:
    """The lines with nothing in them that `secrets` finds: a name that is quoted in a message may be one."""
    out = []
    for line in lines:
        for pattern in _SECRETS.values():
            line = pattern.sub("(not shown)", line)
        out.append(line)
    return out


def _starts(text: str) -> Iterator[int]:
    for begin, pattern in _SECRETS.items():
        if begin in text:
            yield from (match.start() for match in pattern.finditer(text))
