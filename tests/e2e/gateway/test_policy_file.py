"""The policy file under a running gateway: every way an editor, a script or Kubernetes changes it, what cannot be used, and
changing it from here."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from fairlane.protos.fairlane.v1 import admin_pb2 as apb
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1 import worker_pb2 as wpb
from gateway_world import FakeWorker, Keys, Service, following, policy_text
from gateway_world import until as until_true

pytestmark = pytest.mark.asyncio

REQUEST = pb.GenerateRequest(prompt="x")
Code = grpc.StatusCode


@pytest.fixture
def keys() -> Keys:
    return Keys()


@pytest.fixture
def path(tmp_path: Path, keys: Keys) -> Path:
    folder = tmp_path / "policy"
    folder.mkdir()
    file = folder / "tenants.yaml"
    file.write_text(policy_text(keys))
    return file


@pytest_asyncio.fixture
async def served(path: Path, worker: FakeWorker, keys: Keys, model_dir: Path, tmp_path: Path) -> AsyncIterator[Service]:
    async with following(path, worker, keys, model_dir, tmp_path / "state") as service:
        await told(service, path.read_text())
        yield service


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def told(service: Service, text: str) -> wpb.PolicySnapshot:
    """The snapshot of this text, once the worker has it and the gateway judges by it; others before it are skipped."""
    async with asyncio.timeout(10):
        while (snapshot := await service.worker.told.get()).sha256 != sha256(text):
            pass
    await until_true(lambda: service.gateway.policy_generation == snapshot.generation)
    return snapshot


async def admin(service: Service, method: str, request: Any) -> Any:
    return await getattr(service.admin, method)(request, metadata=service.auth(service.keys.admin), timeout=20)


def in_place(path: Path, text: str) -> None:
    path.write_text(text)


def renamed_over(path: Path, text: str) -> None:
    """As vim does: the old file becomes a backup, a new one takes its name."""
    new = path.with_name("4913")
    new.write_text(text)
    path.rename(path.with_name("tenants.yaml~"))
    new.rename(path)


def removed_and_made_again(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


@pytest.mark.parametrize("change", [in_place, renamed_over, removed_and_made_again])
async def test_every_way_to_change_the_file_takes_effect_again_and_again(
    served: Service, path: Path, keys: Keys, change: Callable[[Path, str], None]
) -> None:
    limits = []
    for limit in (50, 60, 70):
        text = policy_text(keys, max_output_tokens=limit)
        change(path, text)
        await told(served, text)
        await served.complete(REQUEST)
        limits.append(served.worker.adds[-1].max_tokens)
    assert limits == [50, 60, 70]
    assert served.worker.adds[-1].policy_generation == 4


async def test_a_kubernetes_config_map_takes_effect_at_each_swap(
    tmp_path: Path, worker: FakeWorker, keys: Keys, model_dir: Path
) -> None:
    # mount/tenants.yaml -> ..data/tenants.yaml, ..data -> ..1; an update makes ..2 and renames a new ..data over the old.
    mount = tmp_path / "mount"
    mount.mkdir()

    def publish(version: int, text: str) -> None:
        folder = mount / f"..{version}"
        folder.mkdir()
        (folder / "tenants.yaml").write_text(text)
        (mount / "..data_tmp").symlink_to(folder.name)
        (mount / "..data_tmp").rename(mount / "..data")

    publish(1, policy_text(keys))
    (mount / "tenants.yaml").symlink_to("..data/tenants.yaml")
    async with following(mount / "tenants.yaml", worker, keys, model_dir, tmp_path / "state") as service:
        for version in (2, 3):
            text = policy_text(keys, max_output_tokens=version)
            publish(version, text)
            snapshot = await told(service, text)
    assert snapshot.generation == 3


async def test_a_file_linked_from_another_folder_is_followed_by_the_poll(
    tmp_path: Path, worker: FakeWorker, keys: Keys, model_dir: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    real, link = tmp_path / "a" / "real.yaml", tmp_path / "b" / "tenants.yaml"
    real.write_text(policy_text(keys))
    link.symlink_to(real)
    async with following(link, worker, keys, model_dir, tmp_path / "state") as service:
        text = policy_text(keys, max_output_tokens=9)
        real.write_text(text)
        snapshot = await told(service, text)
    assert snapshot.generation == 2


BROKEN = {
    "an unknown key": lambda text: text.replace("priority: 10}", "priorty: 10}"),
    "half of it": lambda text: text[: len(text) // 2],
    "nothing": lambda text: "",
    "not yaml": lambda text: "tiers: [",
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_file_that_cannot_be_used_changes_nothing_and_is_reported(
    served: Service, path: Path, keys: Keys, until: Any, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(BROKEN[how](policy_text(keys, max_output_tokens=50)))
    await until(lambda: served.gateway._reloader.error)
    status = await admin(served, "GetStatus", apb.GetStatusRequest())
    await served.complete(REQUEST)
    alarms = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert (status.policy.generation, status.policy.load_failures, served.worker.adds[-1].max_tokens) == (1, 1, 200)
    assert status.policy.error[0].startswith(f"{path}:")
    assert len(alarms) == 1
    assert status.policy.error[0] in alarms[0].message


async def test_a_repaired_file_takes_effect_and_the_error_goes(served: Service, path: Path, keys: Keys, until: Any) -> None:
    path.write_text("tiers: [")
    await until(lambda: served.gateway._reloader.error)
    text = policy_text(keys, max_output_tokens=50)
    path.write_text(text)
    await told(served, text)
    await until(lambda: not served.gateway._reloader.error)
    path.write_text("tiers: [")
    await until(lambda: served.gateway._reloader.error)
    path.write_text(text)  # back to what is in force: nothing to apply
    await until(lambda: not served.gateway._reloader.error)
    assert served.gateway.policy_generation == 2


async def test_a_file_that_vanishes_is_an_alarm_and_its_return_is_none(
    served: Service, path: Path, keys: Keys, until: Any
) -> None:
    path.unlink()
    await until(lambda: served.gateway._reloader.error)
    missing = served.gateway._reloader.error
    path.write_text(policy_text(keys))
    await until(lambda: not served.gateway._reloader.error)
    assert "cannot be read" in missing[0]
    assert (await served.complete(REQUEST)).text == "Hi."


async def test_a_slow_write_is_waited_for(served: Service, path: Path, keys: Keys) -> None:
    # Piece by piece, each a moment after the other; none before the last is a policy.
    text = policy_text(keys, max_output_tokens=50)
    with path.open("w") as file:
        for piece in (text[:40], text[40:200], text[200:]):
            file.write(piece)
            file.flush()
            await asyncio.sleep(0.04)
    snapshot = await told(served, text)
    assert (snapshot.generation, served.gateway._reloader.counters.failures) == (2, 0)


async def test_a_file_everybody_can_write_is_warned_about(
    served: Service, path: Path, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path.chmod(0o666)
    await until(lambda: "writable by every user" in caplog.text)
    assert served.gateway.policy_generation == 1


async def test_a_policy_the_worker_refuses_stays_out_and_is_tried_again(
    served: Service, path: Path, keys: Keys, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served.worker.on_policy = lambda snapshot: "not this one"
    text = policy_text(keys, max_output_tokens=50)
    path.write_text(text)
    await until(lambda: served.gateway._reloader.error)
    refused_first = served.gateway.policy_generation
    served.worker.on_policy = lambda snapshot: ""
    await until(lambda: served.gateway._in_force.policy.sha256 == sha256(text))
    await until(lambda: not served.gateway._reloader.error)
    assert refused_first == 1
    assert sum("cannot be used" in record.message for record in caplog.records) == 1


async def test_a_removed_tenants_key_dies_at_once_and_its_admitted_work_finishes(
    served: Service, path: Path, keys: Keys, rest: Any, refused: Any
) -> None:
    served.worker.on_add = served.worker.silent
    docs = served.auth(keys.docs)
    call = served.generate(REQUEST, metadata=docs)
    await call.read()
    without = "\n".join(line for line in policy_text(keys).split("\n") if "docs:" not in line)
    path.write_text(without)
    await told(served, without)
    refusal = await refused(served.generate(REQUEST, metadata=docs))
    served.worker.send(served.worker.adds[0].request_id, token_ids=[65], ended=wpb.EndedDelta(reason="length"))
    events = await rest(call)
    assert (refusal.code, events[-1].WhichOneof("event")) == (Code.UNAUTHENTICATED, "finished")


async def test_counts_survive_a_reload(served: Service, path: Path, keys: Keys, refused: Any) -> None:
    served.worker.on_add = served.worker.silent
    docs = served.auth(keys.docs)
    call = served.generate(REQUEST, metadata=docs)
    await call.read()
    text = policy_text(keys, max_output_tokens=50)
    path.write_text(text)
    await told(served, text)
    refusal = await refused(served.generate(REQUEST, metadata=docs))  # its one place is taken, from before the reload
    call.cancel()
    assert refusal.reason == "MAX_IN_FLIGHT"


async def test_a_tier_that_is_removed_is_kept_for_what_was_admitted_to_it(served: Service, path: Path, keys: Keys) -> None:
    text = (
        policy_text(keys).replace("  batch: {priority: 10}\n", "").replace("[gold, batch]", "[gold]").replace("[batch]", "[gold]")
    )
    path.write_text(text)
    first = await told(served, text)
    later = text.replace("200", "50")
    path.write_text(later)
    second = await told(served, later)
    # Requests judged by the first policy may still be on their way to the worker; by the second reload they are not.
    assert [[tier.name for tier in snapshot.tiers] for snapshot in (first, second)] == [["gold", "batch"], ["gold"]]


class TestChangingItFromHere:
    async def test_apply_replaces_the_file_and_is_in_force_when_it_returns(self, served: Service, path: Path, keys: Keys) -> None:
        path.chmod(0o640)
        text = policy_text(keys, max_output_tokens=50)
        answer = await admin(served, "ApplyPolicy", apb.ApplyPolicyRequest(text=text))
        await served.complete(REQUEST)
        add = served.worker.adds[0]
        assert (path.read_text(), path.stat().st_mode & 0o777) == (text, 0o640)
        assert (answer.generation, answer.sha256, add.policy_generation, add.max_tokens) == (2, sha256(text), 2, 50)
        assert [file.name for file in path.parent.iterdir()] == ["tenants.yaml"]

    async def test_a_bad_text_is_refused_with_every_finding(self, served: Service, path: Path, keys: Keys, refused: Any) -> None:
        bad = policy_text(keys).replace("priority", "priorty")
        request = apb.ApplyPolicyRequest(text=bad)
        refusal = await refused(served.admin.ApplyPolicy(request, metadata=served.auth(keys.admin)))
        assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "POLICY_INVALID")
        assert len(refusal.violations) >= 2
        assert all(field.startswith(f"{path}:") for field in refusal.violations)
        assert (path.read_text(), served.gateway.policy_generation) == (policy_text(keys), 1)

    async def test_a_hash_that_is_not_the_files_is_a_conflict(
        self, served: Service, path: Path, keys: Keys, refused: Any
    ) -> None:
        mine, theirs = policy_text(keys, max_output_tokens=50), policy_text(keys, max_output_tokens=60)
        before = sha256(path.read_text())
        await admin(served, "ApplyPolicy", apb.ApplyPolicyRequest(text=theirs, expected_sha256=before))
        request = apb.ApplyPolicyRequest(text=mine, expected_sha256=before)
        refusal = await refused(served.admin.ApplyPolicy(request, metadata=served.auth(keys.admin)))
        assert (refusal.code, refusal.reason) == (Code.FAILED_PRECONDITION, "POLICY_CONFLICT")
        assert (path.read_text(), refusal.info.metadata["found"]) == (theirs, sha256(theirs))

    async def test_a_read_only_file_is_not_replaced(self, served: Service, path: Path, keys: Keys, refused: Any) -> None:
        path.chmod(0o444)
        request = apb.ApplyPolicyRequest(text=policy_text(keys, max_output_tokens=50))
        refusal = await refused(served.admin.ApplyPolicy(request, metadata=served.auth(keys.admin)))
        assert (refusal.code, refusal.reason) == (Code.FAILED_PRECONDITION, "POLICY_READ_ONLY")
        assert (path.read_text(), len(served.worker.policies)) == (policy_text(keys), 1)

    async def test_what_the_worker_refuses_leaves_the_file_as_it_was(
        self, served: Service, path: Path, keys: Keys, refused: Any
    ) -> None:
        served.worker.on_policy = lambda snapshot: "not this one"
        request = apb.ApplyPolicyRequest(text=policy_text(keys, max_output_tokens=50))
        refusal = await refused(served.admin.ApplyPolicy(request, metadata=served.auth(keys.admin)))
        assert (refusal.code, refusal.reason, "not this one" in refusal.message) == (
            Code.FAILED_PRECONDITION, "POLICY_REFUSED", True,
        )  # fmt: skip
        assert path.read_text() == policy_text(keys)
        assert [file.name for file in path.parent.iterdir()] == ["tenants.yaml"]

    async def test_a_linked_file_stays_a_link(self, tmp_path: Path, worker: FakeWorker, keys: Keys, model_dir: Path) -> None:
        (tmp_path / "a").mkdir()
        real, link = tmp_path / "a" / "real.yaml", tmp_path / "tenants.yaml"
        real.write_text(policy_text(keys))
        link.symlink_to(real)
        text = policy_text(keys, max_output_tokens=50)
        async with following(link, worker, keys, model_dir, tmp_path / "state") as service:
            await admin(service, "ApplyPolicy", apb.ApplyPolicyRequest(text=text))
        assert (link.is_symlink(), real.read_text()) == (True, text)

    async def test_the_history_shows_what_was_in_force_and_rollback_brings_it_back(
        self, served: Service, path: Path, keys: Keys
    ) -> None:
        first, second = policy_text(keys), policy_text(keys, max_output_tokens=50)
        await admin(served, "ApplyPolicy", apb.ApplyPolicyRequest(text=second))
        answer = await admin(served, "RollbackPolicy", apb.RollbackPolicyRequest(generation=1))
        entries = (await admin(served, "ListPolicyHistory", apb.ListPolicyHistoryRequest())).entries
        assert (path.read_text(), answer.generation) == (first, 3)
        assert [(e.generation, e.origin, e.in_force, e.sha256) for e in entries] == [
            (3, "rollback to 1", True, sha256(first)),
            (2, "apply", False, sha256(second)),
            (1, "start", False, sha256(first)),
        ]

    async def test_a_text_that_is_in_force_already_gets_no_new_generation(self, served: Service, path: Path, keys: Keys) -> None:
        second = policy_text(keys, max_output_tokens=50)
        await admin(served, "ApplyPolicy", apb.ApplyPolicyRequest(text=second))
        again = await admin(served, "ApplyPolicy", apb.ApplyPolicyRequest(text=second))
        back = await admin(served, "RollbackPolicy", apb.RollbackPolicyRequest(generation=2))
        entries = (await admin(served, "ListPolicyHistory", apb.ListPolicyHistoryRequest())).entries
        assert [(a.generation, a.sha256, a.unchanged) for a in (again, back)] == [(2, sha256(second), True)] * 2
        assert ([e.origin for e in entries], len(served.worker.policies)) == (["apply", "start"], 2)

    async def test_the_text_in_force_is_put_into_a_file_that_holds_another(self, served: Service, path: Path, keys: Keys) -> None:
        path.write_text("version: 1\ntiers: {}\nnonsense: true\n")
        answer = await admin(served, "ApplyPolicy", apb.ApplyPolicyRequest(text=policy_text(keys)))
        assert (path.read_text(), answer.unchanged, answer.generation) == (policy_text(keys), False, 2)

    async def test_the_hash_that_is_expected_is_looked_at_for_the_text_in_force_too(
        self, served: Service, path: Path, keys: Keys, refused: Any
    ) -> None:
        request = apb.ApplyPolicyRequest(text=policy_text(keys), expected_sha256="0" * 64)
        refusal = await refused(served.admin.ApplyPolicy(request, metadata=served.auth(keys.admin)))
        assert (refusal.reason, served.gateway.policy_generation) == ("POLICY_CONFLICT", 1)

    async def test_a_policy_without_a_file_cannot_be_changed_here(self, service: Any, refused: Any) -> None:
        request = apb.ApplyPolicyRequest(text="version: 1")
        refusal = await refused(service.admin.ApplyPolicy(request, metadata=service.auth(service.keys.admin)))
        assert (refusal.code, refusal.reason) == (Code.FAILED_PRECONDITION, "POLICY_READ_ONLY")
