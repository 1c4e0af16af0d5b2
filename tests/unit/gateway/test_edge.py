"""Small decisions at the edge: who is on this machine, when a key ends, how large an error may get, what fits, and that the
gateway never loads a model library."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.rpc import error_details_pb2, status_pb2

from fairlane.errors import REASONS, FairlaneError, FieldViolation, InvalidRequest
from fairlane.gateway.auth import AdminAuthenticator, PolicyAuthenticator, is_loopback
from fairlane.gateway.interceptors import error_status, trailers
from fairlane.gateway.keys import hash_key, new_key
from fairlane.gateway.overrides import Overrides
from fairlane.gateway.policy.model import Node, Policy, Principal
from fairlane.gateway.service import allowed_seconds
from fairlane.gateway.worker_facts import WorkerFacts, resolve_max_tokens
from fairlane.protos.fairlane.v1 import worker_pb2 as wpb
from fairlane.scheduler.cache_domain import framed
from fairlane.scheduler.tenancy import KVAmount, TiersPolicy

PEPPER = b"x" * 32
LAST_DAY = datetime.date(2027, 1, 31)


@pytest.mark.parametrize(
    ("peer", "loopback"),
    [
        ("ipv4:127.0.0.1:5000", True),
        ("ipv4:127.8.9.1:5000", True),
        ("ipv6:[::1]:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:5000", True),
        ("unix:", True),
        ("ipv4:10.0.0.1:5000", False),
        ("ipv4:127.0.0.1.evil.example:5000", False),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", False),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5000", False),
        ("vsock:1:2", False),
        ("", False),
    ],
)
def test_peers_of_this_machine_are_known_by_their_address(peer: str, loopback: bool) -> None:
    assert is_loopback(peer) is loopback


def authenticator(principal: Principal, key: str, today: datetime.date) -> PolicyAuthenticator:
    nodes = {"acme": Node("acme", ("gold",), "tenant:acme")}
    policy = Policy("", "", "", TiersPolicy.FCFS, {}, nodes, {hash_key(PEPPER, key): principal}, {})
    return PolicyAuthenticator(policy, 1, PEPPER, Overrides(), lambda: today)


def test_a_key_is_valid_through_its_last_day_and_not_after() -> None:
    key = new_key()
    principal = Principal("k", "acme", LAST_DAY)
    metadata = [("authorization", f"Bearer {key}")]
    assert authenticator(principal, key, LAST_DAY).authenticate(metadata, "").node == "acme"
    with pytest.raises(FairlaneError) as caught:
        authenticator(principal, key, LAST_DAY + datetime.timedelta(days=1)).authenticate(metadata, "")
    assert caught.value.reason == "UNAUTHENTICATED"


def test_a_loopback_key_is_refused_from_elsewhere() -> None:
    key = new_key()
    checked = authenticator(Principal("k", "acme", None, True), key, LAST_DAY)
    metadata = [("authorization", f"bearer {key}")]
    assert checked.authenticate(metadata, "ipv4:127.0.0.1:1").tiers == ("gold",)
    with pytest.raises(FairlaneError) as caught:
        checked.authenticate(metadata, "ipv4:192.0.2.7:1")
    assert caught.value.reason == "UNAUTHENTICATED"


def test_the_admin_key_is_a_demo_key_and_refused_from_elsewhere() -> None:
    key = new_key()
    checked = AdminAuthenticator(hash_key(PEPPER, key), PEPPER)
    metadata = [("authorization", f"Bearer {key}")]
    assert [checked.authenticate(metadata, peer).node for peer in ("ipv4:127.0.0.1:1", "unix:")] == ["admin"] * 2
    with pytest.raises(FairlaneError) as caught:
        checked.authenticate(metadata, "ipv4:192.0.2.7:1")
    assert caught.value.reason == "UNAUTHENTICATED"


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_every_reason_becomes_a_status_with_error_info(reason: str) -> None:
    status = error_status(FairlaneError(reason, "why", metadata={"a": "b"}))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == (reason, "fairlane", {"a": "b"})


def test_the_worst_request_gets_an_error_that_fits_a_clients_metadata_limit() -> None:
    violations = [FieldViolation(f"sampling.logit_bias[{i}]", "m" * 5000) for i in range(500)]
    error = InvalidRequest(violations)
    details = trailers(error)[0][1]
    status = status_pb2.Status.FromString(details if isinstance(details, bytes) else b"")
    # Base64 adds a third; stock clients take 8 KiB of metadata.
    assert len(details) * 4 / 3 + len(status.message) < 8192


def test_pushback_is_sent_only_with_a_delay_and_never_zero() -> None:
    with_delay = dict(trailers(FairlaneError("OVERLOADED", "", retry_after_s=0.0001)))
    without = dict(trailers(FairlaneError("OVERLOADED", "")))
    assert with_delay["grpc-retry-pushback-ms"] == "1"
    assert "grpc-retry-pushback-ms" not in without


def facts(max_model_len: int, num_blocks: int) -> WorkerFacts:
    return WorkerFacts.of(
        wpb.Welcome(model="m", vocab_size=10, max_model_len=max_model_len, block_size=16, num_blocks=num_blocks)
    )


@pytest.mark.parametrize(
    ("prompt", "asked", "tier", "max_model_len", "num_blocks", "answer"),
    [
        (10, 20, None, 100, 10, 20),
        (10, None, None, 100, 10, 90),
        (10, None, 50, 100, 10, 50),
        (10, None, None, 1000, 2, 22),
        (80, 20, None, 100, 10, 20),
        (81, 20, None, 100, 10, "CONTEXT_LENGTH_EXCEEDED"),
        (100, None, None, 100, 10, "CONTEXT_LENGTH_EXCEEDED"),
        (99, None, None, 100, 10, 1),
        (16, 16, None, 100, 2, 16),
        (16, 17, None, 100, 2, "KV_CAPACITY_EXCEEDED"),
        (32, None, None, 100, 2, "KV_CAPACITY_EXCEEDED"),
    ],
)
def test_what_can_never_fit_is_refused_and_what_fits_is_given(
    prompt: int, asked: int | None, tier: int | None, max_model_len: int, num_blocks: int, answer: int | str
) -> None:
    try:
        got: int | str = resolve_max_tokens(prompt, asked, tier, facts(max_model_len, num_blocks))
    except FairlaneError as error:
        got = error.reason
    assert got == answer


@pytest.mark.parametrize(
    ("asked", "limits", "answer"),
    [
        (None, (KVAmount(share=0.5), KVAmount(tokens=70)), 54),  # 8 of 16 tokens: 4 of them by the tokens, 64 - 10
        (54, (KVAmount(tokens=70),), 54),
        (55, (KVAmount(tokens=70),), "KV_CAPACITY_EXCEEDED"),
        (None, (KVAmount(share=1.0),), 90),
    ],
)
def test_a_request_gets_what_the_kv_limits_above_it_allow(
    asked: int | None, limits: tuple[KVAmount, ...], answer: int | str
) -> None:
    try:
        got: int | str = resolve_max_tokens(10, asked, None, facts(100, 16), limits)
    except FairlaneError as error:
        got = error.reason
    assert got == answer


def test_the_clients_deadline_wins_over_the_tiers_cap_over_the_default() -> None:
    assert allowed_seconds(90.0, 30.0, 600.0) == 90.0
    assert allowed_seconds(None, 30.0, 600.0) == 30.0
    assert allowed_seconds(None, None, 600.0) == 600.0


def test_a_deadline_that_has_passed_is_exceeded_before_anything_is_done() -> None:
    with pytest.raises(FairlaneError) as caught:
        allowed_seconds(0.0, None, 600.0)
    assert caught.value.reason == "DEADLINE_EXCEEDED"


def test_no_partition_spells_another_tenants_domain() -> None:
    pairs = [("tenant:a", "b"), ("tenant:ab", ""), ("tenant:a1:b", ""), ("tenant:", "a1:b"), ("8:tenant:a", "b"), ("", "")]
    assert len({framed(domain, partition) for domain, partition in pairs}) == len(pairs)


@pytest.mark.parametrize("welcome", [wpb.Welcome(), wpb.Welcome(model="m", vocab_size=1, max_model_len=1, block_size=1)])
def test_a_welcome_that_no_worker_could_mean_is_refused(welcome: wpb.Welcome) -> None:
    with pytest.raises(ValueError, match="Welcome"):
        WorkerFacts.of(welcome)


def test_the_gateway_never_loads_torch_or_transformers() -> None:
    code = "import sys, fairlane.gateway.server; print(sorted({'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_documentation_lists_every_reason_with_its_code_and_no_other() -> None:
    text = (Path(__file__).parents[3] / "docs/api.md").read_text()
    listed = dict(re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \|", text, re.MULTILINE))
    assert listed == {reason: code.value for reason, code in REASONS.items()}
