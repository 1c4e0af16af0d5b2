"""A sequence as a shadow policy gets it: everything the engine knows of the real one, to be read only, and fields of its own for
what policies write. So a shadow cannot change what is served, whatever it does."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, overload

from fairlane.scheduler.request import Sequence

# What policies note on a sequence. The hash chain, which they have no business with, is left out.
_OWN = frozenset({"place", "relegated", "due_s", "latest_start_s", "lease_until_tokens"})
_WITHHELD = frozenset({"chain"})


class Twin(Sequence):
    """Stands for `live` in the shadow's queues. Reading the chain and writing one of the engine's raise AttributeError.

    charged_before: what it had been charged when it was admitted, until the shadow's policy is told that it was.
    let_in_step: when the shadow was first found to let it in while it waited; -1: never. look_step: not to look for somebody to
    evict before; 0: it was not found to need that. told_sooner, told_evicts: that was counted.
    """

    __slots__ = (
        "_live",
        "charged_before",
        "let_in_step",
        "look_step",
        "told_evicts",
        "told_sooner",
    )

    def __init__(self, live: Sequence) -> None:
        self._live = live
        self.place = live.place
        self.relegated = live.relegated
        self.due_s, self.latest_start_s = live.due_s, live.latest_start_s
        self.lease_until_tokens = live.lease_until_tokens
        self.charged_before: ReadOnly | None = None
        self.let_in_step = -1
        self.look_step = 0
        self.told_sooner = self.told_evicts = False


class ReadOnly(Items[int]):
    """A list's items without the list."""

    __slots__ = ("_items",)

    def __init__(self, items: list[int]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._items[index]


def _view(name: str) -> property:
    return property(lambda twin: getattr(twin._live, name))


def _forward(twin: type[Any]) -> None:
    for name in Sequence.__slots__:
        if name not in _OWN and name not in _WITHHELD:
            setattr(twin, name, _view(name))
    twin.token_ids = property(lambda one: ReadOnly(one._live.token_ids))
    twin.charged = property(lambda one: one.charged_before or ReadOnly(one._live.charged))


_forward(Twin)
