"""Which decodes of a step share so much of their leading KV blocks that these should be read once for all of them. It looks at
block tables only: prefix caching gives sequences with the same beginning the same blocks. What is made of it is the attention's
business.

    rows, sorted so that like beginnings are neighbours     a a a a b b b b b c
    tokens that neighbours share                             4k 4k 4k 0 1k 1k 2k 2k 0
    a group is a rectangle under these heights               [a a a a] x 4k, [b b b b b] x 1k; its area is what it saves

Groups change only when sequences come or go: full blocks are never written again, and what a sequence appends is its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fairlane.kernels.decode_tuning import tuning_for
from fairlane.kernels.prefix_groups import PrefixGroup, PrefixGroups
from fairlane.worker.config import WorkerConfig
from fairlane.worker.cuda_batch import CudaBatch
from fairlane.worker.loading import LoadedModel

_STEP = 1.25  # groups whose prompts part within a step may be found as one, with what all of them share
_COMPARED = 64  # table entries compared at first, then twice as many, ...
_WEIGHTS = np.random.default_rng(0).integers(1, 2**62, 1021)  # products wrap, which does not matter


@dataclass(frozen=True, slots=True)
class CascadeRule:
    """What a group must be worth: so many members that share so many tokens and save so many bytes of one layer's K and V.
    token_bytes: of one token's. granule: tokens; only whole ones are counted, since the attention takes whole chunks."""

    token_bytes: int
    granule: int
    min_members: int = 4
    min_shared: int = 512
    min_saved_bytes: int = 32 << 20

    def accepts(self, members: int, shared: int) -> bool:
        enough = members >= self.min_members and shared >= self.min_shared
        return enough and (members - 1) * shared * self.token_bytes > self.min_saved_bytes


def rule_for(loaded: LoadedModel, config: WorkerConfig) -> CascadeRule | None:
    """None where nothing is shared, no layer sees a sequence's beginning, or not even the largest batch would save enough."""
    model = loaded.config
    if not (config.cascade and not config.batch_invariant and config.prefix_caching and None in model.windows):
        return None
    tuning = tuning_for(model.head_dim, model.num_heads // model.num_kv_heads, loaded.dtype, config.block_size)
    token_bytes = 2 * model.num_kv_heads * model.head_dim * loaded.dtype.itemsize
    rule = CascadeRule(token_bytes, granule=tuning.chunks.sizes[0])
    return rule if rule.accepts(config.max_num_seqs, loaded.max_model_len) else None


class Cascade:
    """The groups of the step about to be launched, on the host as found and on the device as shown."""

    def __init__(self, batch: CudaBatch, groups: PrefixGroups, rule: CascadeRule) -> None:
        self.rule = rule
        self._batch = batch
        self._groups = groups
        self._slots = self._versions = np.zeros(0, dtype=np.int64)
        self._active = False

    def show(self, slots: np.ndarray) -> bool:
        """Whether decodes of these slots, as rows 0, 1, ... of the step, form groups; they are the device's then. int64 [n].
        Costs next to nothing while the slots hold the same sequences as last time."""
        versions = self._batch.table_versions[slots]
        if not (np.array_equal(slots, self._slots) and np.array_equal(versions, self._versions)):
            batch = self._batch
            found = find_groups(batch.block_table, slots, batch.num_tokens[slots], batch.block_size, self.rule)
            if found:  # without any, nothing on the device is asked for them
                self._groups.fill(found)
            self._slots, self._versions, self._active = slots.copy(), versions, bool(found)
        return self._active


def find_groups(
    block_table: np.ndarray, slots: np.ndarray, num_tokens: np.ndarray, block_size: int, rule: CascadeRule
) -> list[PrefixGroup]:
    """The groups of rows that save most together, disjoint. block_table int64 [S, MB] by slot, slots [n], num_tokens [n].

    Two blocks with the same id at the same place need not stand behind the same blocks: of two sequences that computed the same
    prompt at the same time each may have registered some. So what two rows share is found by comparing entry by entry; a checksum
    only says who might be alike.
    """
    full = num_tokens // block_size
    probe = -(-rule.min_shared // block_size)
    rows = np.flatnonzero(full >= probe)
    if len(rows) < rule.min_members:
        return []
    _, kind, counts = np.unique(_checksums(block_table[slots[rows], :probe]), return_inverse=True, return_counts=True)
    rows = rows[counts[kind] >= rule.min_members]
    if not len(rows):
        return []
    steps = int(math.log(full[rows].max() / probe, _STEP))
    # Rows whose entries before such a place are alike become neighbours.
    places = np.unique((probe * _STEP ** np.arange(steps + 1)).astype(np.int64))
    sums = _checksums(block_table[slots[rows], : places[-1]], places).T
    rows = rows[np.lexsort((num_tokens[rows], *sums[::-1]))]
    limit = np.minimum(full[rows[:-1]], full[rows[1:]])
    shared = _common(block_table, slots[rows[:-1]], slots[rows[1:]], limit) * block_size
    return _worthwhile(rows, shared // rule.granule * rule.granule, rule)[1]


def _checksums(ids: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
    """Of the entries before each of the places [P] of ids [n, W]: int64 [n, P], or [n] of all of them."""
    mixed = ids * _WEIGHTS[np.arange(ids.shape[1]) % len(_WEIGHTS)]
    if places is None:
        return np.asarray(mixed.sum(1))
    parts = np.add.reduceat(mixed, np.concatenate([[0], places[:-1]]), axis=1)
    return np.asarray(parts.cumsum(1))


def _common(table: np.ndarray, one: np.ndarray, other: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """How many leading entries rows one[i] and other[i] of the table have in common, at most limit[i]."""
    common = np.zeros(len(one), dtype=np.int64)
    open_, begin, width = np.arange(len(one)), 0, _COMPARED
    while len(open_):
        part = slice(begin, begin + width)
        differs = table[one[open_], part] != table[other[open_], part]
        first = np.where(differs.any(1), differs.argmax(1), differs.shape[1])
        common[open_] = begin + first
        begin, width = begin + width, 2 * width
        open_ = open_[(common[open_] >= begin) & (begin < limit[open_])]
    return np.asarray(np.minimum(common, limit))


def _worthwhile(rows: np.ndarray, shared: np.ndarray, rule: CascadeRule) -> tuple[int, list[PrefixGroup]]:
    """The groups of neighbours that save most together, and how many tokens: either all rows with what all of them share, or the
    best of each part between the places where neighbours share no more than that. shared [n - 1]."""
    if len(rows) < rule.min_members:
        return 0, []
    height = int(shared.min())
    bounds = [0, *(np.flatnonzero(shared == height) + 1).tolist(), len(rows)]
    saved: int = 0
    groups: list[PrefixGroup] = []
    for begin, end in pairwise(bounds):
        if end - begin >= rule.min_members:
            more, found = _worthwhile(rows[begin:end], shared[begin : end - 1], rule)
            saved, groups = saved + more, groups + found
    together = (len(rows) - 1) * height
    if rule.accepts(len(rows), height) and together >= saved:
        return together, [PrefixGroup(rows, height)]
    return saved, groups
