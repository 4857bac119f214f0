"""Give the parts of a gradient the names that papers give them.

Input: a loss and its gradients, written out. Output: definitions in order, and the gradients in terms of them. A name
never meets one of the spec's own. Changes no value.
"""

from __future__ import annotations

from ttmdsl.expr import Apply, Binary, Expr, JacT, Map, MatVec, Norm, Ref
from ttmdsl.spec import LayerSpec
from ttmdsl.walk_expr import children, rewrite, walk, with_children


def name_definitions(
    loss: Expr, gradients: dict[str, Expr], spec: LayerSpec
) -> tuple[tuple[tuple[str, Expr], ...], dict[str, Expr]]:
    """Name what the papers name: residuals, vectors pulled back through a Jacobian, and whatever is used twice."""
    taken = _taken(spec)
    forward = set(walk(loss))
    residuals = {node.x for node in forward if isinstance(node, Norm)}
    order: dict[Expr, None] = {}  # every node of the gradients, arguments first
    for g in gradients.values():
        order.update(dict.fromkeys(walk(g)))
    uses: dict[Expr, int] = {}
    for node in order:
        for c in children(node):
            uses[c] = uses.get(c, 0) + 1

    stems: dict[Expr, str] = {}
    for node in order:
        if isinstance(node, Apply) and node.fn in spec.kernels:  # phi(k) has no components that a name could stand for
            continue
        if len(node.shape) == 2 or not any(not isinstance(n, Binary) for n in walk(node) if children(n)):
            continue
        if node in residuals and node.shape:
            stems[node] = "e"
        elif isinstance(node, JacT):
            stems[node] = "u"
        elif uses.get(node, 0) > 1:
            stems[node] = _stem(node, node in forward)
    names: dict[Expr, str] = {}
    for node, stem in stems.items():
        alone = sum(s == stem for s in stems.values()) == 1
        candidates = ([stem] if alone else []) + [f"{stem}{i}" for i in range(1, len(stems) + len(taken) + 2)]
        names[node] = next(c for c in candidates if c not in taken and c not in names.values())

    def named(node: Expr) -> Expr | None:
        return Ref(names[node], "let", node.shape) if node in names else None

    definitions = tuple(
        (name, with_children(node, tuple(rewrite(c, named) for c in children(node)))) for node, name in names.items()
    )
    return definitions, {name: rewrite(g, named) for name, g in gradients.items()}


def _taken(spec: LayerSpec) -> set[str]:
    names = {t.name for t in spec.tensors} | set(spec.consts) | set(spec.dims) | set(spec.fns)
    return names | {m.name for m in spec.memories} | {n for n, _ in spec.lets} | {p.name for p in spec.passes}


def _stem(node: Expr, forward: bool) -> str:
    """A customary letter: h before and a after an activation, r for what flows back, c for a scalar."""
    if node.shape == ():
        return "c"
    if not forward:
        return "r"
    match node:
        case MatVec():
            return "h"
        case Map():
            return "a"
        case _:
            return "z"
