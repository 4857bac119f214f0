"""Scans of several chains of carries: which carries are walked with apart, what passes from one walk to the next, and
that kernels of several walks are the reference."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from test_differentiate import forms
from test_parts import parted
from tiers import mostly_beyond

import ttmdsl
from ttmdsl.builder import Builder
from ttmdsl.chains import chains, smallest_crossing, walks
from ttmdsl.drawing import Shape, draw
from ttmdsl.ir import TOKEN_AXES, Node, Program, is_product, reachable
from ttmdsl.kernels import Kernel
from ttmdsl.lower import Form
from ttmdsl.parity import parity
from ttmdsl.plan import Plan, plan
from ttmdsl.rounding import enlarged, steep
from ttmdsl.scans import walking
from ttmdsl.schedule import FULL
from ttmdsl.staging import ROOM, alive

# three memories, each linear in itself, whose readouts are one another's: what is read of the first two is added
SLOTS = """layer Slots {
  dim   d_k, d_v, m
  input q[d_k], k[d_k], v[d_v], a[m]
  gate  alpha[m]: decay

  pass r {
    memory    K[m, d_k]
    bias      -<K @ k, a>
    retention alpha * K
    read      softmax(K @ q)
  }
  pass s {
    memory    L[m, d_k]
    bias      -<L @ q, a>
    retention alpha * L
    read      softmax(L @ k + r)
  }
  pass y {
    memory    V[m, d_v]
    bias      -<V @ v, a>
    retention alpha * V
    read      V^T @ (r + s)
  }
}"""

# what the second memory is taught is what was read of the first; both are divided by the lengths of their columns
TAUGHT = """layer Taught {
  dim   d_k, d_v, m
  input q[d_k], k[d_k], v[d_v], a[m]
  gate  alpha: decay, gamma: unit
  const b = 4
  fn    phi(x)[i] = x[i] / sqrt(sum(j, x[j]^2))

  pass r {
    memory    K[m, d_k] = orthonormal
    bias      1/2 * |columns(phi, K) @ k - a|^2
    retention alpha * K
    optimizer gd(rate = gamma, batch = b)
    read      silu(K @ q)
  }
  pass y {
    memory    V[m, d_v] = orthonormal
    bias      1/2 * |columns(phi, V) @ v - r|^2
    retention alpha * V
    optimizer gd(rate = gamma, batch = b)
    read      V^T @ r
  }
}"""


@pytest.fixture(scope="session")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Names, as `load` takes them, of the specs above."""
    folder = tmp_path_factory.mktemp("specs")
    paths = {"slots": folder / "slots.ttm", "taught": folder / "taught.ttm"}
    for path, text in zip(paths.values(), (SLOTS, TAUGHT), strict=True):
        path.write_text(text, encoding="utf-8")
    return {name: str(path) for name, path in paths.items()} | {"trellis": "trellis", "gsa": "gsa"}


def planned(name: str, consts: dict[str, float], kind: str = "chunk") -> tuple[Form, Plan]:
    form = forms(name, consts)[kind]
    # in units of 16 tokens, where y is not read after the scan of carries that are divided by their lengths
    return form, plan(kind, form, 16 if steep(form.forward) else 64)


def scans(kernels: tuple[Kernel, ...]) -> list[Kernel]:
    return [k for k in kernels if k.kind == "scan"]


def walked_apart(kernels: tuple[Kernel, ...]) -> list[set[str]]:
    return [{name for name, _ in k.carried} for k in scans(kernels)]


# ---- which scans are several ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "consts", "forward", "backward"),
    [
        ("trellis", {"b": 64}, [{"K", "K_point"}, {"V", "V_point"}], [{"K"}, {"V"}]),
        ("gsa", {}, [{"K"}, {"V"}], [{"V"}, {"K"}]),  # of heads of 128 there is room for one
        ("abc", {}, [{"K", "V"}], [{"K", "V"}]),
        ("slots", {}, [{"K", "L"}, {"V"}], None),
        ("taught", {}, [{"K", "K_point"}, {"V", "V_point"}], [{"V"}, {"K"}]),
        ("titans_linear", {}, [{"S", "S_momentum", "S_point"}], [{"S", "S_momentum"}]),
        ("gated_delta_net", {}, [{"S"}], [{"S"}]),
    ],
)
def test_carries_are_walked_with_apart_where_there_is_no_room(
    specs: dict[str, str],
    name: str,
    consts: dict[str, float],
    forward: list[set[str]],
    backward: list[set[str]] | None,
) -> None:
    _, found = planned(specs.get(name, name), consts)
    assert walked_apart(found.forward) == forward
    assert backward is None or walked_apart(found.backward) == backward


