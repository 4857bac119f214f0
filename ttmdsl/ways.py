"""The ways to a form's gradients, of which the cheapest by the prices of staging.py is taken.

Input: backward programs, and the scans of forward passes that save something for them. Output: the `Way` that was
chosen, and the kernels of its backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ttmdsl.ahead import prologue, scaled, shared_products, worth_saving
from ttmdsl.ir import DEAR, Node, Program, depends_on, is_token_tile, reachable, tied
from ttmdsl.kernels import Kernel
from ttmdsl.rounding import taken_exactly
from ttmdsl.scans import free_axis, passed_on, scans_of
from ttmdsl.schedule import FULL, Weight
from ttmdsl.staging import DOUBT, SCAN, cost, spilled_at_128, staged, work
from ttmdsl.vector_kernels import found_last

Division = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Choice:
    """What was found by looking for what is cheapest: the number of the `Way` to the gradients, and which of these
    share kernels."""

    way: int
    division: Division


@dataclass(frozen=True)
class Way:
    """One way to the gradients: by this backward program, whose maps may cost `doubt` times what they seem to; with a
    forward pass by these scans, which saves the `cuts` for it, of all that it will `have` of that pass; and with the
    kernel before its own scan, if any. Those of one `kind` differ in what the forward pass saves."""

    program: Program
    doubt: float
    scans: tuple[Kernel, ...]
    cuts: tuple[Node, ...]
    have: tuple[Node, ...]
    free: Kernel | None
    kind: tuple[int, int]


def cheapest(
    name: str, ways: Sequence[Way], weight: Weight, careful: bool, choice: Choice | None
) -> tuple[Way, list[Kernel], Choice]:
    """The cheapest of the ways to the gradients, or the chosen one, and the kernels of its backward pass."""
    numbers: Iterable[int] = range(len(ways))
    if choice and choice.way in numbers:
        numbers = [choice.way]
    divisions: dict[tuple[int, int], Division] = {}  # which take long to find: of the first way of each kind
    least, best = math.inf, None
    for number in numbers:
        way = ways[number]
        division = choice.division if choice else divisions.get(way.kind, ())
        found = _backward(name, way, weight, division, least - len(way.cuts))
        if not found:
            continue
        price, kernels, divisions[way.kind] = found
        # what is saved is written once, too
        price += len(way.cuts) + (_twice(kernels, way.have) if careful else 0)
        if price < least:
            least, best = price, (way, kernels, Choice(number, divisions[way.kind]))
    assert best  # the first has no price to beat
    return best


def free_ways(name: str, program: Program, saved: tuple[Node, ...], few: bool) -> list[Kernel | None]:
    """The kernel before the backward scan, if it wants one. Where the scan has `few` steps, or goes in rounds, it loads
    rather than computes: then also the same kernel that saves products which maps take, too."""
    handed = program.ends().values()
    found = functools.partial(prologue, f"_{name}_backward_free", program, handed, tied(program, "cocarry"), saved)
    free = found()
    given = (*saved, *(free.saves if free else ()))
    in_rounds = program.inner and free_axis(program, handed, given) != program.inner
    if not (few or in_rounds):
        return [free]
    free = found(loads=True)
    gradients = [v for k, v in program.outputs.items() if k.startswith("d:")]
    products = shared_products(free, gradients, saved) if free else ()
    if free is None or not products:
        return [free]
    have = {*saved, *products}
    exact = taken_exactly([n for n in reachable(gradients, have) if n not in have], program)
    return [free, replace(free, saves=(*free.saves, *products), exact=frozenset(exact.intersection(products)))]


def _backward(
    name: str, way: Way, weight: Weight, division: Division, most: float
) -> tuple[float, list[Kernel], Division] | None:
    """The kernels of a way's backward pass; before them what all cost. None where these cost `most` and more."""
    program, free, saved = way.program, way.free, way.have
    handed = program.ends()
    gradients = {k[2:]: v for k, v in program.outputs.items() if k.startswith("d:")}
    d_ends, chained = list(handed.values()), tied(program, "cocarry")
    price, kernels = staged(free, weight) if free else (0.0, [])
    saved += free.saves if free else ()
    cuts = worth_saving(program, d_ends, gradients.values(), saved, chained, 1)
    used = {n.name for n in reachable(gradients.values(), {*saved, *cuts}) if n.role == "cocarry"}
    scan = Kernel(f"_{name}_backward_scan_kernel", "scan", program, True, (), tuple(handed.items()))
    scans = scans_of(replace(scan, keeps=tuple(sorted(used)), saves=cuts), saved, weight)
    kernels += scans
    chain = sum(SCAN * cost(k, FULL) for k in scans if k.kind == "scan")
    if way.doubt * price + chain >= most:
        return None
    # gradients of decays take what is scaled exactly
    have = tuple(n for n in (*saved, *passed_on(scans), *cuts) if not scaled(n))
    tail = found_last(gradients, have)
    division, shared = shares(program, tail.others, tail.sums, have, weight, division)
    for i, (paid, share) in enumerate(shared):
        price += paid
        kernels += [replace(k, name=f"_{name}_backward_{i + 1}{k.name}") for k in share]
    if tail.gradients:
        last = Kernel(f"_{name}_backward_vectors_kernel", "map", program, outputs=tuple(tail.gradients.items()))
        kernels.append(last.giving((*have, *tail.sums.values())))
        price += work(kernels[-1])
    return way.doubt * price + chain + spilled_at_128(kernels, weight), kernels, division


