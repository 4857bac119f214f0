"""Windows and gradient steps in a layer's derivation: values of token i, or of step j, and what is summed over them.

Input: a pass, its rule, a printer. Output: printers that show per-token names with an index, and lines. Derives
nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ttmdsl.explain_fn import Line
from ttmdsl.expr import Expr, Ref
from ttmdsl.pretty import Level, Printer
from ttmdsl.rule import PassRule
from ttmdsl.simplify_expr import mul, scale, split, sub
from ttmdsl.spec import LayerSpec, Memory, Pass, Window
from ttmdsl.walk_expr import rewrite, walk


def indexed(printer: Printer, roots: list[Expr], index: str, only: frozenset[str] | None = None) -> Printer:
    """A printer that shows the roots' values of one token with an index; params and memories have none."""
    shown = dict(printer.names)
    for node in (n for root in roots for n in walk(root)):
        if isinstance(node, Ref) and node.kind in ("input", "gate", "let") and (only is None or node.name in only):
            shown[node.name] = _index(printer, printer.style.name(node.name, len(node.shape)), index)
    return replace(printer, names=shown)


def _index(printer: Printer, name: str, index: str) -> str:
    return printer.style.at_time(name, index) if len(index) == 1 else printer.style.subscript(name, index)


def of_window(p: Pass, rule: PassRule, printer: Printer, index: str = "i") -> Printer:
    """The printer of a window's summand: that of token i. Without a window, the printer itself."""
    roots = [p.bias, *(e for _, e in rule.definitions), *rule.gradients.values()]
    return indexed(printer, roots, index) if p.window else printer


def summed(window: Window, body: str, printer: Printer, index: str = "i") -> str:
    """The sum over the window's tokens of its weight times something of token i."""
    style = printer.style
    weight = ""
    if window.weight is not None:
        weight = _index(printer, printer.expr(window.weight, Level.ATOM), index) + " "
    tokens = rf"t-{window.size} < {index} \leq t" if style.built_up else f"{{t-{window.size} < {index} ≤ t}}"
    return style.sum_over(tokens, weight + body)


def window_lines(p: Pass, rule: PassRule, loss: str, printer: Printer) -> list[Line]:
    """The loss as a sum, and its summand."""
    assert p.window is not None
    style = printer.style
    one = _index(printer, r"\ell" if style.built_up else "ℓ", "i")
    note = "the last weight is that of i = t; there is no token before the first" if p.window.weight else ""
    return [
        Line(loss, summed(p.window, one, printer), note),
        Line(one, of_window(p, rule, printer).expr(p.bias)),
    ]


def as_sum(window: Window, term: Expr, inner: Printer, outer: Printer, index: str = "i") -> tuple[Expr, dict[str, str]]:
    """The windowed sum of a term, as a name to calculate with, and how that name is shown."""
    number, rest = split(term)
    if rest.shape != term.shape:
        number, rest = 1.0, term
    ref = Ref("windowed sum", "let", term.shape)
    return scale(number, ref), {ref.name: summed(window, inner.expr(rest, Level.PRODUCT), outer, index)}


def step_lines(spec: LayerSpec, p: Pass, rule: PassRule, memory: Memory, printer: Printer) -> list[Line]:
    """The gradient steps of one token, in order."""
    opt, style = p.optimizer, printer.style
    stepped = {t.name for t in spec.tensors if opt.step_dim and t.shape[:1] == (opt.step_dim,)}
    own = frozenset({*stepped, *(name for name, _ in rule.definitions)})
    name = printer.name(memory.name, memory.shape)
    roots = [p.bias, opt.rate, *(e for _, e in rule.definitions), *rule.gradients.values()]
    start, before, after = (style.subscript(name, i) for i in ("t,0", "t,j-1", "t,j"))
    each = indexed(of_window(p, rule, printer), roots, "j", own)
    previous = Ref("the state before the step", "let", memory.shape)

    def there(node: Expr) -> Expr | None:
        return replace(previous, name=node.name + " there") if isinstance(node, Ref) and node.kind == "memory" else None

    shown = {previous.name: before}
    for m in p.memories:
        shown[m.name + " there"] = style.subscript(printer.name(m.name, m.shape), "t,j-1")
    slope = rewrite(rule.gradients[memory.name], there)
    if p.window is not None:
        slope, sums = as_sum(p.window, slope, replace(each, names={**each.names, **shown}), each)
        shown |= sums
    stepping = replace(each, names={**each.names, **shown})
    past = {m.name: style.at_time(printer.name(m.name, m.shape), "t-1") for m in p.memories}
    first = "" if opt.at == "retained" or opt.batch > 1 else f", the first gradient at {past[memory.name]}"
    kept = replace(printer, names={**printer.names, **past}).expr(p.retention[memory.name])
    return [
        Line(start, kept),
        Line(after, stepping.expr(sub(previous, mul(opt.rate, slope))), f"j = 1 .. {opt.per_token}{first}"),
        Line(style.at_time(name, "t"), style.subscript(name, f"t,{opt.per_token}")),
    ]
