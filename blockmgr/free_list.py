"""The order in which free blocks are used up: an intrusive, circular, doubly linked list over block ids. It knows neither
why a block is free nor what it still holds; the pool decides which end a block goes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fairlane.blockmgr.errors import NoFreeBlocks

NULL_BLOCK = 0
_OFF_LIST = -1


class FreeList:
    """Free block ids, head first. Block 0, which is never free, is the sentinel: next[0] is the head, prev[0] the tail.

            next  -->
        0 <==> 7 <==> 3 <==> 5 <==> (0)          pop takes 7; push_front goes before 7, push_back after 5
            <--  prev

    All operations are O(1) per block. next[b] = -1 marks a block that is not on the list. A second list behind the first, with
    num_blocks as its sentinel, has the blocks that are used up last; size counts both, num_last only those.
    """

    __slots__ = ("last", "next", "num_last", "prev", "size")

    def __init__(self, num_blocks: int) -> None:
        """A list of the blocks 1 .. num_blocks - 1 in ascending order, none of them in the second one."""
        self.last = num_blocks
        self.next = [*range(1, num_blocks), NULL_BLOCK, num_blocks]
        self.prev = [num_blocks - 1, *range(num_blocks - 1), num_blocks]
        self.size = num_blocks - 1
        self.num_last = 0

    def __len__(self) -> int:
        return self.size

    def __contains__(self, block: int) -> bool:
        return block != NULL_BLOCK and self.next[block] != _OFF_LIST

    def __iter__(self) -> Iterator[int]:
        """In the order in which they are used up."""
        for sentinel in (NULL_BLOCK, self.last):
            block = self.next[sentinel]
            while block != sentinel:
                yield block
                block = self.next[block]

    def pop_many(self, count: int) -> list[int]:
        """Takes `count` blocks from the head, in order. Raises NoFreeBlocks, and takes none, if there are fewer."""
        if count > self.size:
            raise NoFreeBlocks(count, self.size)
        first = self.size - self.num_last
        if count > first:
            self.num_last -= count - first
            return self._pop(NULL_BLOCK, first) + self._pop(self.last, count - first)
        return self._pop(NULL_BLOCK, count)

    def _pop(self, sentinel: int, count: int) -> list[int]:
        following = self.next
        block = following[sentinel]
        taken = []
        for _ in range(count):
            taken.append(block)
            after = following[block]
            following[block] = _OFF_LIST
            block = after
        following[sentinel] = block
        self.prev[block] = sentinel
        self.size -= count
        return taken

    def push_front_many(self, blocks: Sequence[int]) -> None:
        """Puts `blocks`, none of them on the list, before the head: blocks[0] becomes the head."""
        self._splice(NULL_BLOCK, blocks, self.next[NULL_BLOCK])

    def push_back_many(self, blocks: Sequence[int]) -> None:
        """Puts `blocks`, none of them on the list, after the tail: blocks[-1] becomes the tail."""
        self._splice(self.prev[NULL_BLOCK], blocks, NULL_BLOCK)

    def push_last_many(self, blocks: Sequence[int]) -> None:
        """Puts `blocks`, none of them on the list, behind everything: used up when there is nothing else, blocks[-1] last."""
        self._splice(self.prev[self.last], blocks, self.last)
        self.num_last += len(blocks)

    def remove(self, block: int) -> None:
        """Takes a block that is on the list out of its middle; of the second list, num_last is the caller's to lower."""
        before, after = self.prev[block], self.next[block]
        self.next[before] = after
        self.prev[after] = before
        self.next[block] = _OFF_LIST
        self.size -= 1

    def _splice(self, before: int, blocks: Sequence[int], after: int) -> None:
        following, preceding = self.next, self.prev
        for block in blocks:
            following[before] = block
            preceding[block] = before
            before = block
        following[before] = after
        preceding[after] = before
        self.size += len(blocks)
