"""The derivation of a layer, as a paper would print it.

Input: `UpdateRule`, and what the caller says of the recurrence's class. Output: Unicode text, or LaTeX (an `align*`
block, amsmath); `header` gives the few lines that stand above a generated module. Factored gradients stay factored; a
gradient through a function of a memory's columns is written for one column. Derives nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ttmdsl.explain_fn import Line, function_pages
from ttmdsl.explain_optimizer import argmin, newton_schulz, newton_schulz_lines
from ttmdsl.explain_sums import as_sum, of_window, step_lines, window_lines
from ttmdsl.expr import Apply, Binary, Columns, ColumnsJacT, Expr, Inner, JacT, Outer, Ref, RowsJacT, Shape, Transpose
from ttmdsl.notation import Latex, Style, Text
from ttmdsl.pretty import Level, Printer
from ttmdsl.rule import PassRule, UpdateRule
from ttmdsl.simplify_expr import ONE, add, mul, neg, scale, split, sub, transpose
from ttmdsl.spec import LayerSpec, Memory, Pass
from ttmdsl.walk_expr import rewrite, walk

_Section = tuple[str, list[Line]]


def explain(rule: UpdateRule, recurrence: str = "", latex: bool = False) -> str:
    """Loss, functions, gradient, update and readout of a layer; `recurrence` is printed as given."""
    style: Style = Latex() if latex else Text()
    sections = _sections(rule, style)
    if latex:
        return _as_latex(rule, sections, recurrence)
    if recurrence:
        sections.append(("recurrence", [Line("", recurrence, relation="")]))
    return "\n".join([rule.spec.name, *(_as_text(title, lines) for title, lines in sections)])


def header(rule: UpdateRule) -> list[str]:
    """The loss, its gradient and the update in a few lines of Unicode."""
    found: list[str] = []
    for title, lines in _sections(rule, Text()):
        if not title.startswith(("function", "constants")):
            found += [_equation(line) for line in lines]
    return found


def _sections(rule: UpdateRule, style: Style) -> list[_Section]:
    spec = rule.spec
    pages = function_pages(spec, tuple(rule.jacobians), Printer(style))
    plain = {name: page.projection for name, page in pages.items() if page.projection is not None}
    printer = Printer(style, projections=plain)
    sections: list[_Section] = []
    for name, page in pages.items():
        sections.append((f"function {style.name(name, 0) if isinstance(style, Text) else name}", list(page.lines)))
    for kernel in spec.kernels.values():
        left = style.inner(*(style.call(style.name(kernel.name, 0), style.name(x, 1)) for x in ("x", "y")))
        inner = Inner(Ref("x", "input", ("d",)), Ref("y", "input", ("d",)))
        value = style.call(style.function("exp"), printer.expr(mul(kernel.scale, inner)))
        sections.append(("feature map", [Line(left, value, "known by its inner products alone")]))
    if spec.lets:
        sections.append(("per token", [Line(printer.name(n, e.shape), printer.expr(e)) for n, e in spec.lets]))
    for p, derived in zip(spec.passes, rule.passes, strict=True):
        of = f" of pass {p.name}" if len(spec.passes) > 1 else ""
        chapter = _Chapter(spec, p, derived, printer)
        declared = window_lines(p, derived, chapter.loss, printer) if p.window else None
        sections.append((f"loss{of}", declared or [Line(chapter.loss, printer.expr(p.bias))]))
        sections.append((f"{'solution' if chapter.solves else 'gradient'}{of}", chapter.gradient()))
        sections.append((f"update{of}", chapter.update()))
        sections.append((f"readout{of}", [chapter.readout()]))
    if spec.consts:
        values = [Line(printer.name(n), f"{value:g}") for n, value in spec.consts.items()]
        sections.append(("constants", values))
    return sections


# ---- one pass -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chapter:
    spec: LayerSpec
    p: Pass
    rule: PassRule
    printer: Printer

    @property
    def style(self) -> Style:
        return self.printer.style

    @property
    def solves(self) -> bool:
        """Whether the step is an argmin."""
        return self.p.optimizer.kind in ("implicit", "least_squares")

    @property
    def loss(self) -> str:
        return r"\mathcal{L}" if self.style.built_up else "L"

    def gradient(self) -> list[Line]:
        one = of_window(self.p, self.rule, self.printer)
        lines = [Line(one.name(n, e.shape), one.expr(e)) for n, e in self.rule.definitions]
        for memory in self.p.memories:
            g = self.rule.gradients[memory.name]
            slice_ = _sliced(g)
            shown = slice_.take(g) if slice_ else g
            printer = self._naming(slice_)
            if self.p.window is not None:
                token = "j" if slice_ else "i"
                inner = replace(self, printer=of_window(self.p, self.rule, self.printer, token))._naming(slice_)
                shown, sums = as_sum(self.p.window, shown, inner, printer, token)
                printer = replace(printer, names={**printer.names, **sums})
            slope = self._slope(self._variable(memory, slice_))
            if self.p.optimizer.kind == "implicit":
                slope = self.style.call(slope, self.style.at_time(self.printer.name(memory.name, memory.shape), "t"))
            lines.append(Line(slope, printer.expr(shown), _remark(slice_)))
        return lines[: -len(self.p.memories)] if self.rule.auxiliary else lines

    def update(self) -> list[Line]:
        opt = self.p.optimizer
        lines: list[Line] = []
        for memory in self.p.memories:
            many = opt.per_token > 1 and _sliced(self.rule.gradients[memory.name]) is None
            lines += step_lines(self.spec, self.p, self.rule, memory, self.printer) if many else self._step(memory)
        if opt.batch > 1:
            points = ", ".join(self._point(m) for m in self.p.memories)
            lines.append(
                Line(
                    points, self.style.words(f"the state after the previous group of {opt.batch} tokens"), relation=":"
                )
            )
        elif opt.at == "retained" and opt.per_token == 1:
            for memory in self.p.memories:
                lines.append(Line(self._point(memory), self._at("t-1").expr(self.p.retention[memory.name])))
        if self.p.last is not None:
            name = self.printer.name(self.p.memories[0].name, self.p.memories[0].shape)
            kept = self.style.words(f"the terms of its last {self.p.last} tokens")
            lines.append(Line(self.style.at_time(name, "t"), kept, "before every step", ":"))
        for memory in self.p.memories:
            projected = self.p.project.get(memory.name)
            if projected is not None:
                left = self.style.at_time(self.printer.name(memory.name, memory.shape), "t")
                arrow = r"\leftarrow" if self.style.built_up else "←"
                lines.append(Line(left, self._at("t").expr(projected), "after every token", arrow))
        return lines + (newton_schulz_lines(opt, self.printer) if opt.kind == "muon" else [])

    def readout(self) -> Line:
        name = self.style.at_time(self.style.name(self.p.name, 1), "t")
        return Line(name, self._at("t").expr(self.p.read))

    def _step(self, memory: Memory) -> list[Line]:
        """The step in terms of the gradient, and written out where that is a formula of one line."""
        opt, style = self.p.optimizer, self.style
        name = self.printer.name(memory.name, memory.shape)
        now, kept = style.at_time(name, "t"), self.p.retention[memory.name]
        slope = Ref("gradient of " + memory.name, "let", memory.shape)
        at_points = style.call(self._slope(name, short=True), ", ".join(self._point(m) for m in self.p.memories))
        names = {**self._at("t-1").names, slope.name: at_points}
        printer = replace(self.printer, names=names)
        step = mul(opt.rate, slope)
        if self.solves:
            found = argmin(opt, memory, (now, name, self._point(memory)), self.loss, self.printer)
            return [found, *self._written_out(memory, now, kept, names), *self._carried_along()]
        if opt.decay is None:
            return [Line(now, printer.expr(sub(kept, step))), *self._written_out(memory, now, kept, names)]
        speed = "U" if len(self.p.memories) == 1 else style.subscript("U", memory.name)
        speed = style.name("U", 2) if speed == "U" else speed
        before, after = (Ref(f"speed {when}", "let", memory.shape) for when in ("t-1", "t"))
        names |= {before.name: style.at_time(speed, "t-1"), after.name: style.at_time(speed, "t")}
        momentum, moved = sub(mul(opt.decay, before), step), add(kept, after)
        if opt.kind == "muon":
            momentum, moved = add(mul(opt.decay, before), slope), sub(kept, mul(opt.rate, after))
            names[after.name] = newton_schulz(opt, style.at_time(speed, "t"), self.printer)
        return [
            Line(style.at_time(speed, "t"), printer.expr(momentum)),
            *self._written_out(memory, style.at_time(speed, "t"), mul(opt.decay, before), names),
            Line(now, printer.expr(moved)),
        ]

    def _written_out(self, memory: Memory, now: str, kept: Expr, shown: dict[str, str]) -> list[Line]:
        """kept - rate * gradient, with the gradient in it; `shown` is how the names in `kept` look."""
        opt, g = self.p.optimizer, self.rule.gradients[memory.name]
        rate = neg(ONE) if opt.kind == "muon" else opt.rate
        at_point = {m.name: Ref(f"{m.name} at the gradient point", "let", m.shape) for m in self.p.memories}

        def frozen(node: Expr) -> Expr | None:
            return at_point.get(node.name) if isinstance(node, Ref) and node.kind == "memory" else None

        slice_ = _sliced(g)
        there = rewrite(g, frozen)
        if slice_ is not None and self.p.window is not None:
            return []
        if slice_ is None:
            names = {**shown, **{at_point[m.name].name: self._point(m) for m in self.p.memories}}
            if self.p.window is not None:
                inner = of_window(self.p, self.rule, replace(self.printer, names=names))
                there, sums = as_sum(self.p.window, there, inner, self.printer)
                names |= sums
            whole = sub(kept, mul(rate, there))
            return [Line(now, replace(self.printer, names=names).expr(whole), self._definitions_at(g))]
        if opt.decay is not None:
            return []
        taken = sub(slice_.take(kept), mul(rate, slice_.take(there)))
        printer = self._naming(slice_)
        names = dict(printer.names)
        for m in self.p.memories:
            own = slice_.label(m.name, self.style)
            moved = opt.batch > 1 or opt.at == "retained"
            names[slice_.key(at_point[m.name].name)] = self.style.primed(own) if moved else own
        arrow = r"\leftarrow" if self.style.built_up else "←"
        left = self._variable(memory, slice_)
        return [Line(left, replace(self.printer, names=names).expr(taken), self._definitions_at(g), arrow)]

    def _carried_along(self) -> list[Line]:
        """The steps of the matrices that the solution needs beside the memories."""
        lines = []
        for extra in self.rule.auxiliary:
            state = Ref(extra.name, "memory", extra.shape)
            name = self.printer.name(extra.name, extra.shape)
            left = self.style.at_time(name, "t")
            printer = replace(self.printer, names={extra.name: self.style.at_time(name, "t-1")})
            lines.append(Line(left, printer.expr(sub(state, self.rule.gradients[extra.name]))))
        return lines

    def _definitions_at(self, g: Expr) -> str:
        """Where the definitions in the gradient are taken, unless that is the state before the token."""
        if self.p.optimizer.batch == 1 and self.p.optimizer.at == "previous":
            return ""
        own = {name for name, _ in self.rule.definitions}
        used = dict.fromkeys(n.name for n in walk(g) if isinstance(n, Ref) and n.kind == "let" and n.name in own)
        points = ", ".join(Text().primed(m.name) for m in self.p.memories)
        return f"{', '.join(used)} at {points}" if used else ""

    def _point(self, memory: Memory) -> str:
        """The state at which the gradient is taken."""
        name = self.printer.name(memory.name, memory.shape)
        frozen = self.p.optimizer.batch > 1 or self.p.optimizer.at == "retained"
        return self.style.primed(name) if frozen else self.style.at_time(name, "t-1")

    def _at(self, when: str) -> Printer:
        names = {m.name: self.style.at_time(self.printer.name(m.name, m.shape), when) for m in self.p.memories}
        return replace(self.printer, names=names)

    def _naming(self, slice_: _Slice | None) -> Printer:
        if slice_ is None:
            return self.printer
        names = {slice_.key(m.name): slice_.label(m.name, self.style) for m in self.p.memories}
        for key, e in slice_.parts.items():
            names[key] = self.style.subscript(self.printer.expr(e, Level.ATOM), "i")
        return replace(self.printer, names=names)

    def _variable(self, memory: Memory, slice_: _Slice | None) -> str:
        return slice_.label(memory.name, self.style) if slice_ else self.printer.name(memory.name, memory.shape)

    def _slope(self, variable: str, short: bool = False) -> str:
        if self.style.built_up:
            return rf"\nabla_{{{variable}}} {self.loss}"
        return f"∇{self.loss}" if short and len(self.p.memories) == 1 else f"∂{self.loss}/∂{variable}"


# ---- one column or row of a matrix --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slice:
    """Column i, or row i, of matrices of a memory's shape; `parts` collects what the components belong to."""

    rows: bool
    parts: dict[str, Expr] = field(default_factory=dict)

    def key(self, name: str) -> str:
        return f"{name}, slice i"

    def label(self, name: str, style: Style) -> str:
        if self.rows:
            return style.subscript(style.name(name, 2), "i,:")
        return style.subscript(style.name(name.lower(), 1), "i")

    def take(self, e: Expr) -> Expr:
        """The slice of a matrix expression, a vector expression."""
        return self._column(transpose(e) if self.rows else e)

    def _column(self, e: Expr) -> Expr:
        coefficient, e = split(e)
        return scale(coefficient, self._bare(e))

    def _bare(self, e: Expr) -> Expr:
        match e:
            case Outer(a=a, b=b):
                return mul(self._component(b), a)
            case Binary(op="add" | "sub" as op, a=a, b=b) if len(a.shape) == len(b.shape) == 2:
                return add(self._column(a), self._column(b) if op == "add" else neg(self._column(b)))
            case Binary(op=op, a=a, b=b) if len(e.shape) == 2:
                a, b = (self._operand(x, e.shape) for x in (a, b))
                return Binary(op, a, b, e.shape[:1])
            case ColumnsJacT(fn=fn, m=m, cot=cot):
                at, pulled = self._column(m), self._column(cot)
                if isinstance(pulled, Binary) and pulled.op == "mul" and pulled.a.shape == ():
                    return mul(pulled.a, JacT(fn, at, pulled.b, at.shape))
                return JacT(fn, at, pulled, at.shape)
            case Columns(fn=fn, m=m):
                at = self._column(m)
                return Apply(fn, at, at.shape)
            case Transpose(m=Ref() as m) if self.rows:
                return Ref(self.key(m.name), "let", e.shape[:1])
            case Ref(name=name):
                return Ref(self.key(name), "let", e.shape[:1])
            case _:
                return self._component(e)

    def _component(self, e: Expr) -> Expr:
        """Component i of a vector, or column i of a matrix, as something to be printed with an index."""
        key = f"part {len(self.parts)}"
        self.parts[key] = e
        return Ref(key, "let", e.shape[:-1])

    def _operand(self, x: Expr, shape: Shape) -> Expr:
        if len(x.shape) == 2:
            return self._column(x)
        return self._component(x) if x.shape == shape[1:] else x


