"""The generated module: its surface, what frames the backends, and how a spec's text reaches it."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import tokenize
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import ttmdsl
from ttmdsl.emit_module import comment, emit_module, literal
from ttmdsl.loader import read
from ttmdsl.options import SHIPPED, Options
from ttmdsl.pipeline import compile_source, run

SIZES = {"d_k": 4, "d_v": 6, "d": 6, "m": 4}
OPTIONS = Options(Path("unused"))
GROUPED = [("titans_linear", {"b": 4}), ("lattice_dec", {"b": 3}), ("trellis", {"b": 4})]
# one of each kind that starts from a default state; test_zoo.py holds all of the shipped layers
KINDS = (
    "linear_attention retnet mamba2 gla delta_net gated_delta_net delta_product rwkv7 swla titans_linear"
    " lattice_dec lattice_enc lattice_sim trellis abc mesa attention dot"
).split()
LAYERS = [(name, {}) for name in KINDS] + GROUPED


def draw(
    module: ModuleType, batch: int, length: int, heads: int = 2, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    size = SIZES | {name: int(value) for name, value in module.CONSTS.items()}
    x = {key: torch.randn(batch, length, heads, *(size[a] for a in axes)) for key, axes in module.INPUTS.items()}
    x |= {key: torch.rand(batch, length, heads, *(size[a] for a in axes)) for key, axes in module.GATES.items()}
    x |= {key: torch.rand(heads, *(size[a] for a in axes)) for key, axes in module.PARAMS.items()}
    return {key: (-t if module.RANGES[key] == "decay" else t).to(dtype) for key, t in x.items()}


def span(module: ModuleType, x: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    return {key: t if key in module.PARAMS else t[:, start:end] for key, t in x.items()}


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.fixture(scope="module", params=LAYERS, ids=lambda p: "-".join([p[0], *(f"{k}{v}" for k, v in p[1].items())]))
def layer(request: pytest.FixtureRequest) -> ModuleType:
    torch.manual_seed(0)
    name, consts = request.param
    return ttmdsl.load(name, **consts)


@pytest.fixture(scope="module")
def gated() -> ModuleType:
    return ttmdsl.load("gated_delta_net")


# ---- surface ------------------------------------------------------------------------------------------------


def test_surface(gated: ModuleType) -> None:
    assert read("gated_delta_net")[0] == gated.SPEC
    assert gated.INPUTS == {"q": ("d_k",), "k": ("d_k",), "v": ("d_v",)}
    assert gated.GATES == {"log_alpha": (), "beta": ()}
    assert gated.PARAMS == {}
    assert gated.MEMORY == gated.STATE == {"S": ("d_v", "d_k")}
    assert gated.RANGES["log_alpha"] == "decay"
    assert gated.INITIAL == {"S": "zero"}
    assert gated.gated_delta_net is gated.op
    assert all(hasattr(gated, name) for name in gated.__all__)
    assert list(inspect.signature(gated.op).parameters) == [
        *("q", "k", "v", "log_alpha", "beta"),
        *("initial_state", "output_final_state", "cu_seqlens", "backend"),
    ]


def test_state_of_a_momentum_layer_with_groups() -> None:
    module = ttmdsl.load("titans_linear")
    shape = ("d_v", "d_k")
    assert {"S": shape, "S_momentum": shape, "S_point": shape, "position": ()} == module.STATE
    assert module.CONSTS == {"b": 16}


def test_it_imports_torch_triton_and_the_standard_library_alone(layer: ModuleType) -> None:
    tree = ast.parse(Path(str(layer.__file__)).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names <= {"torch", "triton"}


def test_no_section_replaces_what_another_one_defines(layer: ModuleType) -> None:
    body = ast.parse(Path(str(layer.__file__)).read_text()).body
    body += [node for branch in body if isinstance(branch, ast.If) for node in branch.body]
    names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names += [ast.unparse(to) for node in body if isinstance(node, ast.Assign) for to in node.targets]
    assert [name for name in names if names.count(name) > 1] == []


def test_it_runs_without_the_package(tmp_path: Path) -> None:
    path = tmp_path / "vendored.py"
    path.write_text(compile_source(*read("delta_net"), {}, OPTIONS))
    script = (
        "import sys; sys.modules['ttmdsl'] = None\n"
        "import torch, vendored\n"
        "print('triton' in sys.modules)\n"
        "x = {n: torch.randn(1, 3, 2, 4) for n in 'qkv'}\n"
        "print(vendored.op(**x, beta=torch.rand(1, 3, 2), backend='reference')[0].shape)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    imported, shape = found.stdout.splitlines()
    assert shape == "torch.Size([1, 3, 2, 4])"
    assert imported == str(torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ)


# ---- op and step --------------------------------------------------------------------------------------------


def test_pieces_packed_sequences_and_steps_equal_the_whole(layer: ModuleType) -> None:
    x = draw(layer, 2, 11)
    whole, final = layer.op(**x, output_final_state=True)

    state, ys = None, []
    for start, end in ((0, 5), (5, 5), (5, 6), (6, 11)):
        y, state = layer.op(**span(layer, x, start, end), initial_state=state, output_final_state=True)
        ys.append(y)
    close(torch.cat(ys, 1), whole)

    token, ys = None, []
    for t in range(11):
        one = {key: v if key in layer.PARAMS else v[:, t] for key, v in x.items()}
        y, token = layer.step(**one, initial_state=token)
        ys.append(y)
    close(torch.stack(ys, 1), whole)

    row = {key: t if key in layer.PARAMS else t.flatten(0, 1).unsqueeze(0) for key, t in x.items()}
    bounds = torch.tensor([0, 11, 11, 22], dtype=torch.int32)
    y, packed = layer.op(**row, cu_seqlens=bounds, output_final_state=True)
    close(y.unflatten(1, (2, 11))[0], whole)

    assert list(final) == list(state) == list(token) == list(packed) == list(layer.STATE)
    for key in layer.STATE:
        close(state[key], final[key])
        close(token[key], final[key])
        close(packed[key][[0, 2]], final[key])
        assert packed[key].shape[0] == 3


def test_gradients_reach_every_tensor(layer: ModuleType) -> None:
    x = {key: t.requires_grad_() for key, t in draw(layer, 2, 7).items()}
    shape = {key: [SIZES[a] for a in axes] for key, axes in layer.MEMORY.items()}
    state = {key: torch.randn(1, 2, *s, dtype=torch.float64).requires_grad_() for key, s in shape.items()}
    y, final = layer.op(**x, initial_state=state, output_final_state=True)
    (y.sum() + sum(final[key].square().sum() for key in layer.MEMORY)).backward()
    for key, t in (x | state).items():
        assert t.grad is not None, key
        assert t.grad.abs().sum() > 0, key
    assert y.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_y_has_the_inputs_dtype_and_the_state_is_wider(gated: ModuleType, dtype: torch.dtype) -> None:
    x = draw(gated, 1, 5, dtype=dtype)
    x["log_alpha"] = x["log_alpha"].float()
    y, final = gated.op(**x, output_final_state=True)
    assert y.dtype == dtype
    assert final["S"].dtype == torch.float32


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_no_tokens(layer: ModuleType, backend: str) -> None:
    y, state = layer.op(**draw(layer, 2, 0), output_final_state=True, backend=backend)
    assert y.shape[:3] == (2, 0, 2)
    assert list(state) == list(layer.STATE)
    assert layer.op(**draw(layer, 1, 0), cu_seqlens=torch.tensor([0, 0]), backend=backend)[0].shape[:2] == (1, 0)


def test_one_state_for_all_sequences(layer: ModuleType) -> None:
    x = draw(layer, 2, 5)
    _, state = layer.op(**draw(layer, 1, 5), output_final_state=True)
    y, _ = layer.op(**x, initial_state=state)
    both, _ = layer.op(**x, initial_state={key: torch.cat([t, t]) for key, t in state.items()})
    close(y, both)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients(layer: ModuleType, mode: type[torch.no_grad]) -> None:
    x = draw(layer, 1, 5)
    expected, _ = layer.op(**x)
    with mode():
        close(layer.op(**x)[0], expected)
        close(layer.op(**draw_again(x), cu_seqlens=torch.tensor([0, 5]))[0], expected)


def draw_again(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: t.clone() for key, t in x.items()}


def test_autocast_leaves_the_backends_alone(layer: ModuleType) -> None:
    x = draw(layer, 1, 5, dtype=torch.float32)
    expected, _ = layer.op(**x)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer.op(**x)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)


def test_bounds_are_looked_at_again_when_they_change(gated: ModuleType) -> None:
    x = draw(gated, 1, 5)
    bounds = torch.tensor([0, 2, 5])
    gated.op(**x, cu_seqlens=bounds)
    bounds[2] = 4
    with pytest.raises(ValueError, match="expected to end at T = 5, got 4"):
        gated.op(**x, cu_seqlens=bounds)


def test_log_decays_are_looked_at_only_where_that_is_possible(gated: ModuleType) -> None:
    x = draw(gated, 3, 5)
    over = torch.func.vmap(lambda a: gated._above_zero(a) + a.sum())
    assert over(x["log_alpha"]).shape == (3,)


def test_what_frames_the_backends_compiles_to_one_graph(gated: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "_torch", lambda x, state: (x["v"] * x["beta"][..., None], state))
    x = draw(gated, 2, 5) | {"initial_state": {"S": torch.randn(1, 2, 6, 4)}}
    whole = torch.compile(lambda x: gated.op(**x, output_final_state=True), fullgraph=True, backend="eager")
    close(whole(x)[0], gated.op(**x)[0])
    close(whole(x)[1]["S"], gated.op(**x, output_final_state=True)[1]["S"])


# ---- text ---------------------------------------------------------------------------------------------------

HOSTILE = [
    "\u2028import os",
    "\x85import os",
    "\r\nimport os",
    "\x0cimport os",
    "'''\"\"\"\\",
    "\\N{BULLET} \\x41 {{ 7 * 7 }} {% raw %}",
    "\u202eimport os",
    "coding: utf-7",
    "\ud800",
    "\x00",
]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_source_stays_a_comment_and_a_string(text: str) -> None:
    job = run(*read("delta_net"), {}, OPTIONS, after="derive")
    spec = job.done["check"]
    source = f"# {text}\n{spec.source}# {text}"
    emitted = emit_module(
        type(spec)(**{f: getattr(spec, f) for f in spec.__slots__} | {"source": source}), [text], EMPTY
    )
    emitted.encode()
    tree = ast.parse(emitted)
    assert ast.unparse(tree.body[0]) == "import bisect"
    (found,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "SPEC"]
    assert ast.literal_eval(found) == source
    comments = [t.string for t in tokenize.generate_tokens(StringIO(emitted).readline) if t.type == tokenize.COMMENT]
    assert all(c.isprintable() for c in comments)


EMPTY = {"reference": "", "torch": "", "triton": "pass"}


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("Torch", "torch_"),
        ("Math", "math_"),
        ("Wide", "wide"),
        ("ABC", "abc"),
        ("AtlasPP", "atlas_pp"),
        ("Sys", "sys_"),
    ],
)
def test_the_layers_own_name_replaces_nothing(name: str, alias: str) -> None:
    spec = run(*read("delta_net"), {}, OPTIONS, after="check").done["check"]
    renamed = type(spec)(**{f: getattr(spec, f) for f in spec.__slots__} | {"name": name})
    assert emit_module(renamed, [], EMPTY).endswith(f"\n{alias} = op\n")


@pytest.mark.parametrize("name", ["N", "conv_size", "F", "position", "S_momentum", "_checked", "x y", "ｑ"])
def test_names_that_the_module_uses_are_refused(name: str) -> None:
    spec = run(*read("delta_net"), {}, OPTIONS, after="check").done["check"]
    memory = type(spec.memories[0])(name, spec.memories[0].shape)
    only = type(spec.passes[0])(
        **{f: getattr(spec.passes[0], f) for f in spec.passes[0].__slots__} | {"memories": (memory,)}
    )
    named = type(spec)(**{f: getattr(spec, f) for f in spec.__slots__} | {"passes": (only,)})
    with pytest.raises(ttmdsl.CheckError, match="name"):
        emit_module(named, [], EMPTY)


def test_emitting_twice_gives_the_same_text(layer: ModuleType) -> None:
    text = Path(str(layer.__file__)).read_text()
    options = replace(OPTIONS, tuned=(SHIPPED,))
    assert text.startswith(compile_source(layer.SPEC, "again", layer.CONSTS, options))


def test_literals() -> None:
    value = {"a": ("b",), "c": [1, 2.5, "it's", 'say "x"'], "d": ()}
    assert ast.literal_eval(literal(value)) == value
    assert literal(16.0) == "16"
    assert comment("a\tb\u2028 ") == "a    b\\u2028"
