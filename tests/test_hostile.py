"""Text from anyone: it compiles harmlessly or is refused with a message; nothing in it is ever run."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from ttmdsl.check import check
from ttmdsl.errors import LoadError, SpecError
from ttmdsl.parse import parse
from ttmdsl.resources import folder
from ttmdsl.spec import LayerSpec

LAYERS = [path.read_text(encoding="utf-8") for path in sorted(folder("layers").glob("*.ttm"))]
GOOD = (folder("layers") / "delta_net.ttm").read_text(encoding="utf-8")


def compiled(text: str) -> LayerSpec:
    return check(parse(text), text)


def with_clause(clause: str) -> str:
    return GOOD.replace("  memory ", f"  {clause}\n  memory ", 1)


def bomb(depth: int, body: str) -> str:
    """Functions of which each calls the one before it twice."""
    calls = " ".join(f"fn f{i}(a) = f{i - 1}(f{i - 1}(a))" for i in range(1, depth))
    return with_clause(f"fn f0(a) = {body} {calls} let z = f{depth - 1}(k)")


def fan(depth: int) -> str:
    """Functions of which each adds the one before it to itself: shallow, and exponential in size."""
    calls = " ".join(f"fn f{i}(a) = f{i - 1}(a) + f{i - 1}(a)" for i in range(1, depth))
    return with_clause(f"fn f0(a) = a {calls} let z = f{depth - 1}(k)")


REFUSED = {
    "import": with_clause("let x = __import__('os').system('true')"),
    "import_name": with_clause("gate __import__"),
    "dunder": with_clause("gate a__class__"),
    "attribute": with_clause("let x = k.data"),
    "string": with_clause("const c = 'os'"),
    "triple_quotes": with_clause('""" '),
    "backslash": with_clause("gate a\\nimport os"),
    "semicolon": with_clause("gate a; import os"),
    "jinja": with_clause("gate {{ cycler.__init__ }}"),
    "jinja_block": with_clause("{% raw %}"),
    "fstring": with_clause("let x = {k!r}"),
    "walrus": with_clause("let x = (z := 1)"),
    "lambda": with_clause("let x = lambda"),
    "keyword_name": with_clause("gate lambda"),
    "soft_constant": with_clause("gate None, True"),
    "builtin_name": with_clause("gate eval, exec, open"),
    "module_name": with_clause("let torch = 2"),
    "keyword_of_op": with_clause("gate cu_seqlens"),
    "generated_name": with_clause("const SPEC = 1"),
    "fn_builtin": with_clause("fn exp(x) = x"),
    "fn_argument": with_clause("fn f(class) = class"),
    "layer_keyword": GOOD.replace("DeltaNet {", "Import {"),
    "layer_function": GOOD.replace("DeltaNet {", "Op {"),
    "cyrillic": with_clause("gate bеta"),
    "full_width": with_clause("gate ｅｖａｌ"),
    "arabic_digits": with_clause("const c = ١٢"),
    "superscript": with_clause("let x = k²"),
    "bidi": GOOD + "# \u202e evil\n",
    "zero_width": with_clause("gate be\u200bta"),
    "bom": "\ufeff" + GOOD,
    "surrogate": GOOD + "# \ud800\n",
    "nul": GOOD + "\0",
    "escape_sequence": GOOD + "# \x1b[2J\n",
    "line_separator": GOOD + "# a\u2028gate b\n",
    "carriage_return": GOOD + "# a\rgate b\n",
    "number_huge": with_clause("const c = 1e999"),
    "number_long": with_clause("const c = " + "9" * 5_000),
    "number_power": with_clause("let x = 9^9^9^9"),
    "number_nan": with_clause("const c = nan"),
    "complex": with_clause("let x = (-8)^0.5"),
    "open_brackets": with_clause("let x = " + "(" * 60_000),
    "deep_bars": with_clause("let x = " + "|" * 20_000 + "k" + "|" * 20_000),
    "deep_minus": with_clause("let x = " + "-" * 60_000 + "1"),
    "deep_powers": with_clause("let x = " + "2^" * 20_000 + "1"),
    "deep_indices": with_clause("let x = k" + "[i]" * 15_000),
    "deep_calls": with_clause("let x = " + "exp(" * 10_000 + "1" + ")" * 10_000),
    "long_sum": with_clause("let x = " + "k + " * 5_000 + "k"),
    "bomb": bomb(60, "a + a"),
    "bomb_without_nodes": bomb(60, "a"),
    "fan": fan(40),
    "recursion": with_clause("fn f(x) = f(x) let z = f(k)"),
    "mutual_recursion": with_clause("fn f(x)[i] = g(x)[i] fn g(x)[i] = f(x)[i]"),
    "component_bomb": with_clause(
        "fn f0(s)[i] = s[i] "
        + " ".join(f"fn f{n}(s)[i] = sum(j, f{n - 1}(s)[j] * f{n - 1}(s)[j])" for n in range(1, 40))
    ),
    "norm_bomb": with_clause(
        "fn f0(s) = s + s " + " ".join(f"fn f{n}(s) = f{n - 1}(s + s)" for n in range(1, 30)) + " fn g(s)[i] = |f29(s)|"
    ),
    "enormous": GOOD + "#" * 1_000_000,
    "many_names": with_clause("gate " + ", ".join(f"g{i}" for i in range(5_000))),
    "many_errors": with_clause(" ".join(f"let a{i} = b{i}" for i in range(200))),
    "many_repeats": with_clause("gate " + ", ".join(["g"] * 10_000)),
    "many_unknown": GOOD.replace("S @ q", " + ".join(f"u{i}" for i in range(50))),
    "many_functions": with_clause(" ".join(f"fn f{i}(x) = f{i + 1}(x)" for i in range(1_500))),
    "batch": GOOD.replace("rate = beta", "batch = 1e30"),
    "empty": "",
    "blank": " \n\t\n",
    "binary": bytes(range(256)).decode("latin-1"),
}

