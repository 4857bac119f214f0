"""Minimum cuts: what it costs least to cut, so that nothing flows from one place of a network to another.

Input: a `Network`, places joined by ways of so much capacity. Output: the places that are still joined with the sink;
of several cuts of the same cost that next to it. Knows nothing of programs. (A library for networks finds the same, and
takes a tenth of a second to import, when a whole layer is to compile in less than two.)
"""

from __future__ import annotations

from collections.abc import Hashable

UNIT = 1 << 12  # a cost of 1, in whole numbers
NEVER = 1 << 60  # a way that no cut goes through


class Network:
    """Places, which anything hashable may stand for, and ways between them, one direction each."""

    SOURCE, SINK = "source", "sink"

    def __init__(self) -> None:
        self._left: dict[Hashable, dict[Hashable, int]] = {self.SOURCE: {}, self.SINK: {}}

    def join(self, a: Hashable, b: Hashable, most: int = NEVER) -> None:
        """A way from one place to another, which costs `most` to cut."""
        self._left.setdefault(a, {})[b] = most
        self._left.setdefault(b, {}).setdefault(a, 0)

    def cut(self) -> set[Hashable]:
        """The places on the sink's side. Afterwards nothing more can flow."""
        left = self._left
        while path := self._path():
            most = min(left[a][b] for a, b in path)
            for a, b in path:
                left[a][b] -= most
                left[b][a] += most
        return self._leading_to_sink()

    def _path(self) -> list[tuple[Hashable, Hashable]]:
        """Steps of a shortest way from the source to the sink on which something can flow; none, if there is none."""
        came: dict[Hashable, Hashable] = {self.SOURCE: self.SOURCE}
        queue: list[Hashable] = [self.SOURCE]
        for a in queue:
            new = [b for b, most in self._left[a].items() if most > 0 and b not in came]
            came |= dict.fromkeys(new, a)
            queue += new
        path: list[tuple[Hashable, Hashable]] = []
        end: Hashable = self.SINK
        while end in came and end != self.SOURCE:
            path.append((came[end], end))
            end = came[end]
        return path[::-1]

    def _leading_to_sink(self) -> set[Hashable]:
        found: set[Hashable] = {self.SINK}
        queue: list[Hashable] = [self.SINK]
        for b in queue:
            new = [a for a in self._left[b] if self._left[a][b] > 0 and a not in found]
            found.update(new)
            queue += new
        return found