def _twice(kernels: Iterable[Kernel], exact: tuple[Node, ...]) -> int:
    """What it costs more to load these values in float32; by scans no more than by others, as it is copied ahead."""
    tiles = {n for n in exact if is_token_tile(n)}
    return sum(len(tiles.intersection(k.given)) for k in kernels)


def shares(
    program: Program,
    gradients: Mapping[str, Node],
    sums: Mapping[str, Node],
    saved: tuple[Node, ...],
    weight: Weight,
    known: Division = (),
) -> tuple[Division, list[tuple[float, list[Kernel]]]]:
    """The cheapest of a few divisions of the inputs' gradients, and of sums by number that a later kernel takes, or the
    one that is known; and for each share what it costs and its kernels."""
    found = {**gradients, **sums}
    gates = [k for k, v in found.items() if len(v.axes) < 2]
    vectors = {k: v for k, v in found.items() if k not in gates}
    divisions = [known]
    if {k for share in known for k in share} != found.keys():
        divisions = [split(program, found, n) for n in (1, 2)]
        if gates and vectors:
            divisions += [[gates, *split(program, vectors, n)] for n in (1, 2)]

    @functools.cache
    def kernels(*share: str) -> tuple[float, list[Kernel]]:
        outputs = tuple((k, gradients[k]) for k in share if k in gradients)
        saves = tuple(sums[k] for k in share if k in sums)
        kernel = Kernel("_kernel", "map", program, outputs=outputs, saves=saves)
        return staged(kernel.giving(saved), weight, gates_last=len(share) > len(gates) and {*gates} <= {*share})

    least, best = math.inf, divisions[0]
    for division in divisions:
        total = 0.0
        # walks in rounds take longer than they seem to where they are divided (measured)
        doubt = DOUBT if program.inner and len(division) > 1 else 1.0
        for share in division:
            total += doubt * kernels(*share)[0]
            if total >= least:
                break
        else:
            least, best = total, division
    return best, [kernels(*share) for share in best]


def split(program: Program, gradients: Mapping[str, Node], groups: int) -> list[list[str]]:
    """Shares the gradients among kernels so that each does about as much work and little of it twice."""
    heavy = {
        k: {n for n in reachable([v]) if n.op == "contract" or n.op in DEAR}
        & depends_on([v], [n for n in program.leaves() if n.role in ("cot", "cocarry")])
        for k, v in gradients.items()
    }
    order = sorted(gradients, key=lambda k: (-len(heavy[k]), k))
    shares: list[list[str]] = [[] for _ in range(min(groups, len(order)))]
    work: list[set[Node]] = [set() for _ in shares]
    limit = len(set().union(*heavy.values())) / max(len(shares), 1)
    for k in order:
        costs = [len(w | heavy[k]) for w in work]
        added = [len(heavy[k] - w) for w in work]
        best = min(range(len(shares)), key=lambda i: (added[i] + max(0.0, costs[i] - 1.3 * limit), costs[i]))
        shares[best].append(k)
        work[best] |= heavy[k]
    return [s for s in shares if s]
