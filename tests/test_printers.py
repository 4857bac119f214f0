"""Printed code: names that are unique and no keywords, no dead assignments, few parentheses, lines that fit."""

from __future__ import annotations

import ast
import itertools
import keyword
import re
import tokenize
from io import StringIO

import pytest
import torch
from ir_eval import Interpreter, draw_leaf
from torch import Tensor

from ttmdsl import parity
from ttmdsl.builder import Builder
from ttmdsl.ir import Node
from ttmdsl.loader import compile as compile_spec
from ttmdsl.loader import read
from ttmdsl.options import Options
from ttmdsl.pipeline import run
from ttmdsl.print_torch import TorchPrinter
from ttmdsl.print_triton import TritonPrinter
from ttmdsl.printer import Names, strip
from ttmdsl.schedule import weights

LAYERS = [
    *("linear_attention", "mamba2", "gla", "delta_net", "gated_delta_net", "titans_linear"),
    *("lattice_dec", "lattice_enc", "lattice_sim", "trellis", "trellis:1"),
]
WIDTH = 120


def module(variant: str) -> str:
    name, _, batch = variant.partition(":")
    text, filename = read(name)
    consts = {"b": float(batch)} if batch else {}
    return str(run(text, filename, consts, Options.from_environment()).done["emit"])


@pytest.fixture(scope="module", params=LAYERS)
def source(request: pytest.FixtureRequest) -> str:
    return module(request.param)


def functions(source: str) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]


def backend(source: str, name: str) -> str:
    """The lines of one backend's section."""
    lines = source.splitlines()
    banners = [i for i, line in enumerate(lines) if line.startswith("# ---- ")]
    start = next(i for i in banners if f'backend="{name}"' in lines[i])
    return "\n".join(lines[start : next(i for i in banners if i > start)])


# what a kernel's frame works out before it is known what the body loads
PLACE = re.compile(r"alive|head|row|offset|u|[om]_\w+")


def test_no_assignment_is_dead(source: str) -> None:
    """Every local of the printed functions is read somewhere in its function."""
    for function in functions(source):
        names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
        read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
        dead = {n.id for n in names if isinstance(n.ctx, ast.Store)} - read - {"_"}
        if function.name.endswith("_kernel"):
            dead = {name for name in dead if not PLACE.fullmatch(name)}
        assert not dead, function.name


def test_a_value_has_one_name(source: str) -> None:
    """Outside of the scans, whose variables are handed on, no name is given twice."""
    for function in functions(source):
        if re.fullmatch(r"_(token|chunk|resumed)_(forward|backward)", function.name):
            given = [
                t.id for s in function.body if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)
            ]
            stacked = {name for name in given if name.endswith("_all") or "_all_" in name}
            rest = [name for name in given if name not in stacked]
            assert len(rest) == len(set(rest)), function.name


def test_the_torch_section_reads_well(source: str) -> None:
    section = backend(source, "torch")
    assert all(len(line) <= WIDTH for line in section.splitlines())
    assert "1.4426950408889634 *" not in section
    quoted = [t.string for t in tokenize.generate_tokens(StringIO(section).readline) if t.type == tokenize.STRING]
    assert not any(text.startswith("'") for text in quoted)


def test_parentheses_of_a_call_are_enough(source: str) -> None:
    section = backend(source, "torch").encode()
    starts = [0, *itertools.accumulate(len(line) for line in section.splitlines(keepends=True))]

    def segment(node: ast.expr) -> str:  # ast's own splits the section into lines each time
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return section[starts[node.lineno - 1] + node.col_offset : end].decode()

    for node in ast.walk(ast.parse(section)):
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            text = segment(node)
            inner = text[text.index("(", len(segment(node.func))) + 1 : -1]
            assert strip(inner) == inner or isinstance(node.args[0], ast.Tuple | ast.GeneratorExp), text


# ---- printers on their own ----------------------------------------------------------------------------------


def test_names() -> None:
    names = Names({"x", *keyword.kwlist})
    assert [names.get(wish) for wish in ("x", "h", "x", "h", "lambda", "x_2")] == [
        "x_2",
        "h",
        "x_3",
        "h_2",
        "lambda_2",
        "x_2_2",
    ]


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ("(a + b)", "a + b"),
        ("(a) + (b)", "(a) + (b)"),
        ("((a))", "(a)"),
        ("f(a)", "f(a)"),
        ("(a).sum(1)", "(a).sum(1)"),
    ],
)
def test_strip(text: str, stripped: str) -> None:
    assert strip(text) == stripped


def printed(b: Builder, *roots: Node) -> list[str]:
    printer = TorchPrinter(b, Names())
    for leaf in (n for root in roots for n in walk(root) if n.op == "leaf"):
        printer.text[leaf] = leaf.name
    return printer.emit(roots)


def walk(node: Node) -> list[Node]:
    return [node, *(n for a in node.args for n in walk(a))]


@pytest.fixture
def b() -> Builder:
    return Builder(("i",))


def leaf(b: Builder, name: str) -> Node:
    return b.leaf("token", name, ("t",))


