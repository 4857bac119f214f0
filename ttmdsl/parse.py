"""Text to syntax tree.

Input: the text of one `.ttm` file, which may come from anyone. Output: `syntax.Layer`, with a span on every node, or
`ParseError`. Bounds the size, depth and characters of the text, so that later passes may recurse; resolves no names.
"""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
from functools import cache
from typing import Any

from lark import Lark, Token, Transformer_NonRecursive, UnexpectedCharacters, UnexpectedInput, UnexpectedToken, v_args
from lark.tree import Meta

from ttmdsl import syntax
from ttmdsl.errors import Diagnostic, ParseError, Span
from ttmdsl.resources import folder

MAX_TEXT = 65_536
MAX_NAME = 64
MAX_DEPTH = 64
MAX_NUMBER = 1e38  # float32 ends at 3.4e38

CHOICES = ("memory", "bias", "retention", "optimizer", "project", "read")
CLAUSES = ("dim", "input", "gate", "param", "const", "fn", "let", "feature", *CHOICES, "pass")

_OPERATORS = {"PLUS", "MINUS", "STAR", "SLASH", "AT", "CIRCUMFLEX"}
_WORDS = {
    "NAME": "a name",
    "NUMBER": "a number",
    "SUBSCRIPT": "a norm's `_p`",
    "$END": "the end of the file",
    "_LAYER": "`layer`",
    "_WHEN": "`when`",
    "_WINDOW": "`window`",
    "_OF": "`of`",
    "COMMA": "`,`",
    "COLON": "`:`",
    "EQUAL": "`=`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "LBRACE": "`{`",
    "RBRACE": "`}`",
    "VBAR": "`|`",
    "LESSTHAN": "`<`",
    "MORETHAN": "`>`",
}
_TYPESET = {"·": "*", "×": "*", "−": "-", "‖": "|", "∥": "|", "⟨": "<", "⟩": ">", "ᵀ": "^T", "²": "^2", "½": "1/2"}


def parse(text: str, filename: str = "<spec>") -> syntax.Layer:
    """The syntax tree of a spec. Evaluates nothing, and raises nothing but `ParseError`."""
    _check_text(text, filename)
    try:
        tree = _parser().parse(text)
    except UnexpectedInput as error:
        raise ParseError((_explain(error, text),), text, filename) from None
    layer: syntax.Layer = _Build().transform(tree)
    if excess := _excess(layer):
        raise ParseError((excess,), text, filename)
    return layer


# ---- limits -------------------------------------------------------------------------------------------------


def _check_text(text: str, filename: str) -> None:
    if len(text) > MAX_TEXT:
        size = Diagnostic(Span(0, 0), f"the spec has {len(text)} characters, more than {MAX_TEXT}")
        raise ParseError((size,), "", filename)
    for at, character in enumerate(text):
        if _is_control(character, text[at + 1 : at + 2]):
            before = (text[:at] + ".").splitlines()
            named = unicodedata.name(character, "a control character").lower()
            found = Diagnostic(
                Span(len(before), len(before[-1])),
                f"U+{ord(character):04X} ({named}) may not stand in a spec",
                "remove it: of the invisible characters only blanks, tabs and newlines are allowed",
            )
            # The message quotes the line: an escape sequence or a bidirectional override must not reach a terminal.
            shown = "".join("\ufffd" if _is_control(c, "\n" if c == "\r" else "") else c for c in text)
            raise ParseError((found,), shown, filename)


