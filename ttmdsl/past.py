"""How far back a layer looks: the past tokens that an exact resumption needs.

Input: a `LayerSpec`. Output: for each tensor how many tokens before the current one its formulas reach. The state holds
these tokens (`<keyword>_past`, the last one last) and how many tokens there have been (`tokens`). Makes no values.
"""

from __future__ import annotations

from ttmdsl.expr import Delay, Expr, Ref
from ttmdsl.spec import LayerSpec, Tensor
from ttmdsl.walk_expr import children

COUNT = "tokens"
SEEN = "seen__before"  # whether there are tokens before a chunk, each by itself
SEEN_KEPT = "seen__kept"  # how many there were before this call


def past_name(tensor: Tensor) -> str:
    """State key of a tensor's past."""
    return f"{tensor.keyword}_past"


def before_name(tensor: Tensor) -> str:
    """What backends call a tensor's values at the tokens before a chunk."""
    return f"{tensor.keyword}__before"


def kept_name(tensor: Tensor) -> str:
    """What backends call those that were before this call."""
    return f"{tensor.keyword}__kept"


def roots(spec: LayerSpec) -> list[Expr]:
    """Every declared expression of a layer."""
    found = [e for _, e in spec.lets]
    for p in spec.passes:
        own = (p.window and p.window.weight, p.optimizer.rate, p.optimizer.decay, p.optimizer.ridge)
        found += [p.bias, *(e for e in own if e), *p.retention.values(), *p.project.values(), p.read]
    return found


def history(spec: LayerSpec) -> dict[str, int]:
    """Depth of the past by the spec's own names, in the order of declaration; tensors without a past left out."""
    lets = dict(spec.lets)
    depths: dict[str, int] = {}
    visited: set[tuple[Expr, int]] = set()

    def note(e: Expr, ago: int) -> None:
        if (e, ago) in visited:
            return
        visited.add((e, ago))
        match e:
            case Ref(name=name, kind="input" | "gate"):
                depths[name] = max(ago, depths.get(name, 0))
            case Ref(name=name, kind="let"):
                note(lets[name], ago)
            case Delay(x=x, by=by):
                note(x, ago + by)
            case _:
                for c in children(e):
                    note(c, ago)

    for e in roots(spec):
        note(e, 0)
    for p in spec.passes:
        if p.window is not None:
            note(p.bias, p.window.size - 1)
    return {t.name: depths[t.name] for t in spec.tensors if depths.get(t.name)}


def past_axes(spec: LayerSpec) -> dict[str, tuple[str, ...]]:
    """Entries of the state beyond [N, H]: each past, and the number of tokens, which has one number for a sequence."""
    depths = history(spec)
    axes = {past_name(t): (str(depths[t.name]), *t.shape) for t in spec.tensors if t.name in depths}
    return axes | ({COUNT: ()} if axes else {})
