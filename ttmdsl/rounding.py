"""What rounding does to a program: where it is enlarged, and where it adds up.

Input: programs. Output: which of their values pass in float32, and which products take twice the digits of the inputs'
dtype. Decides nothing of kernels: plan.py and staging.py do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ttmdsl.ir import (
    DECAYED,
    TOKEN_AXES,
    Node,
    Program,
    has_dim,
    is_matmul,
    is_product,
    nearest,
    operands,
    original,
    reachable,
    tied,
)
from ttmdsl.padding import singular

# what enlarges the rounding of what it takes
EXPONENTIAL = frozenset({"exp2", "log2"})
ENLARGING = EXPONENTIAL | {"cumsum"}
BENDING = frozenset({"tanh", "erf", "sigmoid", "softplus"})
# Each product adds the rounding of its operands to what these have. As measured in half precision, at unit keys:
# chains of 2 products lose 2.4e-3, of 5 to 8 3.1e-3 to 4.1e-3, of 10 4.1e-3, of 12 6.7e-3.
CHAIN = 10
FEW = 4  # what fewer products follow is little of that
UNBOUNDED = 4  # in place of CHAIN where tokens of a unit enlarge one another's rounding


def rounds_operands(node: Node) -> bool:
    """Whether a value is a product of matrices that takes its operands in the inputs' dtype: not one of weights of
    tokens."""
    return is_matmul(node) and any(map(has_dim, node.args))


def enlarged(nodes: Sequence[Node], later: Iterable[Node] = ()) -> set[Node]:
    """What these values, operands first, take and enlarge the rounding of: what leads, by way of no product of tiles,
    which would round it anyway, to an exponent, to a product under decays, or to sums up to every token, such as
    gradients of decays, which are differences of what is summed up; or to what others enlarge `later`."""

    def here(n: Node) -> tuple[Node, ...]:
        return n.args if n.op in ENLARGING else n.args[2:] if n.op in DECAYED else ()

    return _leading(nodes, here, rounds_operands, later)


def taken_exactly(nodes: Sequence[Node], program: Program, later: Iterable[Node] = ()) -> set[Node]:
    """What these values of a program, operands first, take in float32: where they, or others `later`, enlarge what
    rounding leaves out; in a steep one everywhere but in products, which would round it anyway. Of the inside of a deep
    memory that is what functions take: in sums along its many rows rounding averages out (measured)."""
    taken = {a for n in nodes if not is_product(n) for a in operands(n)}
    if steep(program):
        return taken
    taken &= enlarged(nodes, later)
    summed = {n for n in taken if program.inner in n.axes}
    if summed:
        summed -= _leading(nodes, lambda n: n.args if n.op in BENDING | EXPONENTIAL else (), is_product)
    return taken - summed


def bent(nodes: Sequence[Node]) -> set[Node]:
    """What functions of a layer take, by way of no product: all that follows from the inside of a deep memory, or from
    what is predicted, is these and their slopes, so their rounding is in every gradient, and of few tokens it does not
    cancel out (measured: of one token's rate 5.3e-3 to 3.7e-3, of trellis' decays 1.8e-2 to 4.6e-3, for a twentieth of
    the time)."""
    return _leading(nodes, lambda n: n.args if n.op in BENDING else (), is_product)


def _leading(
    nodes: Sequence[Node],
    ends: Callable[[Node], Iterable[Node]],
    rounds: Callable[[Node], bool],
    later: Iterable[Node] = (),
) -> set[Node]:
    """What these values, operands first, take that leads by way of none that `rounds` what it takes to what is taken at
    `ends`, or to what others take `later`."""
    found = set(later)
    for n in reversed(nodes):
        found.update(ends(n), () if rounds(n) or n not in found else n.args)
    return found


def steep(program: Program) -> bool:
    """Whether a state meets a function that is infinite at 0, as it does where it is divided by its own length.

    The shorter the state, the more such a function enlarges what rounding has added to it, unit after unit.
    """
    chained = tied(program, "carry")
    nodes = reachable(program.ends().values())
    return any(singular(n) and n in chained and not any(x in TOKEN_AXES for x in n.axes) for n in nodes)


def perpendicular(program: Program) -> bool:
    """Whether what is read of a carry is divided by its length, or the like. Lengths change nothing then: the state is
    at right angles to its cotangent, and of the sum of their elements' products little but rounding is left."""
    chained = tied(program, "carry")
    return any(singular(n) and n in chained and not _of_softmax(n) for n in program.nodes)


def _of_softmax(node: Node) -> bool:
    """Whether this is one over a sum of exponentials, which knows no lengths."""
    return node.op == "recip" and node.args[0].op == "sum" and node.args[0].args[0].op == "exp2"


def unbounded(program: Program) -> bool:
    """Whether tokens of a unit act on one another by an inverse of products of two inputs: where these are one, as in
    the delta rule, it has a bound; else what rounding has added grows from token to token."""

    def inputs(product: Node) -> set[str]:
        return {n.name for n in reachable(product.args[:2]) if n.role == "token" and has_dim(n)}

    inverses = [n for n in reachable(program.outputs.values()) if n.op == "tri_inv"]
    products = [n for x in inverses for n in nearest(x.args[0], _multiplies, lambda n: n.op == "leaf")]
    return any(len(inputs(n)) > 1 for n in products)


def _multiplies(node: Node) -> bool:
    return is_product(node) or node.op in DECAYED


def adding_up(forward: Program, backward: Program) -> frozenset[Node]:
    """The products on long chains, from an input to a gradient, whose rounding adds up: all but each chain's last few.

    What is added to a state's cotangent takes all digits, too, where these are at right angles, unless the cotangent
    takes part in it: gradients of decays see that (trellis' log_beta 7.8e-3 to 1.9e-3, the worst of eight draws).

    A chain goes from a unit to the next once. Shorter ones count where tokens enlarge one another's rounding. Memories
    of several layers have longer ones, beside which an input passes as it is (measured): not these.
    """
    if forward.inner:
        return frozenset()
    most = UNBOUNDED if unbounded(forward) else CHAIN
    nodes = reachable([*forward.outputs.values(), *backward.outputs.values()])
    ends = {("carry", name): end for name, end in forward.ends().items()}
    ends |= {("cocarry", name): end for name, end in backward.ends().items()}
    adds = {n for n in nodes if _adds(n)}
    before: dict[Node, int] = {}
    after: dict[Node, int] = {}
    for _ in range(2):  # units
        first = {key: before.get(end, 0) for key, end in ends.items()}
        more = {(n.role, n.name): after[n] for n in after}
        after = {end: more.get(key, 0) for key, end in ends.items()}
        before = {}
        for n in nodes:
            start = first.get((n.role, n.name), 0)
            before[n] = max((before[a] for a in operands(n)), default=start) + (n in adds)
        for n in reversed(nodes):
            follow = after.setdefault(n, 0) + (n in adds)
            for a in operands(n):
                after[a] = max(after.get(a, 0), follow)
    long = frozenset(n for n in adds if after[n] >= FEW and before[n] + after[n] > most)
    chained = tied(backward, "cocarry")
    handed = backward.ends().values() if long and perpendicular(forward) else ()
    added = (n for end in handed for n in nearest(end, is_product, lambda n: n.op == "leaf"))
    return long.union(n for n in added if n in adds and n not in chained)


def _adds(node: Node) -> bool:
    """Whether a product rounds what it takes: inputs are as they are given."""
    return rounds_operands(node) and any(original(a).role != "token" for a in node.args)