def _sliced(g: Expr) -> _Slice | None:
    """How to cut the gradient so that its Jacobians act on vectors; None where it has none, or both kinds."""
    kinds = {isinstance(n, RowsJacT) for n in walk(g) if isinstance(n, ColumnsJacT | RowsJacT)}
    return _Slice(kinds.pop()) if len(kinds) == 1 else None


def _remark(slice_: _Slice | None) -> str:
    if slice_ is None:
        return ""
    return "for every row i" if slice_.rows else "for every column i"


# ---- pages --------------------------------------------------------------------------------------------------


def _equation(line: Line) -> str:
    note = f"   ({line.note})" if line.note else ""
    return f"{line.left} {line.relation} {line.right}{note}".strip()


def _as_text(title: str, lines: list[Line]) -> str:
    width = max(len(line.left) for line in lines)
    rows = [_equation(replace(line, left=line.left.ljust(width))) for line in lines]
    return "\n".join(["", title, *(f"  {row}" for row in rows)])


def _as_latex(rule: UpdateRule, sections: list[_Section], recurrence: str) -> str:
    rows: list[str] = []
    for title, lines in sections:
        rows.append(rf"\intertext{{{_escaped(title)}}}")
        for k, line in enumerate(lines):
            short = rf" && \text{{{_escaped(line.note)}}}" if 0 < len(line.note) < 40 else ""
            end = "" if (title, k) == (sections[-1][0], len(lines) - 1) else r" \\"
            rows.append(rf"{line.left} &{line.relation} {line.right}{short}{end}")
            if line.note and not short:
                rows.append(rf"\intertext{{({_escaped(line.note)})}}")
    comment = [f"% {rule.spec.name}: {recurrence}"] if recurrence else [f"% {rule.spec.name}"]
    return "\n".join([*comment, r"\begin{align*}", *rows, r"\end{align*}"])


def _escaped(text: str) -> str:
    for special in ("\\", "_", "&", "%", "#", "$"):
        text = text.replace(special, rf"\{special}" if special != "\\" else r"\textbackslash ")
    return text.replace("^", r"\^{}").replace("|", r"$\vert$").replace("′", "$'$")
