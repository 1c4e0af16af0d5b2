"""From the policy file to a Policy, or to every reason why not. It reads and decides nothing else: applying, watching and
shipping a policy are the server's."""

from __future__ import annotations

import datetime
import hashlib
import stat
from pathlib import Path

from fairlane.config.source import read_file
from fairlane.config.strict import Located, load_located
from fairlane.errors import ConfigError
from fairlane.gateway.policy import checks
from fairlane.gateway.policy.model import Node, Policy, Principal, TierPolicy
from fairlane.gateway.policy.schema import PolicyFile, TenantPart, TierPart
from fairlane.scheduler.tenancy import Tier


def load_policy_file(path: str | Path, today: datetime.date | None = None) -> Policy:
    """The policy in a file. Raises ConfigError with every finding; UnreadableFile if there is nothing to check."""
    text = read_file(path)
    extra: tuple[str, ...] = ()
    if stat.S_IMODE(Path(path).stat().st_mode) & stat.S_IWOTH:
        extra = (f"{path}: is writable by every user of this machine: chmod o-w",)
    return _load(text, str(path), today, extra)


def load_policy_text(text: bytes, name: str, today: datetime.date | None = None) -> Policy:
    """The policy in `text`; `name` is what messages call it; `today` (UTC) decides which keys are past their last day.

    Raises ConfigError with every finding.
    """
    return _load(text, name, today, ())


def _load(text: bytes, name: str, today: datetime.date | None, extra: tuple[str, ...]) -> Policy:
    findings = checks.secrets(text.decode("utf-8-sig", "replace"), name)
    try:
        located = load_located(text, name, PolicyFile)
        findings += checks.errors(located)
    except ConfigError as error:
        findings += error.findings
    if findings:
        raise ConfigError(findings)
    today = today or datetime.datetime.now(datetime.UTC).date()
    return _build(text, located, (*extra, *checks.warnings(located, today)))


def _build(text: bytes, located: Located[PolicyFile], warnings: tuple[str, ...]) -> Policy:
    file = located.value
    nodes: dict[str, Node] = {}
    principals: dict[str, Principal] = {}
    for organisation, part in file.organisations.items():
        for tenant, entry in part.tenants.items():
            path = f"{organisation}/{tenant}"
            nodes[path] = Node(path, entry.tiers, _domain(path, entry), entry.max_in_flight)
            principals |= {key.hash: Principal(key.id, path, key.not_after) for key in entry.keys}
    return Policy(
        sha256=hashlib.sha256(text).hexdigest(),
        text=text.decode("utf-8-sig"),
        path=located.name,
        tiers_policy=file.scheduler.tiers,
        tiers={name: _tier(name, tier) for name, tier in file.tiers.items()},
        nodes=nodes,
        principals=principals,
        aliases={alias: model for model, entry in file.models.items() for alias in entry.aliases},
        warnings=warnings,
    )


def _tier(name: str, part: TierPart) -> TierPolicy:
    tier = Tier(name, part.priority, part.weight, part.min, part.patience, part.shaping)
    return TierPolicy(tier, part.max_output_tokens, part.max_duration)


def _domain(path: str, tenant: TenantPart) -> str:
    return f"tenant:{path}" if tenant.cache_domain == "tenant" else tenant.cache_domain
