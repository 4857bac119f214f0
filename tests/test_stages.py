"""The sequential form in stages: together they are the token's program; each takes what it may, and leaves the rest."""

from __future__ import annotations

import pytest
import torch
from ir_eval import Interpreter
from test_lower import lowered, shipped
from test_random_specs import FOUND
from torch import Tensor

from ttmdsl.ir import Node, Program, verify
from ttmdsl.stages import Stages, stages

SIZES = {"d": 3, "h": 4, "d_k": 3, "d_v": 2, "m": 4, "c": 4}
T, BATCH = 4, 4
NAMES = ("atlas", "atlas_linear", "atlas_pp", *(name for name in FOUND if "in stages" in name))


def staged(name: str) -> tuple[Program, Stages]:
    layer = lowered(FOUND[name]) if name in FOUND else shipped(name, b=BATCH)
    found = stages(layer.token, layer.batch)
    assert found is not None
    return layer.token.forward, found


def programs(s: Stages) -> list[Program]:
    all_stages = [*([s.vectors] if s.vectors else []), s.writes, *s.turns, s.reads]
    return [p for stage in all_stages for p in (stage.forward, stage.backward)]


class Run:
    """A unit's tokens by a program for each: tensors and states are drawn once, by role and name."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn: dict[tuple[str, str, int], Tensor] = {}

    def leaf(self, n: Node, token: int) -> Tensor:
        """A leaf that is given: of one token, or all rows of a chunk's."""
        if "t" in n.axes:
            return torch.stack([self.one(n, i, n.axes[1:]) for i in range(T)])
        return self.one(n, token if n.role == "token" else 0, n.axes)

    def one(self, n: Node, token: int, axes: tuple[str, ...]) -> Tensor:
        key = (n.role, n.name, token)
        if key not in self.drawn:
            x = 0.5 * torch.randn([SIZES[a.rstrip("'")] for a in axes], generator=self.generator, dtype=torch.float64)
            self.drawn[key] = (x - 1.0 if n.name.startswith("log_") else x).requires_grad_()
        return self.drawn[key]

    def values(self, program: Program, given: dict[tuple[str, str], Tensor], token: int = 0) -> dict[str, Tensor]:
        leaves = {n: given.get((n.role, n.name)) for n in program.leaves()}
        leaves = {n: self.leaf(n, token) if x is None else x for n, x in leaves.items()}
        evaluate = Interpreter(leaves, {**SIZES, "t": T})
        return {k: evaluate(v) for k, v in program.outputs.items()}


def whole(run: Run, program: Program) -> tuple[list[Tensor], dict[str, Tensor]]:
    """y of every token and the states at the end, token by token; the first one begins a group."""
    ys, state = [], {}
    for i in range(T):
        flags = {("fresh", n.name): torch.tensor(float(i == 0)) for n in program.leaves() if n.role == "fresh"}
        out = run.values(program, {**flags, **{("carry", k): v for k, v in state.items()}}, i)
        ys.append(out["y"])
        state = {k[6:]: v for k, v in out.items() if k.startswith("carry:")}
    return ys, state


def by_stages(run: Run, program: Program, s: Stages) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same, each stage for all tokens before the next."""
    state = {n.name: run.leaf(n, 0) for n in program.carries()}
    state |= {point: state[memory] for point, memory in s.frozen.items()}  # a group begins

    def now() -> dict[tuple[str, str], Tensor]:
        return {("carry", k): v for k, v in state.items()}

    found: list[dict[str, Tensor]] = [{} for _ in range(T)]
    if s.vectors:
        rows = run.values(s.vectors.forward, now())
        for i in range(T):
            found[i] |= {k: v[i] for k, v in rows.items() if not k.startswith("carry:")}
    for stage in (s.writes, *s.turns, s.reads):
        for i in range(T):
            out = run.values(stage.forward, now() | {("saved", k): v for k, v in found[i].items()}, i)
            found[i] |= {k: v for k, v in out.items() if not k.startswith("carry:")}
            state |= {k[6:]: v for k, v in out.items() if k.startswith("carry:")}
    return [f["y"] for f in found], state


@pytest.mark.parametrize("name", NAMES)
def test_together_they_are_the_tokens_program(name: str) -> None:
    program, s = staged(name)
    run = Run()
    expected, found = whole(run, program), by_stages(run, program, s)
    for one, other in zip(expected[0], found[0], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-10)
    for k, v in expected[1].items():
        torch.testing.assert_close(found[1][k], v, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_what_each_stage_takes(name: str) -> None:
    _, s = staged(name)
    for program in programs(s):
        verify(program)
        assert not [n for n in program.leaves() if n.role == "fresh"]
    for stage in (s.writes, s.reads, *([s.vectors] if s.vectors else [])):
        assert not [n for p in (stage.forward, stage.backward) for n in p.nodes if n.op.startswith("newton_schulz")]
    assert all(point == f"{memory}_point" for point, memory in s.frozen.items())
    # whatever a stage is given, an earlier one has left
    left = {k for p in programs(s) for k in p.outputs if not k.startswith("carry:")}
    given = {n.name for p in programs(s) for n in p.leaves() if n.role == "saved"}
    assert given <= {k.replace("d:", "d_") for k in left}
    # one kernel alone stores a tensor's gradient
    gradients = [k for p in programs(s) for k in p.outputs if k.startswith("d:")]
    assert len(gradients) == len(set(gradients))


def test_vectors_leave_the_point_to_no_walk() -> None:
    _, s = staged("atlas")
    assert s.vectors
    assert s.vectors.forward.inner == "h"
    assert not [n for n in s.writes.forward.carries() if n.name in s.frozen]


def test_a_point_that_a_token_takes_itself_has_its_cotangent_there() -> None:
    _, s = staged("momenta turned in stages, a point that its own norm pulls at")
    assert "S_point" in {n.name for n in s.writes.forward.carries()}
    end = s.writes.backward.ends()["S_point"]
    assert end.op == "add"
    assert any(n.role == "cocarry" and n.name == "S_point" for n in s.writes.backward.leaves())


@pytest.mark.parametrize(("name", "consts"), [("atlas", {"b": 1}), ("ttt_mlp", {}), ("lattice_dec", {"b": 4})])
def test_others_have_none(name: str, consts: dict[str, float]) -> None:
    assert stages(shipped(name, **consts).token, int(consts.get("b", 1))) is None


def test_kernels_are_started_unit_by_unit() -> None:
    """Forward and backward each start their kernels once for every unit, and a unit is no longer than a group."""
    from ttmdsl.emit_triton import write_staged

    texts = write_staged(lowered(FOUND["momenta turned in stages, a softmax of a deep memory"]))
    assert texts is not None
    kinds = [k.kind for k in texts.forward]
    assert kinds == ["unit", "walk", "turn", "turn", "walk"]
    assert [k.kind for k in texts.backward] == [*kinds, "walk", "turn", "turn", "walk", "unit"]
    assert len({k.name for k in texts.kernels()}) == len(texts.kernels())
    assert all(k.arguments[0].name == "step_ptr" for k in texts.kernels())
    assert set(texts.states) == {"W1", "W2", "W1_momentum", "W2_momentum"}