@pytest.mark.parametrize(("name", "kind"), [("trellis", "chunk"), ("trellis", "resumed"), ("gsa", "chunk")])
def test_several_scans_have_more_room_than_one(name: str, kind: str) -> None:
    form, found = planned(name, {"b": 64} if name == "trellis" else {}, kind)
    ends = {k[6:]: v for k, v in form.forward.outputs.items() if k.startswith("carry:")}
    whole = Kernel("_", "scan", form.forward, False, (("y", form.forward.outputs["y"]),), tuple(ends.items()))
    assert alive(whole, FULL) > ROOM
    assert max(alive(k, FULL) for k in scans(found.forward)) < alive(whole, FULL) - 2


def test_a_scan_of_one_chain_may_be_split_over_the_grid() -> None:
    """All that follows is summed over the slots and the keys; values are independent of one another."""
    _, found = planned("gsa", {})
    assert [k.blocked for k in scans(found.forward)] == ["", "d_v"]
    between = [k for k in walking(found.forward) if k.kind == "map"]
    assert between  # products under decays of the first readout: for all chunks at once


# ---- what passes between them -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "consts", "kind"),
    [
        ("trellis", {"b": 64}, "chunk"),
        ("trellis", {"b": 4}, "resumed"),
        ("gsa", {}, "chunk"),
        ("slots", {}, "chunk"),
        ("taught", {}, "chunk"),
        ("taught", {}, "resumed"),
    ],
)
def test_what_passes_is_small_and_as_precise_as_it_is_taken(
    specs: dict[str, str], name: str, consts: dict[str, float], kind: str
) -> None:
    _, found = planned(specs[name], consts, kind)
    for kernels in (found.forward, found.backward):
        walk = walking(kernels)
        for i, kernel in enumerate(walk):
            if kernel.kind == "map":
                continue
            assert {n.name for n in kernel.walked()} <= {name for name, _ in kernel.carried} | {"K_point", "V_point"}
            assert kernel.across <= set(kernel.saves)
            assert all(n.axes[0] in TOKEN_AXES for n in kernel.across if len(n.axes) > 1)
            assert kernel.across <= {n for later in walk[i + 1 :] for n in later.given}
            for later in walk[i + 1 :]:
                nodes = [n for n in later.nodes if n not in later.given]
                others = {a for n in nodes if not is_product(n) for a in n.args}
                assert enlarged(nodes) & others & kernel.across <= later.exact
        kept = [name for k in kernels for name in k.keeps]
        assert len(set(kept)) == len(kept)


def test_what_a_carry_depends_on_is_wide_in_every_scan(specs: dict[str, str]) -> None:
    """The second memory's writes depend on what was read of the first: its rounding is enlarged, too."""
    _, found = planned(specs["taught"], {})
    first, second = scans(found.forward)
    (read,) = first.across
    assert read in second.exact
    own = {n for n in reachable([v for _, v in first.carried]) if is_product(n)}
    for_second = {n for n in reachable([read], first.given) if is_product(n)} - own
    assert for_second
    assert for_second <= first.wide


class Chain:
    """A program of two memories: x = S q, of which some function f goes into the next T, or into y."""

    def __init__(self) -> None:
        self.b = b = Builder(("i", "j", "k"))
        self.S, self.T = b.leaf("carry", "S", ("i", "j")), b.leaf("carry", "T", ("i", "k"))
        self.q, self.v = b.leaf("token", "q", ("t", "j")), b.leaf("token", "v", ("t", "k"))
        self.read = b.contract(self.S, self.q, {"j"})
        self.written = b.contract(self.later(self.read), self.later(self.q), {"s"})

    def later(self, x: Node) -> Node:
        return self.b.rename(x, "t", "s")

    def program(self, S: Node, T: Node, y: Node) -> Program:
        return Program("chunk", ("i", "j", "k"), self.b, {"y": y, "carry:T": T, "carry:S": S})

    def crossing(self, root: Node) -> dict[Node, bool]:
        under = {n: set(reachable([n])) for n in reachable([root])}
        return smallest_crossing([root], {n for n in under if self.S in under[n] and self.T not in under[n]}, FULL)


def test_chains_are_in_the_order_of_what_they_need() -> None:
    c = Chain()
    T = c.b.add(c.T, c.b.contract(c.later(c.read), c.later(c.v), {"s"}))
    S = c.b.add(c.S, c.written)
    program = c.program(S, T, c.b.contract(T, c.read, {"i"}))
    assert chains(program, "carry") == [("S",), ("T",)]
    first, second = walks(program, "carry", chains(program, "carry"), [program.outputs["y"]], FULL)
    assert first.across == second.given == (c.read,)
    assert not first.exact  # products alone take it
    assert not first.wanted
    assert second.wanted == (program.outputs["y"],)
    both = c.program(c.b.add(c.S, c.b.contract(T, c.b.contract(c.later(c.v), c.later(c.q), {"s"}), {"k"})), T, c.read)
    assert chains(both, "carry") == [("T", "S")]


def test_a_state_does_not_pass() -> None:
    c = Chain()
    T = c.b.add(c.T, c.b.contract(c.S, c.b.contract(c.later(c.q), c.later(c.v), {"s"}), {"j"}))
    program = c.program(c.b.add(c.S, c.S), T, c.b.contract(T, c.v, {"k"}))
    assert chains(program, "carry") == [("S",), ("T",)]
    (walk,) = walks(program, "carry", chains(program, "carry"), [program.outputs["y"]], FULL)
    assert set(walk.carried) == {"S", "T"}


