"""KV-cache blocks: who holds them, what they are known to contain, and which go next. Pure Python, imports nothing else of
Fairlane, knows nothing about tensors; see docs/block_manager.md."""

from __future__ import annotations

from fairlane.blockmgr.errors import IntegrityError, NoFreeBlocks, StaleHit
from fairlane.blockmgr.hashing import HashChain
from fairlane.blockmgr.host_pool import HostPool
from fairlane.blockmgr.manager import BlockManager, GroupKind, Growth, KVGroup, PrefixHit

__all__ = [
    "BlockManager",
    "GroupKind",
    "Growth",
    "HashChain",
    "HostPool",
    "IntegrityError",
    "KVGroup",
    "NoFreeBlocks",
    "PrefixHit",
    "StaleHit",
]
