"""What the number of an order says of a kernel's text: in which order it computes its values, where it loads its tiles,
and where it computes its products.

Input: a number, as entries of tables have it. Output: `Loads` and `Products`; the order itself is schedule.py's. What a
compiler makes of any of these only measuring tells.
"""

from __future__ import annotations

from enum import Enum

ORDERS = 7  # ways to order values, whatever the peak: numbers from 1 on
ELSEWHERE = 8  # added to a number where loads are elsewhere
PLACED = 16  # added once or twice to a number where products are computed elsewhere


class Loads(Enum):
    """Where a kernel loads its tiles: a scan ahead of all else, or each where it is first used; a map there, or some
    products earlier, so that several are waited for at once: always, or where it takes little room, or just where it
    takes more."""

    AHEAD = "ahead"
    LATE = "late"
    EARLY = "early"
    FITTING = "fitting"
    CROWDED = "crowded"

    @classmethod
    def of(cls, number: int, scan: bool) -> Loads:
        """What the number of an order says."""
        elsewhere, order = divmod(number % PLACED, ELSEWHERE)
        if scan:
            return cls.LATE if elsewhere else cls.AHEAD
        if order:
            return cls.EARLY if elsewhere else cls.LATE
        return cls.CROWDED if elsewhere else cls.FITTING


class Products(Enum):
    """Where a kernel computes a product that is taken once: there, if that makes no long line, or in any case, or where
    the order has it. There it may accumulate onto what it is added to, but waits for that."""

    SHORT = "short"
    TAKEN = "taken"
    ORDERED = "ordered"

    @classmethod
    def of(cls, number: int) -> Products:
        """What the number of an order says."""
        return tuple(cls)[number // PLACED]


ALL = range(len(Products) * PLACED)  # 0 is a kernel's own
