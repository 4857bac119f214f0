"""How each piece of mathematics looks: in Unicode text, and in LaTeX.

Input: rendered parts. Output: the rendered whole. Knows no expressions (pretty.py) and no sentences (explain.py).
"""

from __future__ import annotations

import re
from typing import Protocol

from ttmdsl.functions import is_scalar_fn, scalar_fn

_GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "eps": "ε", "zeta": "ζ", "eta": "η",
    "theta": "θ", "iota": "ι", "kappa": "κ", "lambda": "λ", "lam": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π",
    "rho": "ρ", "sigma": "σ", "tau": "τ", "upsilon": "υ", "phi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω",
}  # fmt: skip
_LATEX_NAME = {"eps": "epsilon", "lam": "lambda"}
_SUBSCRIPTS = str.maketrans("0123456789+-tij", "₀₁₂₃₄₅₆₇₈₉₊₋ₜᵢⱼ")
_SUPERSCRIPTS = str.maketrans("0123456789+-n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ")


class Style(Protocol):
    """What a language of mathematics has to offer."""

    built_up: bool  # whether fractions are set above one another
    elementwise: str
    partial: str

    def name(self, name: str, dims: int) -> str: ...
    def at_time(self, name: str, when: str) -> str: ...
    def primed(self, name: str) -> str: ...
    def function(self, name: str) -> str: ...
    def call(self, fn: str, arg: str) -> str: ...
    def parens(self, body: str) -> str: ...
    def subscript(self, base: str, index: str) -> str: ...
    def power(self, base: str, exponent: str) -> str: ...
    def tensor_power(self, base: str, exponent: str) -> str: ...
    def fraction(self, a: str, b: str) -> str: ...
    def root(self, body: str) -> str: ...
    def transpose(self, m: str) -> str: ...
    def inner(self, a: str, b: str) -> str: ...
    def norm(self, x: str, p: str, power: str) -> str: ...
    def ones(self, value: str, shape: tuple[str, ...]) -> str: ...
    def sum_over(self, index: str, body: str) -> str: ...
    def words(self, text: str) -> str: ...


class Text:
    """One line of Unicode."""

    built_up = False
    elementwise = "⊙"
    partial = "∂"

    def name(self, name: str, dims: int) -> str:
        stem = name.rstrip("0123456789")
        return _GREEK.get(stem, stem) + name[len(stem) :]

    def at_time(self, name: str, when: str) -> str:
        return name + when.translate(_SUBSCRIPTS)

    def primed(self, name: str) -> str:
        return f"{name}′"

    def function(self, name: str) -> str:
        return name

    def call(self, fn: str, arg: str) -> str:
        return f"{fn}({arg})"

    def parens(self, body: str) -> str:
        return f"({body})"

    def subscript(self, base: str, index: str) -> str:
        return f"{base}_{index}"

    def power(self, base: str, exponent: str) -> str:
        if re.fullmatch(r"[0-9n+-]+", exponent):
            return base + exponent.translate(_SUPERSCRIPTS)
        return f"{base}^{exponent}" if re.fullmatch(r"[\w.]+", exponent) else f"{base}^({exponent})"

    def tensor_power(self, base: str, exponent: str) -> str:
        return f"{base}^⊗{exponent}"

    def fraction(self, a: str, b: str) -> str:
        return f"{a}/{b}"

    def root(self, body: str) -> str:
        return body[:-1] if re.fullmatch(r"\|[^|]*\|²", body) else f"√({body})"

    def transpose(self, m: str) -> str:
        return f"{m}ᵀ"

    def inner(self, a: str, b: str) -> str:
        return f"⟨{a}, {b}⟩"

    def norm(self, x: str, p: str, power: str) -> str:
        base = f"|{x}|" if p == "2" else f"|{x}|_{p}"
        return base if power == "1" else self.power(base, power)

    def ones(self, value: str, shape: tuple[str, ...]) -> str:
        return f"{value}_{shape[0]}" if shape else value

    def sum_over(self, index: str, body: str) -> str:
        return f"Σ_{index} {body}"

    def words(self, text: str) -> str:
        return text


def _held(base: str) -> str:
    """In braces, unless it is one letter in some font."""
    return base if re.fullmatch(r"\w|\\[a-z]+|\\(math|bold)[a-z]+\{\\?\w+\}", base) else f"{{{base}}}"


class Latex:
    """Math mode, in the subset that any LaTeX with amsmath sets."""

    built_up = True
    elementwise = r"\odot"
    partial = r"\partial"

    def name(self, name: str, dims: int) -> str:
        if name[0].isdigit():
            number = re.sub(r"e(-?)0*(\d+)$", r" \\cdot 10^{\1\2}", name).removeprefix(r"1 \cdot ")
            return rf"\mathbf{{{number}}}" if dims else number
        head, _, tail = name.partition("_")
        stem = head.rstrip("0123456789")
        index = head[len(stem) :] + (("," if head[len(stem) :] and tail else "") + tail.replace("_", r"\_"))
        if stem in _GREEK:
            base = "\\" + _LATEX_NAME.get(stem, stem)
            base = rf"\boldsymbol{{{base}}}" if dims else base
        elif dims:
            base = rf"\mathbf{{{stem}}}"
        else:
            base = stem if len(stem) == 1 else rf"\mathrm{{{stem}}}"
        if not index:
            return base
        return rf"{base}_{{{index}}}" if not tail or len(tail) == 1 else rf"{base}_{{\mathrm{{{index}}}}}"

    def at_time(self, name: str, when: str) -> str:
        return self.subscript(name, when)

    def primed(self, name: str) -> str:
        return f"{_held(name)}'"

    def function(self, name: str) -> str:
        if is_scalar_fn(name):
            return scalar_fn(name).latex
        return rf"\{name}" if name in ("max", "min") else rf"\operatorname{{{name}}}"

    def call(self, fn: str, arg: str) -> str:
        return rf"{fn}\left({arg}\right)"

    def parens(self, body: str) -> str:
        return rf"\left({body}\right)"

    def subscript(self, base: str, index: str) -> str:
        if re.fullmatch(r".*_\{[^{}]*\}", base):
            return f"{base[:-1]},{index}}}"
        return f"{_held(base)}_{{{index}}}"

    def power(self, base: str, exponent: str) -> str:
        return f"{_held(base)}^{{{exponent}}}"

    def tensor_power(self, base: str, exponent: str) -> str:
        return rf"{_held(base)}^{{\otimes {exponent}}}"

    def fraction(self, a: str, b: str) -> str:
        return rf"\frac{{{a}}}{{{b}}}"

    def root(self, body: str) -> str:
        length = re.fullmatch(r"\{(\\lVert (?:(?!\\rVert).)* \\rVert)\}\^\{2\}", body)
        return length.group(1) if length else rf"\sqrt{{{body}}}"

    def transpose(self, m: str) -> str:
        return rf"{_held(m)}^{{\top}}"

    def inner(self, a: str, b: str) -> str:
        return rf"\left\langle {a}, {b} \right\rangle"

    def norm(self, x: str, p: str, power: str) -> str:
        base = rf"\lVert {x} \rVert" if p == "2" else rf"{{\lVert {x} \rVert}}_{{{p}}}"
        return base if power == "1" else f"{{{base}}}^{{{power}}}"

    def ones(self, value: str, shape: tuple[str, ...]) -> str:
        return rf"\mathbf{{{value}}}_{{{shape[0]}}}" if shape else value

    def sum_over(self, index: str, body: str) -> str:
        return rf"\sum_{{{index}}} {body}"

    def words(self, text: str) -> str:
        return rf"\text{{{text}}}"
