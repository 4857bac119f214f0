"""Optimizers beyond gradient descent, as a paper would print them: what is minimised, and Newton-Schulz.

Input: a pass, how its parts are named, and a printer. Output: lines for explain.py. Derives nothing.
"""

from __future__ import annotations

from ttmdsl.explain_fn import Line
from ttmdsl.lower_optimizer import NEWTON_SCHULZ, TINY
from ttmdsl.pretty import Level, Printer
from ttmdsl.spec import Memory, Optimizer


def argmin(opt: Optimizer, memory: Memory, names: tuple[str, str, str], loss: str, printer: Printer) -> Line:
    """What an implicit or a least-squares step minimises; `names`: the state after, any, the one to stay close to."""
    style = printer.style
    after, here, before = names
    half = printer.number(0.5)
    if opt.ridge is not None:
        past = style.sum_over(r"i \leq t" if style.built_up else "{i≤t}", style.subscript(loss, "i"))
        ridge = f"{printer.expr(opt.ridge, Level.PRODUCT)} {style.norm(here, '2', '2')}"
        return Line(after, f"{_argmin(here, printer)} {past} + {half} {ridge}")
    near = f"{half} {style.norm(f'{here} - {before}', '2', '2')}"
    if not opt.rate.shape:
        return Line(after, f"{_argmin(here, printer)} {near} + {printer.expr(opt.rate, Level.PRODUCT)} {loss}")
    along = {memory.shape: "entry", memory.shape[:1]: "row"}.get(opt.rate.shape, "column")
    note = f"the loss of every {along} weighed by its entry of the rate"
    return Line(after, f"{_argmin(here, printer)} {near} + {loss}", note)


def _argmin(variable: str, printer: Printer) -> str:
    name = printer.style.function("argmin")
    return printer.style.subscript(name, variable)


def newton_schulz(opt: Optimizer, matrix: str, printer: Printer) -> str:
    """The name of Newton-Schulz applied to a matrix."""
    style = printer.style
    return style.call(style.subscript(style.function("NS"), str(opt.newton_schulz)), matrix)


def newton_schulz_lines(opt: Optimizer, printer: Printer) -> list[Line]:
    """What Newton-Schulz is."""
    style = printer.style
    first, third, fifth = (f"{abs(c):.4f}" for c in NEWTON_SCHULZ)
    x, gram = style.name("X", 2), f"{style.name('X', 2)} {style.transpose(style.name('X', 2))}"
    power = style.power(style.parens(gram), "2")
    arrow = r"\leftarrow" if style.built_up else "←"
    step = f"{first} {x} - {third} {gram} {x} + {fifth} {power} {x}"
    times = f"NS: {opt.newton_schulz} times, from U / (|U| + {TINY:g})"
    return [Line(x, step, times, arrow)]