def test_the_smallest_values_pass() -> None:
    c = Chain()
    f, size = c.b.map("tanh", c.read), c.b.sum(c.read, {"i"})
    assert c.crossing(c.b.contract(f, c.T, {"i"})) == {f: False}  # a product takes it
    assert c.crossing(c.b.contract(c.b.mul(f, c.read), c.T, {"i"})) == {c.b.mul(f, c.read): False}
    assert c.crossing(c.b.mul(c.b.contract(f, c.T, {"i"}), size)) == {c.read: False}  # rather than f and its sum
    own = c.b.contract(c.T, c.v, {"k"})
    larger = c.b.map("max", c.read, own)
    several = c.b.add(c.b.mul(f, own), larger)
    assert c.crossing(several) == {c.read: False}  # one value for two
    assert c.crossing(c.b.contract(c.b.map("exp2", larger), c.T, {"i"})) == {c.read: True}  # an exponent
    assert c.crossing(c.b.sum(c.b.map("exp2", c.read), {"i"})) == {c.b.sum(c.b.map("exp2", c.read), {"i"}): True}


# ---- kernels ----------------------------------------------------------------------------------------------------


SHAPES = (
    Shape("several chunks", batch=2, tokens=137, heads=2, dims=(6, 4, 5), cuts=(70,)),
    Shape("packed", dims=(20, 6, 17), lengths=(66, 0, 5)),
    Shape("no state", tokens=70, dims=(5,), state=False, final=False),
)
LAYERS = [
    *[("trellis", {}), ("trellis", {"b": 64}), ("gsa", {}), ("slots", {})],
    *[("taught", {"b": 16}), ("taught", {"b": 64})],  # whose y is read in the scan, and after it
]
of_layers = pytest.mark.parametrize(("name", "consts"), LAYERS)


def misses(name: str, consts: dict[str, float]) -> list[str]:
    torch.set_num_threads(1)
    rows = parity(ttmdsl.load(name, **consts), dtypes=(torch.float32,), shapes=SHAPES, backends=("triton",))
    assert rows
    return [f"{row.shape}: {row.quantity} {row.error:.1e}" for row in rows if not row.ok]


@pytest.mark.parametrize(("name", "consts"), mostly_beyond(LAYERS, ("gsa", {}), ("slots", {})))
def test_kernels_are_the_reference(
    specs: dict[str, str], name: str, consts: dict[str, float], interpreter: ProcessPoolExecutor
) -> None:
    assert interpreter.submit(misses, specs[name], consts).result() == []


def unrecorded(name: str, consts: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether what no backward pass may follow is what it may follow, to the bit."""
    torch.set_num_threads(1)
    module = ttmdsl.load(name, **consts)
    drawn = draw(module, Shape("", tokens=137, heads=2, dims=(6, 4, 5)))
    x = {key: t.to(dtype).requires_grad_() for key, t in drawn.x.items()}
    recorded, end = module.op(**x, output_final_state=True, backend="triton")
    with torch.no_grad():
        y, final = module.op(**x, output_final_state=True, backend="triton")
    assert recorded.requires_grad
    return torch.equal(y, recorded) and all(torch.equal(t, end[key]) for key, t in final.items())


@of_layers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pass_without_gradient_is_the_same(
    specs: dict[str, str],
    name: str,
    consts: dict[str, float],
    dtype: torch.dtype,
    interpreter: ProcessPoolExecutor,
) -> None:
    assert interpreter.submit(unrecorded, specs[name], consts, dtype).result()


@pytest.mark.parametrize(("name", "back"), [("slots", 1), ("gsa", 2)])
def test_several_scans_walk_in_parts(
    specs: dict[str, str], name: str, back: int, interpreter: ProcessPoolExecutor
) -> None:
    _, found = planned(specs.get(name, name), {})
    assert found.parts
    assert len(scans(found.forward)) == 2
    assert len(scans(found.backward)) == back
    parts, errors = interpreter.submit(parted, specs.get(name, name), (64 * 3 + 1, 64 * 4), True).result()
    assert max(parts) >= 3
    assert {k: e for k, e in errors.items() if not e < 1e-5} == {}


def test_what_the_backward_pass_does_not_take_is_let_go_of() -> None:
    """What passes between the kernels of a forward pass alone is no part of what autograd keeps."""
    text = Path(str(ttmdsl.load("gsa").__file__)).read_text(encoding="utf-8")
    _, found = planned("gsa", {})
    taken = {n for k in found.backward for n in k.given}
    passing = {n for k in found.forward for n in k.saves if n not in taken}
    assert passing
    launch = text.split("def _chunk_launch_forward")[1].split("return factors")[0]
    assert launch.count("del saved[") == len(passing)
