"""A storm of policy edits under load: 300 random changes, good and broken, while clients call. No call fails, nothing broken is
ever in force, what is good is in force within two seconds, and every request is judged by one generation from end to end."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from pathlib import Path

import pytest

from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from gateway_world import FakeWorker, Keys, Service, following, make_model_dir, policy_text, until

EDITS = 300
CLIENTS = 4
REQUIRED_S = 2.0


class Editor:
    """Somebody who changes one file in every way there is. `valid`: the limit that each good text sets, by its hash."""

    def __init__(self, path: Path, keys: Keys, seed: int) -> None:
        self.path = path
        self.keys = keys
        self.random = random.Random(seed)
        self.valid: dict[str, int] = {}
        self.number = 0

    def good(self) -> str:
        self.number += 1
        limit = 9 + self.number  # no two texts are equal
        text = policy_text(self.keys, max_output_tokens=limit)
        self.valid[hashlib.sha256(text.encode()).hexdigest()] = limit
        return text

    def broken(self) -> str:
        text = policy_text(self.keys, max_output_tokens=100_000 + self.random.randrange(1000))
        how = self.random.randrange(4)
        if how == 0:  # a write cut off at any place where what is left is no policy
            return text[: self.random.randrange(text.index("docs:"))]
        return (text.replace("priority", "priorty"), text + "}", text.replace("hmac-sha256:", "hmac-sha1:"))[how - 1]

    def put(self, text: str) -> None:
        """The text becomes the file's, by a random one of the usual ways."""
        self.random.choice((self._in_place, self._renamed, self._linked, self._made_again))(text)

    def _in_place(self, text: str) -> None:
        self.path.write_text(text)

    def _renamed(self, text: str) -> None:
        new = self.path.with_name("4913")
        new.write_text(text)
        new.rename(self.path)

    def _linked(self, text: str) -> None:
        version = self.path.with_name(f"v{self.number}-{self.random.randrange(1 << 30)}")
        version.write_text(text)
        link = self.path.with_name("link")
        link.symlink_to(version.name)
        link.rename(self.path)

    def _made_again(self, text: str) -> None:
        self.path.unlink(missing_ok=True)
        self.path.write_text(text)


async def client(service: Service, stop: asyncio.Event) -> int:
    """Calls until told to stop; raises what any call raises."""
    calls = 0
    while not stop.is_set():
        await service.complete(pb.GenerateRequest(prompt="x"))
        calls += 1
    return calls


async def storm(service: Service, editor: Editor) -> list[float]:
    """Half of the edits are good; each is waited for until it is in force. Returns how long each took, in seconds."""
    taken = []
    for _ in range(EDITS):
        if editor.random.random() < 0.5:
            text = editor.good()
            editor.put(text)
            taken.append(await in_force(service, hashlib.sha256(text.encode()).hexdigest()))
        else:
            editor.put(editor.broken())
            await asyncio.sleep(editor.random.choice((0.0, 0.0, 0.02, 0.15)))  # sometimes left long enough to be judged
    return taken


async def in_force(service: Service, sha256: str) -> float:
    start_s = time.monotonic()
    async with asyncio.timeout(30):
        while (await service.worker.told.get()).sha256 != sha256:
            pass
    await until(lambda: service.gateway._in_force.policy.sha256 == sha256)
    return time.monotonic() - start_s


@pytest.mark.timeout(120)
async def test_three_hundred_edits_under_load_fail_no_call_and_let_nothing_broken_in(tmp_path: Path) -> None:
    keys = Keys()
    (tmp_path / "policy").mkdir()
    editor = Editor(tmp_path / "policy" / "tenants.yaml", keys, seed=20261129)
    editor.path.write_text(editor.good())
    worker = FakeWorker(tmp_path / "worker.sock")
    await worker.start()
    stop = asyncio.Event()
    try:
        async with following(editor.path, worker, keys, make_model_dir(tmp_path / "model"), tmp_path / "state") as service:
            clients = [asyncio.create_task(client(service, stop)) for _ in range(CLIENTS)]
            taken = await storm(service, editor)
            stop.set()
            calls = sum(await asyncio.gather(*clients))
    finally:
        await worker.kill()
    limits = {snapshot.generation: editor.valid.get(snapshot.sha256) for snapshot in worker.policies}
    judged = [(add.policy_generation, add.max_tokens, limits.get(add.policy_generation)) for add in worker.adds]
    print(f"{len(taken)} good edits of {EDITS}: slowest {max(taken):.2f} s; {calls} calls")
    assert None not in limits.values(), "a broken policy reached the worker"
    assert [entry for entry in judged if entry[1] != entry[2]] == [], "a request was judged by two generations"
    assert len({generation for generation, _, _ in judged}) > len(taken) / 2, "the load did not meet the storm"
    assert (calls, max(taken) < REQUIRED_S) == (len(worker.adds), True)
