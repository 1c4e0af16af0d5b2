"""From the policy file to a Policy, or to every reason why not. It reads and decides nothing else: applying, watching and
shipping a policy are the server's."""

from __future__ import annotations

import datetime
import hashlib
import stat
from pathlib import Path

from fairlane.config.fields import Amount
from fairlane.config.source import MAX_BYTES, UnreadableFile, read_file
from fairlane.config.strict import Located, load_located
from fairlane.errors import ConfigError
from fairlane.gateway.policy import checks, enforcement, references, shares
from fairlane.gateway.policy.effective import RequestLimits
from fairlane.gateway.policy.model import MemberTemplate, Node, Policy, Principal, TierPolicy
from fairlane.gateway.policy.schema import (
    KeyPart,
    MembersPart,
    NodePart,
    OrganisationPart,
    PolicyFile,
    ShapingPart,
    TenantPart,
    TierPart,
)
from fairlane.scheduler.tenancy import GroupShare, KVAmount, Shaping, ShapingRule, Tier


def load_policy_file(path: str | Path, today: datetime.date | None = None) -> Policy:
    """The policy in a file. Raises ConfigError with every finding; UnreadableFile if there is nothing to check."""
    text = read_file(path)
    extra: tuple[str, ...] = ()
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:  # replaced or removed since it was read
        raise UnreadableFile([f"{path}: cannot be read: {error.strerror}"]) from None
    if stat.S_IMODE(mode) & stat.S_IWOTH:
        extra = (f"{path}: is writable by every user of this machine: chmod o-w",)
    return _load(text, str(path), today, extra)


def load_policy_text(text: bytes, name: str, today: datetime.date | None = None) -> Policy:
    """The policy in `text`; `name` is what messages call it; `today` (UTC) decides which keys are past their last day.

    Raises ConfigError with every finding.
    """
    return _load(text, name, today, ())


def _load(text: bytes, name: str, today: datetime.date | None, extra: tuple[str, ...]) -> Policy:
    # A longer text is refused for its length; searching it would only cost time.
    findings = checks.secrets(text.decode("utf-8-sig", "replace"), name) if len(text) <= MAX_BYTES else []
    try:
        located = load_located(text, name, PolicyFile)
        findings += checks.in_file_order(located, [*references.errors(located), *shares.errors(located)])
    except ConfigError as error:
        findings += error.findings
    if findings:
        raise ConfigError(checks.without_secrets(findings))
    today = today or datetime.datetime.now(datetime.UTC).date()
    warnings = [*references.warnings(located, today), *shares.warnings(located), *enforcement.without_effect(located)]
    return _build(text, located, (*extra, *checks.in_file_order(located, warnings)))


def _build(text: bytes, located: Located[PolicyFile], warnings: tuple[str, ...]) -> Policy:
    file = located.value
    nodes: dict[str, Node] = {}
    principals: dict[str, Principal] = {}
    for organisation, part in file.organisations.items():
        nodes[organisation] = _organisation(organisation, part)
        principals |= _principals(organisation, part)
        for tenant, entry in part.tenants.items():
            path = f"{organisation}/{tenant}"
            nodes[path] = _tenant(path, entry, part)
            principals |= _principals(path, entry)
    defaults = file.defaults
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
        within_tier=file.scheduler.within_tier,
        preempt_gap_ms=file.scheduler.preempt_gap_ms,
        cost=file.scheduler.cost,
        within_tenant=file.scheduler.within_tenant,
        plugin=file.scheduler.plugin or "",
        groups=_groups(file),
        predict_output=file.scheduler.predict_output,
        locality_window_ms=file.scheduler.locality_window_ms,
        defaults=RequestLimits(defaults.max_output_tokens, defaults.max_duration, defaults.max_wait),
        not_enforced=tuple(checks.in_file_order(located, enforcement.not_enforced(located))),
        source=located,
    )


def _tier(name: str, part: TierPart) -> TierPolicy:
    targets = part.ttft_target, part.tpot_target
    tier = Tier(name, part.priority, part.weight, part.min, part.patience, _shaping(part.shaping), *targets, part.ceil)
    return TierPolicy(tier, part.max_output_tokens, part.max_duration, part.max_wait, part.max_queue)


def _shaping(part: Shaping | ShapingPart) -> Shaping | ShapingRule:
    return part if isinstance(part, Shaping) else ShapingRule(part.prefill_share, part.pause_decodes, part.max_step)


def _organisation(path: str, part: OrganisationPart) -> Node:
    # It has no members, and `member` is then what it says for its tenants.
    domain = "tenant" if part.cache_domain in (None, "member") else part.cache_domain
    return _node(path, part, part.tiers or (), domain or "tenant", part.models, None)


def _tenant(path: str, part: TenantPart, above: OrganisationPart) -> Node:
    domain = part.cache_domain or above.cache_domain or "tenant"
    models = above.models if part.models is None else part.models
    return _node(path, part, part.tiers or above.tiers or (), domain, models, part.members)


def _node(
    path: str, part: NodePart, tiers: tuple[str, ...], domain: str, models: tuple[str, ...] | None, members: MembersPart | None
) -> Node:
    return Node(
        path=path,
        tiers=tiers,
        cache_domain=f"tenant:{path}" if domain == "tenant" else domain,
        max_in_flight=part.max_in_flight,
        weight=part.weight,
        min_share=part.min,
        ceil=part.ceil,
        max_running=part.max_running,
        max_queue=part.max_queue,
        max_wait_s=part.max_wait,
        max_output_tokens=part.max_output_tokens,
        max_duration_s=part.max_duration,
        models=models,
        members=None if members is None else _template(members),
        kv_guarantee=_kv_amount(part.kv_guarantee),
        kv_limit=_kv_amount(part.kv_limit),
    )


def _template(part: MembersPart) -> MemberTemplate:
    return MemberTemplate(
        max_members=part.max_members,
        weight=part.weight,
        max_in_flight=part.max_in_flight,
        max_running=part.max_running,
        max_queue=part.max_queue,
        max_wait_s=part.max_wait,
        max_output_tokens=part.max_output_tokens,
        max_duration_s=part.max_duration,
        kv_limit=_kv_amount(part.kv_limit),
    )


def _kv_amount(amount: Amount | None) -> KVAmount | None:
    return None if amount is None else KVAmount(amount.share, amount.count)


def _groups(file: PolicyFile) -> tuple[GroupShare, ...]:
    shares = (GroupShare(name, _kv_amount(part.kv_guarantee), _kv_amount(part.kv_limit)) for name, part in file.groups.items())
    return tuple(share for share in shares if share.kv_guarantee is not None or share.kv_limit is not None)


def _principals(path: str, part: NodePart) -> dict[str, Principal]:
    return {key.hash: _principal(path, key) for key in part.keys}


def _principal(path: str, key: KeyPart) -> Principal:
    return Principal(key.id, path, key.not_after, may_act_for_children=key.may_act_for is not None)
