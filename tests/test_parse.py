"""parse: the tree of what is written, precedence, spans, keywords as names, limits."""

from __future__ import annotations

import pytest

from ttmdsl import syntax
from ttmdsl.errors import ParseError, Span
from ttmdsl.parse import MAX_DEPTH, MAX_NAME, MAX_TEXT, parse
from ttmdsl.resources import folder


def formula(text: str) -> syntax.Expr:
    (clause,) = parse(f"layer A {{ bias {text} }}").clauses
    assert isinstance(clause, syntax.Bias)
    return clause.value


def shown(e: syntax.Expr) -> str:
    """A formula with every bracket written out."""
    match e:
        case syntax.Number(value=value):
            return f"{value:g}"
        case syntax.Name(text=text):
            return text
        case syntax.Negate(x=x):
            return f"(-{shown(x)})"
        case syntax.Operation(op=op, a=a, b=b):
            return f"({shown(a)} {op} {shown(b)})"
        case syntax.Transposed(x=x):
            return f"{shown(x)}'"
        case syntax.Bars(x=x, p=p):
            return f"|{shown(x)}|" + (f"_{shown(p)}" if p else "")
        case syntax.Pairing(a=a, b=b):
            return f"<{shown(a)}, {shown(b)}>"
        case syntax.Call(fn=fn, args=args):
            return f"{fn.text}({', '.join(map(shown, args))})"
        case syntax.Element(x=x, index=index):
            return f"{shown(x)}[{index.text}]"
        case syntax.Group(items=items):
            return f"({', '.join(map(shown, items))})"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a + b * c - d", "((a + (b * c)) - d)"),
        ("alpha * S @ k", "(alpha * (S @ k))"),
        ("S @ k * c", "((S @ k) * c)"),
        ("W1 @ W2 @ x", "(W1 @ (W2 @ x))"),
        ("-S @ k", "((-S) @ k)"),
        ("-x^2", "(-(x ^ 2))"),
        ("--x", "(-(-x))"),
        ("a * -b", "(a * (-b))"),
        ("x^-2", "(x ^ (-2))"),
        ("a^b^c", "(a ^ (b ^ c))"),
        ("a / b / c", "((a / b) / c)"),
        ("S^T @ v", "(S' @ v)"),
        ("(S^T)^T @ v", "(S'' @ v)"),
        ("1/2 * |columns(phi, S)^T @ v - k|^2", "((1 / 2) * (|((columns(phi, S)' @ v) - k)| ^ 2))"),
        ("|x|_p^p / p", "((|x|_p ^ p) / p)"),
        ("|x|_1.5", "|x|_1.5"),
        ("||x| - |y||", "|(|x| - |y|)|"),
        ("||x||^2", "(||x|| ^ 2)"),
        ("|<a, |b|>| * <|c|, <d, e>>", "(|<a, |b|>| * <|c|, <d, e>>)"),
        ("alpha * (W1, W2)", "(alpha * (W1, W2))"),
        ("centered(x)[i] + (a*x)[j]", "(centered(x)[i] + (a * x)[j])"),
        ("1e-5 + .5 + 2. + 3E+2", "(((1e-05 + 0.5) + 2) + 300)"),
    ],
)
def test_precedence(text: str, expected: str) -> None:
    assert shown(formula(text)) == expected


def test_spans_point_at_the_text() -> None:
    text = "layer A {\n  bias 1/2 * |S @ k - v|^2  # loss\n}"
    for node in syntax.walk(parse(text)):
        line = text.splitlines()[node.span.line - 1]
        if isinstance(node, syntax.Name):
            assert line[node.span.column - 1 :][: node.span.length] == node.text
        if isinstance(node, syntax.Bars):
            assert line[node.span.column - 1 :][: node.span.length] == "|S @ k - v|"


def test_keywords_are_names_where_they_can_be() -> None:
    text = "layer A { gate read, memory: decay const project = 1 project read * S when project read read @ q }"
    tensors, constants, project, read = parse(text).clauses
    assert isinstance(tensors, syntax.Tensors)
    assert [t.name.text for t in tensors.items] == ["read", "memory"]
    assert isinstance(constants, syntax.Constants)
    assert isinstance(project, syntax.Project)
    assert project.when is not None
    assert project.when.text == "project"
    assert isinstance(read, syntax.Read)


def test_layout_means_nothing() -> None:
    text = (folder("layers") / "trellis.ttm").read_text(encoding="utf-8")
    bare = " ".join(line.partition("#")[0] for line in text.splitlines())
    for other in (bare, text.replace("\n", "\r\n"), text.replace("  ", "\t")):
        assert [type(n) for n in syntax.walk(parse(other))] == [type(n) for n in syntax.walk(parse(text))]


@pytest.mark.parametrize(
    ("fits", "passes"),
    [
        (f"layer A {{ gate {'x' * MAX_NAME} }}", f"layer A {{ gate {'x' * (MAX_NAME + 1)} }}"),
        ("layer A { }".ljust(MAX_TEXT), "layer A { }".ljust(MAX_TEXT + 1)),
        (f"layer A {{ bias {'-' * (MAX_DEPTH - 2)}1 }}", f"layer A {{ bias {'-' * (MAX_DEPTH - 1)}1 }}"),
        ("layer A { const c = 1e38 }", "layer A { const c = 1.1e38 }"),
    ],
)
def test_limits(fits: str, passes: str) -> None:
    parse(fits)
    with pytest.raises(ParseError):
        parse(passes)


def test_the_error_carries_its_place() -> None:
    with pytest.raises(ParseError) as caught:
        parse("layer A {\n  bais 1\n}", "a.ttm")
    (found,) = caught.value.diagnostics
    assert found.span == Span(2, 3, 4)
    assert found.hint == "did you mean `bias`?"
    assert str(caught.value).startswith("a.ttm:2:3: ")