HARMLESS = {
    "deep_brackets": GOOD.replace("S @ q", "(" * 30_000 + "S @ q" + ")" * 30_000),
    "triple_quotes": GOOD + '# """ \'\'\' """\n',
    "backslashes": GOOD + "# \\N{BULLET} \\x00 \\\n",
    "jinja": GOOD + "# {{ 7 * 7 }} {% for x in y %} {# #}\n",
    "code": GOOD + "# __import__('os').system('true') ; exec(open('x').read())\n",
    "greek": GOOD + "# ∇ℓ(α·S; k, v), naïve\n",
    "format": GOOD + "# %s {0} {name!r:>{width}} ${HOME}\n",
    "crlf": GOOD.replace("\n", "\r\n"),
    "no_newline": GOOD.rstrip(),
    "layer_in_comment": "# layer Evil { }\n" + GOOD,
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_refused(text: str) -> None:
    begin = time.process_time()
    with pytest.raises(SpecError) as caught:
        compiled(text)
    assert time.process_time() - begin < 5
    message = str(caught.value)
    assert message
    assert not any(c in message for c in "\0\x1b\u202e\u2028\u200b\ud800\r")


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS)
def test_harmless(text: str) -> None:
    found = compiled(text)
    assert found.source == text
    assert found.passes == compiled(GOOD).passes


@pytest.mark.parametrize("name", ["b; import os", "__class__", "", "B" * 10_000])
def test_constants_by_any_name(name: str) -> None:
    with pytest.raises(LoadError):
        check(parse(GOOD), GOOD, consts={name: 1})


@pytest.fixture(scope="module")
def unicode() -> None:
    """Before a first text hypothesis lists all of Unicode, which takes seconds, and no part of a test."""
    find(st.text(), lambda text: True)


@pytest.mark.usefixtures("unicode")
@given(st.data())
@settings(max_examples=200, deadline=2_000)
def test_mutations_of_the_shipped_layers(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(LAYERS))
    piece = st.one_of(
        st.text(alphabet="abdkqvSW12.^*@|<>(){}[],:=+-/_ \n#", max_size=3),
        st.sampled_from([" memory ", " pass p { ", "phi(", " S", "^T", "sum(j, ", " when b", "1e9"]),
        st.text(max_size=2),
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.integers(0, 8))
        text = text[:at] + data.draw(piece) + text[at + gone :]
    with suppress(SpecError):  # and nothing else
        assert compiled(text).source == text
