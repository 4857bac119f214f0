"""check: the shipped layers, what their formulas come out as, constants, macros, vector functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest

from ttmdsl import expr as ex
from ttmdsl import spec
from ttmdsl.check import check
from ttmdsl.errors import CheckError, LoadError
from ttmdsl.expr import (
    Binary,
    CBinary,
    CElem,
    CMap,
    CMean,
    CNum,
    Columns,
    CRef,
    CSum,
    Inner,
    Map,
    MatVec,
    Norm,
    Num,
    Ref,
    Transpose,
)
from ttmdsl.names import SCALAR_FUNCTIONS, refusal, snake_case
from ttmdsl.parse import parse
from ttmdsl.resources import folder
from ttmdsl.spec import LayerSpec

LAYERS = sorted(folder("layers").glob("*.ttm"))

S = Ref("S", "memory", ("d_v", "d_k"))
Q, K, V = (Ref(n, "input", (d,)) for n, d in (("q", "d_k"), ("k", "d_k"), ("v", "d_v")))


def shipped(name: str, consts: Mapping[str, Any] | None = None) -> LayerSpec:
    text = (folder("layers") / f"{name}.ttm").read_text(encoding="utf-8")
    return check(parse(text), text, name, consts)


def layer(body: str, consts: Mapping[str, Any] | None = None) -> LayerSpec:
    text = f"layer A {{ dim d_k, d_v input q[d_k], k[d_k], v[d_v] {body} }}"
    return check(parse(text), text, consts=consts)


def linear(body: str = "", bias: str = "-<S @ k, v>", consts: Mapping[str, Any] | None = None) -> LayerSpec:
    return layer(f"{body} memory S[d_v, d_k] bias {bias} read S @ q", consts)


# ---- shipped layers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LAYERS, ids=lambda p: p.stem)
def test_shipped_layer(path: Any) -> None:
    text = path.read_text(encoding="utf-8")
    found = check(parse(text, path.name), text, path.name)
    assert found.source == text
    assert snake_case(found.name) == path.stem


def test_delta_net() -> None:
    (only,) = shipped("delta_net").passes
    error = Binary("sub", MatVec(S, K, ("d_v",)), V, ("d_v",))
    assert only.name == "y"
    assert only.bias == Binary("mul", Num(0.5), Norm(error, 2, 2), ())
    assert only.retention == {"S": S}
    assert only.optimizer == spec.Optimizer("gd", Ref("beta", "gate", ()))
    assert only.read == MatVec(S, Q, ("d_v",))


def test_defaults_and_ranges() -> None:
    found = shipped("linear_attention")
    (only,) = found.passes
    assert only.optimizer.rate == Num(1)
    assert only.bias == Binary("mul", Num(-1), Inner(MatVec(S, K, ("d_v",)), V), ())
    gla = shipped("gla")
    assert gla.tensor("alpha").keyword == "log_alpha"
    assert gla.passes[0].retention["S"] == Binary("mul", Ref("alpha", "gate", ("d_k",)), S, ("d_v", "d_k"))


def test_lattice() -> None:
    found = shipped("lattice_enc")
    memory = Ref("S", "memory", ("d", "m"))
    columns = Columns("phi", memory, ("d", "m"))
    bias = found.passes[0].bias
    assert isinstance(bias, Binary)
    assert isinstance(bias.b, Norm)
    assert isinstance(bias.b.x, Binary)
    assert bias.b.x.a == MatVec(Transpose(columns, ("m", "d")), Ref("v", "input", ("d",)), ("m",))
    assert found.passes[0].project == {"S": columns}
    assert found.memories[0].initial == "orthonormal"
    length = CMap("sqrt", CSum("j", CBinary("pow", CElem("j"), CNum(2))))
    assert found.fns["phi"].body == CBinary("div", CElem("i"), length)


def test_trellis() -> None:
    found = shipped("trellis")
    first, second = found.passes
    assert (first.name, second.name) == ("yh", "y")
    assert "Ref(name='yh', kind='pass', shape=('m',))" in repr(second.read)

    def centered(index: str, inner: str) -> CBinary:
        return CBinary("sub", CMap("silu", CElem(index)), CMean(inner, CMap("silu", CElem(inner))))

    variance = CMean("j2", CBinary("pow", centered("j2", "j3"), CNum(2)))
    root = CMap("sqrt", CBinary("add", variance, CNum(1e-5)))
    assert found.fns["f"].body == CBinary("div", centered("i", "j"), root)


# ---- constants ----------------------------------------------------------------------------------------------


def test_constants_are_overridden() -> None:
    assert shipped("trellis").passes[0].optimizer.batch == 16
    found = shipped("trellis", {"b": 4})
    assert found.consts == {"b": 4, "eps": 0.01}
    assert found.passes[0].optimizer.batch == 4
    assert shipped("lattice_dec", {"project": 0}).passes[0].project == {}


@pytest.mark.parametrize(
    "value", [True, None, "16", math.nan, math.inf, 10**400, 1e39, 1j], ids=lambda v: type(v).__name__
)
def test_constants_must_be_numbers(value: object) -> None:
    with pytest.raises(LoadError, match="constant `b`"):
        shipped("trellis", {"b": value})
    assert shipped("lattice_dec", {"b": Fraction(3)}).passes[0].optimizer.batch == 3


def test_unknown_constant_names_the_known_ones() -> None:
    with pytest.raises(LoadError, match=r"no constant `ebs`; its constants are b, eps: did you mean `eps`"):
        shipped("trellis", {"ebs": 1})
    with pytest.raises(LoadError, match="it has none"):
        shipped("delta_net", {"b": 1})


def test_a_constant_out_of_range_is_a_check_error() -> None:
    for value in (0, 1.5, 65_537):
        with pytest.raises(CheckError, match="whole number"):
            shipped("trellis", {"b": value})


def test_constants_in_norms_dims_and_exponents() -> None:
    found = linear("const p = 3, c = 2 gate g[c] let a = mean(g)^(p - 1)", "|S @ k - v|_p^p / p", {"p": 4})
    assert isinstance(found.passes[0].bias, Binary)
    assert isinstance(found.passes[0].bias.a, Norm)
    assert (found.passes[0].bias.a.p, found.passes[0].bias.a.power) == (4, 4)
    assert found.tensor("g").shape == ("c",)
    assert found.lets[0][1] == Binary("pow", ex.Mean(Ref("g", "gate", ("c",))), Num(3), ())


# ---- formulas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1/2 + 2^3 * -1", Num(-7.5)),
        ("|<k, q>|", Map("abs", Inner(K, Q), ())),
        ("||k||^2", Norm(K, 2, 2)),
        ("|k|", Norm(K, 2, 1)),
        ("|k|_1", Norm(K, 1, 1)),
        ("(|k|^2)^3", Binary("pow", Norm(K, 2, 2), Num(3), ())),
        ("size(k) * d_v", Binary("mul", ex.Size("d_k"), ex.Size("d_v"), ())),
        ("max(k, 0)", Binary("max", K, Num(0), ("d_k",))),
        ("softmax(k)", ex.Apply("softmax", K, ("d_k",))),
        ("sum(silu(k))", ex.Total(Map("silu", K, ("d_k",)))),
    ],
)
def test_formula(text: str, expected: ex.Expr) -> None:
    assert linear(f"let a = {text}").lets[0][1] == expected


def test_deep_memory_and_lists_of_memories() -> None:
    found = layer(
        """dim h gate alpha: decay fn M(x) = x + W1 @ gelu(W2 @ x)
        memory W1[d_k, h], W2[h, d_k] bias 1/2 * |M(k) - q|^2 retention alpha * (W1, W2) read M(M(q))"""
    )
    (only,) = found.passes
    w1, w2 = Ref("W1", "memory", ("d_k", "h")), Ref("W2", "memory", ("h", "d_k"))
    hidden = Map("gelu", MatVec(w2, K, ("h",)), ("h",))
    m = Binary("add", K, MatVec(w1, hidden, ("d_k",)), ("d_k",))
    assert only.bias == Binary("mul", Num(0.5), Norm(Binary("sub", m, Q, ("d_k",)), 2, 2), ())
    assert only.retention["W2"] == Binary("mul", Ref("alpha", "gate", ()), w2, ("h", "d_k"))
    assert found.fns == {}


def test_macros_are_hygienic() -> None:
    found = linear("fn f(x, q) = x - q fn g(q) = f(q, k) let a = g(q) let b = f(k, q)")
    assert dict(found.lets) == {
        "a": Binary("sub", Q, K, ("d_k",)),
        "b": Binary("sub", K, Q, ("d_k",)),
    }


def test_vector_functions_inline_each_other() -> None:
    found = linear(
        """const e = 2 param w[d_k], c fn sq(x) = x^e
        fn unit(s)[i] = s[i] / |s| fn g(x)[j] = w[j] * unit(c * x)[j] + sum(j, sq(x[j])) let a = g(k)"""
    )
    scaled = CBinary("mul", CRef("c", ""), CElem("j"))
    inner = CBinary("mul", CRef("c", ""), CElem("j2"))
    length = CMap("sqrt", CSum("j2", CBinary("pow", inner, CNum(2))))
    square = CBinary("pow", CElem("j3"), ex.CConst("e", 2))
    product = CBinary("mul", CRef("w", "j"), CBinary("div", scaled, length))
    assert found.fns["g"].body == CBinary("add", product, CSum("j3", square))


def test_whole_vectors_in_component_formulas() -> None:
    found = linear("fn f(s)[i] = s[i] * <s, s> / size(s) + mean(s) - |s[i]|")
    inner = CBinary("mul", CElem("i"), CSum("j", CBinary("mul", CElem("j"), CElem("j"))))
    first = CBinary("add", CBinary("div", inner, ex.CSize()), CMean("j2", CElem("j2")))
    assert found.fns["f"].body == CBinary("sub", first, CMap("abs", CElem("i")))


def test_spans_survive() -> None:
    text = (folder("layers") / "delta_net.ttm").read_text(encoding="utf-8")
    read = check(parse(text), text).passes[0].read
    line = text.splitlines()[read.span.line - 1]
    assert line[read.span.column - 1 :][: read.span.length] == "S @ q"


def test_square_memories_are_allowed() -> None:
    text = "layer A { dim d input q[d], k[d], v[d] memory S[d, d] bias -<S @ k, v> retention S / 2 read S @ q }"
    assert check(parse(text), text).memories[0].shape == ("d", "d")


def test_reserved_names() -> None:
    assert all(refusal(name) for name in (*SCALAR_FUNCTIONS, "lambda", "op", "T", "a__b", "print", "torch"))
    assert not any(
        refusal(name) for name in ("q", "k", "v", "alpha", "S", "W1", "phi", "d_k", "read", "project", "gamma")
    )