def _is_control(character: str, following: str) -> bool:
    if character == "\r":
        return following != "\n"
    return character not in "\t\n" and unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def _excess(layer: syntax.Layer) -> Diagnostic | None:
    """The first node that passes a limit, found without recursion, because depth is one of the limits."""
    stack: list[tuple[syntax.Node, int]] = [(layer, 0)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_DEPTH:
            return Diagnostic(node.span, f"nested more than {MAX_DEPTH} levels deep", "name a part of it with `let`")
        if isinstance(node, syntax.Name) and len(node.text) > MAX_NAME:
            return Diagnostic(node.span, f"a name of {len(node.text)} characters, more than {MAX_NAME}")
        if isinstance(node, syntax.Number) and not (node.value == 0 or 1 / MAX_NUMBER <= abs(node.value) <= MAX_NUMBER):
            return Diagnostic(node.span, f"outside the range of numbers, {1 / MAX_NUMBER:.0e} to {MAX_NUMBER:.0e}")
        stack.extend((child, depth + 1) for child in reversed(tuple(syntax.children(node))))
    return None


# ---- errors -------------------------------------------------------------------------------------------------


def _explain(error: UnexpectedInput, text: str) -> Diagnostic:
    match error:
        case UnexpectedToken(token=token, accepts=accepts, token_history=history):
            return _explain_token(token, accepts or set(), history, text)
        case UnexpectedCharacters():
            span, character = Span(error.line, error.column), text[error.pos_in_stream or 0]
            return Diagnostic(span, f"`{character}` has no meaning here", _spelling(character))
        case _:
            raise AssertionError(error)


def _explain_token(token: Token, accepts: set[str], history: list[Token] | None, text: str) -> Diagnostic:
    if token.type == "$END":
        lines = text.splitlines() or [""]
        span, found = Span(len(lines), len(lines[-1]) + 1), "the text ends"
    else:
        span, found = Span(token.line or 0, token.column or 0, max(len(token), 1)), f"found `{token[:MAX_NAME]}`"
    return Diagnostic(span, f"{found}, expected {_expected(accepts)}", _mend(token, accepts, history))


def _expected(accepts: set[str]) -> str:
    clauses = {f"_{c.upper()}" for c in CLAUSES}
    words = [_WORDS.get(t, t) for t in sorted(accepts - _OPERATORS - clauses)]
    if {"VBAR", "LESSTHAN", "LPAR", "NAME", "NUMBER"} <= accepts:
        words = ["an expression"]
    elif accepts & _OPERATORS:
        words.insert(0, "an operator" if len(accepts & _OPERATORS) > 1 else "`-`")
    if accepts & clauses:
        words.append("a clause")
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _mend(token: Token, accepts: set[str], history: list[Token] | None) -> str:
    here = [c for c in CLAUSES if f"_{c.upper()}" in accepts]
    word = str(token)
    if here and re.fullmatch(r"[A-Za-z_]+", word):
        if word in CLAUSES:
            return f"`{word}` belongs to the layer, outside of `pass`"
        if close := difflib.get_close_matches(word.lower(), here, 1):
            return f"did you mean `{close[0]}`?"
    if history and str(history[-1]) in CLAUSES and history[-1].type == "NAME":
        return f"`{history[-1]}` was read as a name here: the clause before it has no content"
    if token.type == "SUBSCRIPT" and "NAME" in accepts:
        return "a name begins with a letter"
    if token.type in ("NAME", "NUMBER", "VBAR", "LESSTHAN") and accepts & _OPERATORS - {"MINUS"}:
        return "a product needs its `*`, a matrix times a vector its `@`"
    if token.type == "$END" and "RBRACE" in accepts:
        return "a closing brace is missing"
    return f"the clauses are {', '.join(here)}" if here and token.type == "NAME" else ""


def _spelling(character: str) -> str:
    if character in _TYPESET:
        return f"write `{_TYPESET[character]}`"
    named = unicodedata.name(character, "")
    if named.startswith("GREEK") and "LETTER" in named and len(named.split()) == 4:
        return f"names are ASCII: write `{named.split()[-1].lower()}`"
    if not character.isascii():
        return f"this is {named or 'no known character'}; outside of comments a spec is ASCII"
    return "text is no part of the language; a comment begins with #" if character in "'\"`" else ""


# ---- building the tree --------------------------------------------------------------------------------------


@cache
def _parser() -> Lark:
    grammar = (folder("grammar") / "ttm.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", lexer="contextual", propagate_positions=True, maybe_placeholders=True)


def _at(meta: Meta | Token) -> Span:
    start, end = meta.start_pos or 0, meta.end_pos or 0
    return Span(meta.line or 0, meta.column or 0, max(end - start, 1))


def _name(token: Token) -> syntax.Name:
    return syntax.Name(str(token), _at(token))


def _number(text: str, span: Span) -> syntax.Number:
    value = float(text)
    # A literal that float rounds to zero is refused with the ones too large, not silently taken for 0.
    vanished = value == 0 and re.search(r"[1-9]", re.split("[eE]", text)[0])
    return syntax.Number(math.inf if vanished else value, span)


def _operation(op: syntax.Operator) -> Any:
    def build(self: _Build, meta: Meta, a: syntax.Expr, b: syntax.Expr) -> syntax.Operation:
        return syntax.Operation(op, a, b, _at(meta))

    return build


@v_args(meta=True, inline=True)
class _Build(Transformer_NonRecursive[Token, syntax.Layer]):
    """One method for each rule of the grammar."""

    def start(self, meta: Meta, name: Token, *clauses: syntax.Clause) -> syntax.Layer:
        return syntax.Layer(_name(name), clauses, _at(meta))

    def block(self, meta: Meta, name: Token, *clauses: syntax.Choice) -> syntax.Block:
        return syntax.Block(_name(name), clauses, _at(meta))

    def dims(self, meta: Meta, *names: Token) -> syntax.Dims:
        return syntax.Dims(tuple(map(_name, names)), _at(meta))

    def inputs(self, meta: Meta, *items: syntax.TensorItem) -> syntax.Tensors:
        return syntax.Tensors("input", items, _at(meta))

    def gates(self, meta: Meta, *items: syntax.TensorItem) -> syntax.Tensors:
        return syntax.Tensors("gate", items, _at(meta))

    def params(self, meta: Meta, *items: syntax.TensorItem) -> syntax.Tensors:
        return syntax.Tensors("param", items, _at(meta))

    def constants(self, meta: Meta, *items: syntax.ConstantItem) -> syntax.Constants:
        return syntax.Constants(items, _at(meta))

    def function(
        self, meta: Meta, name: Token, args: tuple[syntax.Name, ...], index: syntax.Name | None, body: syntax.Expr
    ) -> syntax.Function:
        return syntax.Function(_name(name), args, index, body, _at(meta))

    def let(self, meta: Meta, name: Token, value: syntax.Expr) -> syntax.Let:
        return syntax.Let(_name(name), value, _at(meta))

    def feature(self, meta: Meta, name: Token, kernel: syntax.Expr) -> syntax.FeatureClause:
        return syntax.FeatureClause(_name(name), kernel, _at(meta))

    def memories(self, meta: Meta, *items: syntax.MemoryItem) -> syntax.Memories:
        return syntax.Memories(items, _at(meta))

    def bias(self, meta: Meta, window: syntax.Window | None, value: syntax.Expr) -> syntax.Bias:
        return syntax.Bias(window, value, _at(meta))

    def window(self, meta: Meta, size: syntax.Expr, *settings: syntax.Setting) -> syntax.Window:
        return syntax.Window(size, settings, _at(meta))

    def retention(self, meta: Meta, *values: syntax.Expr) -> syntax.Retention:
        return syntax.Retention(values, _at(meta))

    def optimizer(self, meta: Meta, kind: Token, *settings: syntax.Setting | None) -> syntax.OptimizerClause:
        return syntax.OptimizerClause(_name(kind), tuple(s for s in settings if s is not None), _at(meta))

    def project(self, meta: Meta, values: tuple[syntax.Expr, ...], when: Token | None) -> syntax.Project:
        return syntax.Project(values, _name(when) if when is not None else None, _at(meta))

    def read(self, meta: Meta, value: syntax.Expr) -> syntax.Read:
        return syntax.Read(value, _at(meta))

    def tensor(
        self, meta: Meta, name: Token, shape: tuple[syntax.Name, ...] | None, within: Token | None
    ) -> syntax.TensorItem:
        return syntax.TensorItem(_name(name), shape or (), _name(within) if within is not None else None, _at(meta))

    def constant(self, meta: Meta, name: Token, value: syntax.Number) -> syntax.ConstantItem:
        return syntax.ConstantItem(_name(name), value, _at(meta))

    def memory(
        self, meta: Meta, name: Token, shape: tuple[syntax.Extent, ...], initial: syntax.Name | syntax.Number | None
    ) -> syntax.MemoryItem:
        return syntax.MemoryItem(_name(name), shape, initial, _at(meta))

    def extents(self, meta: Meta, *items: syntax.Extent) -> tuple[syntax.Extent, ...]:
        return items

    def extent(self, meta: Meta, base: Token) -> syntax.Extent:
        return syntax.Extent(_name(base), None, None, _at(meta))

    def extent_power(self, meta: Meta, base: Token, order: syntax.Name | syntax.Number) -> syntax.Extent:
        return syntax.Extent(_name(base), syntax.Name("power", _at(meta)), order, _at(meta))

    def extent_of(self, meta: Meta, kind: Token, base: Token, order: syntax.Name | syntax.Number) -> syntax.Extent:
        return syntax.Extent(_name(base), _name(kind), order, _at(meta))

    def setting(self, meta: Meta, name: Token, value: syntax.Expr) -> syntax.Setting:
        return syntax.Setting(_name(name), value, _at(meta))

    def shape(self, meta: Meta, *names: Token) -> tuple[syntax.Name, ...]:
        return tuple(map(_name, names))

    arguments = shape

    def subscript(self, meta: Meta, name: Token) -> syntax.Name:
        return _name(name)

    def exprs(self, meta: Meta, *values: syntax.Expr) -> tuple[syntax.Expr, ...]:
        return values

    add, sub, mul, div, matvec = (_operation(op) for op in ("+", "-", "*", "/", "@"))

    def power(self, meta: Meta, x: syntax.Expr, exponent: syntax.Expr) -> syntax.Expr:
        if isinstance(exponent, syntax.Name) and exponent.text == "T":
            return syntax.Transposed(x, _at(meta))
        return syntax.Operation("^", x, exponent, _at(meta))

    def negate(self, meta: Meta, x: syntax.Expr) -> syntax.Negate:
        return syntax.Negate(x, _at(meta))

    def negative(self, meta: Meta, token: Token) -> syntax.Number:
        number = _number(token, _at(meta))
        return syntax.Number(-number.value, number.span)

    def literal(self, meta: Meta, token: Token) -> syntax.Number:
        return _number(token, _at(token))

    def name(self, meta: Meta, token: Token) -> syntax.Name:
        return _name(token)

    def call(self, meta: Meta, fn: Token, *args: syntax.Expr) -> syntax.Call:
        return syntax.Call(_name(fn), args, _at(meta))

    def element(self, meta: Meta, x: syntax.Expr, index: syntax.Expr) -> syntax.Element:
        return syntax.Element(x, index, _at(meta))

    def bars(self, meta: Meta, x: syntax.Expr, subscript: Token | None) -> syntax.Bars:
        p: syntax.Name | syntax.Number | None = None
        if subscript is not None:
            span = Span(subscript.line or 0, (subscript.column or 0) + 1, len(subscript) - 1)
            p = _number(subscript[1:], span) if subscript[1].isdigit() else syntax.Name(subscript[1:], span)
        return syntax.Bars(x, p, _at(meta))

    def inner(self, meta: Meta, a: syntax.Expr, b: syntax.Expr) -> syntax.Pairing:
        return syntax.Pairing(a, b, _at(meta))

    def slots(self, meta: Meta) -> syntax.Pairing:
        slot = syntax.Name(".", _at(meta))
        return syntax.Pairing(slot, slot, _at(meta))

    def group(self, meta: Meta, *items: syntax.Expr) -> syntax.Group:
        return syntax.Group(items, _at(meta))
