"""What `explain` prints: the papers' lines, in text and in LaTeX."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ttmdsl.check import check
from ttmdsl.derive import derive
from ttmdsl.explain import explain, header
from ttmdsl.parse import parse
from ttmdsl.resources import folder
from ttmdsl.rule import UpdateRule

LAYERS = sorted(p.stem for p in Path(folder("layers")).glob("*.ttm"))

MLP = """layer Mlp {
  dim d, h
  input q[d], k[d], v[d]
  gate alpha: decay, theta: decay, eta
  const b = 16
  memory W1[d, h], W2[h, d]
  bias 1/2 * |k + W1 @ gelu(W2 @ k) - v|^2
  retention alpha * W1, alpha * W2
  optimizer momentum(decay = theta, rate = eta, batch = b)
  read q + W1 @ gelu(W2 @ q)
}"""

ODD = """layer Odd {
  dim d_k, d_v
  input q[d_k], k[d_k], v[d_v]
  gate alpha, by_column[d_k]: decay
  param ln_w[d_v]
  const p = 3
  fn unit(s)[i] = s[i] / sqrt(sum(j, s[j]^2))
  fn half(x)[i] = tanh(x[i]) * sum(j, abs(x[j])^p)
  let z = silu(k)
  memory S[d_v, d_k]
  bias 1/3 * |rows(unit, S) @ z - v|_3^3 + alpha / 2 * |S|^2 - <half(S @ k), softmax(ln_w)>
  retention by_column * S
  optimizer gd(rate = alpha, at = retained)
  read S @ q
}"""


def _rule(text: str) -> UpdateRule:
    return derive(check(parse(text), text))


def _layer(name: str) -> UpdateRule:
    return _rule((Path(folder("layers")) / f"{name}.ttm").read_text(encoding="utf-8"))


def _lines(text: str) -> list[str]:
    return [re.sub(r" +", " ", line).strip() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("linear_attention", ["L = -⟨S k, v⟩", "∂L/∂S = -v kᵀ", "Sₜ = Sₜ₋₁ + v kᵀ", "yₜ = Sₜ q"]),
        ("mamba2", ["Sₜ = α Sₜ₋₁ + v kᵀ"]),
        ("gla", ["Sₜ = Sₜ₋₁ diag(α) + v kᵀ"]),
        ("delta_net", ["e = S k - v", "∂L/∂S = e kᵀ", "Sₜ = Sₜ₋₁ - β ∇L(Sₜ₋₁)", "Sₜ = Sₜ₋₁ - β e kᵀ"]),
        ("gated_delta_net", ["Sₜ = α Sₜ₋₁ - β ∇L(S′)", "Sₜ = α Sₜ₋₁ - β e kᵀ (e at S′)", "S′ = α Sₜ₋₁"]),
        (
            "titans_linear",
            [
                "Uₜ = θ Uₜ₋₁ - η e kᵀ (e at S′)",
                "Sₜ = α Sₜ₋₁ + Uₜ",
                "S′ : the state after the previous group of 16 tokens",
            ],
        ),
        (
            "lattice_dec",
            [
                "φ(s)_i = s_i / |s|",
                "J_φ(s) = P(s) / |s| (projection onto the orthogonal complement of s, divided by |s|)",
                "P(s) = I - s sᵀ / |s|²",
                "L = 1/2 |φ(S) k - v|²",
                "e = φ(S) k - v",
                "∂L/∂s_i = k_i P(s_i) e / |s_i| (for every column i)",
                "s_i ← μ s_i - γ k_i P(s_i) e / |s_i|",
                "Sₜ ← φ(Sₜ) (after every token)",
                "yₜ = Sₜ q",
            ],
        ),
        ("lattice_enc", ["L = 1/2 |φ(S)ᵀ v - k|²", "∂L/∂s_i = e_i P(s_i) v / |s_i| (for every column i)"]),
        (
            "lattice_sim",
            ["∂L/∂s_i = -k_i P(s_i) v / |s_i| (for every column i)", "s_i ← μ s_i + γ k_i P(s_i) v / |s_i|"],
        ),
        (
            "trellis",
            [
                "φ(x)_i = silu(x_i) / √(|silu(x)|² + ε)",
                "P(z) = I - z zᵀ / (|z|² + ε)",
                "f(x)_i = c_i / σ",
                "h = K k",
                "u = J_φ(h)ᵀ e",
                "∂L/∂K = u kᵀ",
                "∂L/∂V = u vᵀ",
                "Kₜ = β Kₜ₋₁ - γ u kᵀ (u at K′)",
                "yₜ = φ(Vₜᵀ f(yh))",
            ],
        ),
    ],
)
def test_the_papers_lines(layer: str, expected: list[str]) -> None:
    found = _lines(explain(_layer(layer)))
    assert [line for line in expected if line not in found] == []


def test_frozen_columns_are_primed() -> None:
    text = (Path(folder("layers")) / "lattice_dec.ttm").read_text(encoding="utf-8")
    rule = derive(check(parse(text), text, consts={"b": 4, "project": 0}))
    found = _lines(explain(rule))
    assert "s_i ← μ s_i - γ k_i P(s_i′) e / |s_i′| (e at S′)" in found
    assert not any("after every token" in line for line in found)


def test_mlp() -> None:
    found = _lines(explain(_rule(MLP)))
    assert "∂L/∂W1 = e aᵀ" in found
    assert "∂L/∂W2 = ((W1ᵀ e) ⊙ gelu'(h1)) kᵀ" in found
    assert "W2ₜ = α W2ₜ₋₁ + U_W2ₜ" in found


def test_odd_pieces() -> None:
    found = explain(_rule(ODD))
    assert "∂half_i/∂x_j = δ_ij" in found
    assert "(for every row i)" in found
    assert "z = silu(k)" in found
    assert "diag(y) - y yᵀ" in found
    assert "|_3³" in found


def test_recurrence_is_printed_as_given() -> None:
    assert "class 2: affine" in explain(_layer("delta_net"), "class 2: affine")
    assert "class 2: affine" in explain(_layer("delta_net"), "class 2: affine", latex=True)
    assert "recurrence" not in explain(_layer("delta_net"))


def test_header_is_short_and_flat() -> None:
    for layer in LAYERS:
        lines = header(_layer(layer))
        assert 3 <= len(lines) <= 24
        assert all(line == line.strip() and "\n" not in line for line in lines)
    assert header(_layer("delta_net"))[1:3] == ["e = S k - v", "∂L/∂S = e kᵀ"]


# ---- LaTeX --------------------------------------------------------------------------------------------------


def _rows(latex: str) -> list[str]:
    body = re.search(r"\\begin\{align\*\}\n(.*)\n\\end\{align\*\}$", latex, re.DOTALL)
    assert body is not None
    return body.group(1).splitlines()


@pytest.mark.parametrize("text", [*LAYERS, MLP, ODD], ids=[*LAYERS, "mlp", "odd"])
def test_latex_is_well_formed(text: str) -> None:
    latex = explain(_rule(text) if "{" in text else _layer(text), latex=True)
    rows = _rows(latex)
    equations = [row for row in rows if not row.startswith(r"\intertext")]
    for row in rows:
        unescaped = re.sub(r"\\[{}\\_&%#$]", "", row)
        assert unescaped.count("{") == unescaped.count("}")
        assert len(re.findall(r"\\left(?!arrow)", row)) == row.count(r"\right")
        assert re.search(r"(?<!\\)%", row) is None
        assert row.isascii(), row
    assert all(row.count("&") in (1, 3) for row in equations)
    assert all(row.endswith(r"\\") for row in equations[:-1])
    assert not equations[-1].endswith(r"\\")
    assert not re.search(r"_\{[^{}]*\}_|\^\{[^{}]*\}\^", latex)  # TeX: double subscript, double superscript


@pytest.mark.parametrize("text", [*LAYERS, MLP, ODD], ids=[*LAYERS, "mlp", "odd"])
def test_latex_sets(text: str) -> None:
    """matplotlib's own TeX parser reads every equation."""
    mathtext = pytest.importorskip("matplotlib.mathtext")
    parser = mathtext.MathTextParser("path")
    latex = explain(_rule(text) if "{" in text else _layer(text), latex=True)
    for row in _rows(latex):
        if not row.startswith(r"\intertext"):
            sides = row.removesuffix(r"\\").split("&&")[0].replace("&", " ")
            for ours, theirs in ((r"\lVert", r"\Vert"), (r"\rVert", r"\Vert"), (r"\boldsymbol", r"\mathbf")):
                sides = sides.replace(ours, theirs)
            parser.parse(f"${sides}$")


def test_latex_of_lattice() -> None:
    latex = explain(_layer("lattice_dec"), latex=True)
    assert r"J_{\phi}\left(\mathbf{s}\right) &= \frac{P\left(\mathbf{s}\right)}{\lVert \mathbf{s} \rVert}" in latex
    assert r"\nabla_{\mathbf{s}_{i}} \mathcal{L} &= \mathbf{k}_{i} \frac{P\left(\mathbf{s}_{i}\right)" in latex