def test_a_difference_needs_no_negative(b: Builder) -> None:
    x, y, z = leaf(b, "p"), leaf(b, "q"), leaf(b, "r")
    assert printed(b, b.sub(x, b.mul(y, z))) == ["x = torch.addcmul(p, q, r, value=-1)"]
    assert printed(b, b.add(b.neg(x), y)) == ["x = q - p"]
    assert printed(b, b.sub(x, b.add(y, z))) == ["x = p - (q + r)"]
    assert printed(b, b.sub(b.sub(x, y), z)) == ["x = p - q - r"]
    assert printed(b, b.mul(b.add(x, y), z)) == ["x = (p + q) * r"]
    assert printed(b, b.make("mul", (x, b.mul(y, z)), x.axes)) == ["x = p * (q * r)"]
    product = b.mul(y, z)
    assert printed(b, b.sub(x, product), b.neg(product)) == ["x = q * r", "x_2 = p - x", "x_3 = -x"]


def test_constants_have_names_and_signs(b: Builder) -> None:
    x = leaf(b, "p")
    assert printed(b, b.map("exp2", b.mul(b.const(1.4426950408889634), x))) == ["x = torch.exp2(LOG2E * p)"]
    assert printed(b, b.mul(b.const(-0.5), x)) == ["x = -0.5 * p"]
    assert printed(b, b.make("mul", (x, b.const(-0.5)), x.axes)) == ["x = p * (-0.5)"]


def test_a_root_may_be_what_is_loaded(b: Builder) -> None:
    """It is loaded once, and named for its store, whether or not anything else is made of it, or of anything."""
    x, y = b.leaf("token", "x", ("t", "i")), b.leaf("token", "y", ("t", "i"))
    cases: list[tuple[list[Node], dict[str, int]]] = [
        ([b.map("exp2", x), y], {"x": 1, "y": 1}),
        ([b.map("exp2", x), x], {"x": 1, "y": 0}),
        ([y], {"x": 0, "y": 1}),
    ]
    for roots, expected in cases:
        printer = TritonPrinter(b, Names(()), "chunk", weights(64))
        printer.loads = {x: "load(x_ptr)", y: "load(y_ptr)"}
        lines = printer.emit(roots, {n: lambda n=n, p=printer: [f"store({p.text[n]})"] for n in roots})  # type: ignore[misc]
        text = "\n".join(lines)
        assert {n: text.count(f"load({n}_ptr)") for n in expected} == expected
        assert sum(line.startswith("store(") for line in lines) == len(roots)


def test_a_power_binds_as_it_should(b: Builder) -> None:
    x = leaf(b, "p")
    power = b.pow(x, 2.5)
    assert printed(b, b.sum(b.expand(power, ("t", "i")), ("t",)))[-1].startswith("x = ")
    assert printed(b, b.mul(b.neg(power), x)) == ["x = -((p ** 2.5) * p)"]


def test_a_limit_may_stand_on_either_side(b: Builder) -> None:
    x = leaf(b, "p")
    assert printed(b, b.map("max", b.const(0.25), x)) == ["x = p.clamp(min=0.25)"]
    assert printed(b, b.map("min", x, b.const(-1.0))) == ["x = p.clamp(max=-1.0)"]


def test_printed_lines_compute_what_they_say(b: Builder) -> None:
    """A little of everything, executed, against the interpreter."""
    x, y = b.leaf("token", "p", ("t", "i")), b.leaf("token", "q", ("t", "i"))
    S = b.leaf("carry", "S", ("i", "i'"))
    hidden = b.contract(x, S, {"i"})
    softmax = b.map("exp2", b.sub(y, b.amax(y, {"i"})))
    value = b.sub(
        b.mul(b.const(-2), b.map("max", b.const(0.1), hidden)), b.rename(b.pow(b.map("abs", y), 1.5), "i", "i'")
    )
    roots = [
        value,
        b.cumsum(softmax, reverse=True),
        b.contract(b.rename(x, "t", "s"), y, {"i"}),
        b.sum(b.neg(value), {"t"}),
    ]
    generator = torch.Generator().manual_seed(0)
    leaves = {n: draw_leaf(n, {"t": 4, "i": 3}, generator) for n in (x, y, S)}
    scope: dict[str, object] = {"torch": torch, **{n.name: v for n, v in leaves.items()}}
    printer = TorchPrinter(b, Names({"p", "q", "S"}))
    printer.text |= {n: n.name for n in leaves}
    exec("\n".join(printer.emit(roots)), scope)
    interpreter = Interpreter(leaves, {"t": 4, "i": 3})
    for root in roots:
        found = eval(printer.text[root], scope)
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, interpreter(root))


HOSTILE = """
layer Names {
  dim    i, unit
  input  carry[i], x[i], d_y[unit]
  gate   LOG2E: decay, grads: unit
  memory d_carry[unit, i]
  bias   1/2 * |d_carry @ x - d_y|^2
  retention LOG2E * d_carry
  optimizer gd(rate = grads)
  read   d_carry @ carry
}
"""


def test_a_specs_names_may_be_those_of_the_printed_functions() -> None:
    found = compile_spec(HOSTILE)
    rows = parity.parity(found, backends=["torch"], dtypes=[torch.float64])
    assert rows
    assert all(row.ok for row in rows)
