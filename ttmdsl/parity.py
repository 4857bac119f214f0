"""Parity: every backend of a generated module against its reference, outputs, final states and all gradients.

Input: a generated module (or anything with its surface). Output: one `Row` for each quantity compared, and a table of
them. Compares numbers only: it measures no time, prints nothing, and knows no layer.

The reference runs in float64, on the same values that the backend gets after rounding to its dtype. Every quantity is
compared by its relative RMS error. Where a quantity is much smaller than its family (all gradients of a run, or its
output and states), what counts is the error relative to a fraction of the family: a gradient that is zero by symmetry
is rounding noise, in any backend. Rates at which the recurrence itself diverges say nothing of a backend: where the
reference in float32, or at inputs that are off by half a unit in their last place, is far from the reference in
float64, the draw is repeated with smaller gates and params. What the reference still loses then by float32 alone, a
backend in float32 may lose too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ttmdsl.spec import FeatureDim

if TYPE_CHECKING:
    from rich.table import Table

Tensors: TypeAlias = dict[str, Tensor]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}

_COUNTS = ("final position", "final tokens")

# What gates and params are multiplied by, the first at which the reference is well-conditioned. Decays stay.
_CALMER = (1.0, 1 / 4, 1 / 16, 1 / 64)

# An error of the reference in float32 that says nothing any more.
_HOPELESS = 1e-2

# The fraction of its family's RMS below which a quantity counts as zero.
_NOTHING = {torch.float64: 1e-5, torch.float32: 3e-2, torch.bfloat16: 1e-1, torch.float16: 1e-1}


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of one backend: y, `final S`, `grad k`, `grad initial S`."""

    backend: str
    dtype: str
    shape: str
    quantity: str
    error: float
    tolerance: float
    ok: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes to compare at. `dims` are handed out to the layer's dims in order, and then over again.

    `cuts`: the sequence is fed in pieces that end there. `lengths`: sequences of those lengths, packed along T; `batch`
    and `tokens` do not count then. `state`: whether an initial state is given (it is in any case where the layer's
    inputs do not tell its size).
    """

    label: str
    batch: int = 1
    tokens: int = 1
    heads: int = 1
    dims: tuple[int, ...] = (8,)
    cuts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    state: bool = True


SHAPES = (
    Shape("T=1", batch=2, tokens=1, dims=(8, 4)),
    Shape("T=5, shorter than a chunk", batch=2, tokens=5, heads=2, dims=(4, 8)),
    Shape("T=67, from the default state", tokens=67, heads=2, dims=(16, 8), state=False),
    Shape("T=33, dims 60 and 24", batch=1, tokens=33, dims=(60, 24)),
    Shape("T=37, cut at 5 and 22", batch=2, tokens=37, dims=(8, 16), cuts=(5, 22)),
    Shape("packed 9+0+1+23", heads=2, dims=(8, 8, 4), lengths=(9, 0, 1, 23)),
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """`op`'s tensors by keyword, the initial state, and the bounds of packed sequences."""

    x: Tensors
    state: Tensors | None
    bounds: tuple[int, ...] = ()


# ---- drawing inputs -----------------------------------------------------------------------------------------------


def dims_of(module: Any) -> dict[str, int]:
    """The layer's dims in order of appearance, with the size that a constant fixes, or 0."""
    shapes = [*module.INPUTS.values(), *module.GATES.values(), *module.PARAMS.values(), *module.MEMORY.values()]
    return {dim: int(module.CONSTS.get(dim, 0)) for shape in shapes for dim in shape}


def sizes_of(module: Any, dims: Sequence[int]) -> dict[str, int]:
    """Sizes for the layer's dims: from `dims` in order, columns no more than rows where they are orthonormal."""
    sizes, free = {}, 0
    made = getattr(module, "FEATURES", {})
    for dim, fixed in dims_of(module).items():
        if dim not in made:
            sizes[dim] = fixed or dims[free % len(dims)]
            free += not fixed
    for name, (rows, columns) in module.MEMORY.items():
        if module.INITIAL[name] == "orthonormal" and sizes[columns] > sizes[rows]:
            sizes[rows], sizes[columns] = sizes[columns], sizes[rows]
    for dim, (base, kind, order) in made.items():
        sizes[dim] = FeatureDim(base, kind, order).size(sizes[base])
    return sizes


def draw(
    module: Any, shape: Shape, *, dtype: torch.dtype = torch.float64, seed: int = 0, strength: float = 1.0
) -> Drawn:
    """Tensors for `op` on the CPU: vectors of about unit length, gates in their ranges, a state like the declared.

    `strength` multiplies gates, params and momenta, decays left out.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = sizes_of(module, shape.dims)

    def normal(*lead: int, axes: Iterable[str]) -> Tensor:
        # an axis of the state that is a number is the length of a past
        shape = (int(axis) if axis.isdigit() else sizes[axis] for axis in axes)
        return torch.randn(*lead, *shape, generator=generator, dtype=torch.float64)

    bounds = [0]
    for length in shape.lengths:
        bounds.append(bounds[-1] + length)
    lead = (1, bounds[-1], shape.heads) if shape.lengths else (shape.batch, shape.tokens, shape.heads)
    x = {key: normal(*lead, axes=axes) for key, axes in module.INPUTS.items()}
    x = {key: t / math.sqrt(t.shape[-1]) if t.dim() > 3 else t for key, t in x.items()}
    gates = {key: normal(*lead, axes=axes) for key, axes in module.GATES.items()}
    params = {key: normal(shape.heads, axes=axes) for key, axes in module.PARAMS.items()}
    for key, t in (gates | params).items():
        x[key] = in_range(t, module.RANGES[key]) * (1.0 if module.RANGES[key] == "decay" else strength)

    told = {dim for axes in (*module.INPUTS.values(), *module.GATES.values(), *module.PARAMS.values()) for dim in axes}
    told |= set(getattr(module, "FEATURES", {}))
    needed = any(dim not in told for axes in module.MEMORY.values() for dim in axes)
    state: Tensors | None = None
    if any("L" in axes for axes in module.STATE.values()):
        state = _grown(module, shape, dtype, seed, strength) if shape.state else None
    elif shape.state or needed:
        number = len(shape.lengths) or lead[0]
        state = {}
        for key, axes in module.STATE.items():
            if key == "position":
                state[key] = torch.arange(number) % 2
                continue
            if key == "tokens":
                state[key] = torch.arange(1, number + 1) % 4
                continue
            drawn = normal(number, shape.heads, axes=axes)
            if key.endswith("_past"):
                state[key] = in_range(drawn, module.RANGES[key.removesuffix("_past")]) * strength / 2
            elif key.endswith("_momentum"):  # a sum of past steps, small as they are
                state[key] = _memory(drawn, "zero") * strength / 4
            elif key.endswith("_inverse"):  # of a sum of squares
                square = drawn @ drawn.mT / drawn.shape[-1]
                state[key] = torch.linalg.inv(square + torch.eye(drawn.shape[-1], dtype=drawn.dtype))
            else:
                state[key] = _memory(drawn, module.INITIAL[key.removesuffix("_point")])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Drawn(
        {key: t.to(dtype) for key, t in x.items()},
        state and {key: t.to(wide) if t.is_floating_point() else t for key, t in state.items()},
        tuple(bounds) if shape.lengths else (),
    )


def _grown(module: Any, shape: Shape, dtype: torch.dtype, seed: int, strength: float) -> Tensors:
    """A state of keys and coefficients: what a few tokens leave behind, a different number in each sequence."""
    lengths = tuple(2 + n % 3 for n in range(len(shape.lengths) or shape.batch))
    before = draw(module, replace(shape, lengths=lengths, state=False), dtype=dtype, seed=seed + 1, strength=strength)
    _, final = _by_oracle(module, before, "reference")
    return {key: t.detach() for key, t in final.items()}


def in_range(t: Tensor, kind: str) -> Tensor:
    """Real numbers brought into a gate's range; a decay as its logarithm, mostly near 0."""
    match kind:
        case "decay":
            return torch.nn.functional.logsigmoid(t + 3)
        case "unit":
            return torch.sigmoid(t)
        case "positive":
            return torch.nn.functional.softplus(t)
        case "real":
            return t
        case _:
            raise ValueError(f"unknown range {kind!r}")


def _memory(t: Tensor, initial: str) -> Tensor:
    match initial:
        case "orthonormal":
            return torch.nn.functional.normalize(t, dim=-2)
        case "uniform":
            return torch.softmax(t, -1)
        case "zero":
            return t / math.sqrt(t.shape[-1])
        case _:
            raise ValueError(f"unknown initial state {initial!r}")


# ---- running --------------------------------------------------------------------------------------------------------


def _whole(module: Any, x: Tensors, state: Tensors | None, backend: str) -> tuple[Tensor, Tensors]:
    y, final = module.op(**x, initial_state=state, output_final_state=True, backend=backend)
    return y, final


def _span(module: Any, x: Tensors, start: int, end: int) -> Tensors:
    return {key: t if key in module.PARAMS else t[:, start:end] for key, t in x.items()}


def _by_oracle(module: Any, drawn: Drawn, oracle: str) -> tuple[Tensor, Tensors]:
    """The whole of it, or each packed sequence by itself."""
    if not drawn.bounds:
        return _whole(module, drawn.x, drawn.state, oracle)
    ys, finals = [], []
    for n, (start, end) in enumerate(pairwise(drawn.bounds)):
        state = drawn.state and {key: t[n : n + 1] for key, t in drawn.state.items()}
        y, final = _whole(module, _span(module, drawn.x, start, end), state, oracle)
        ys.append(y)
        finals.append(final)
    return torch.cat(ys, 1), {key: _stacked([final[key] for final in finals]) for key in finals[0]}


def _stacked(entries: Sequence[Tensor]) -> Tensor:
    """One entry of several states; where they hold different numbers of tokens, zeros come before the fewer."""
    if entries[0].dim() < 3:
        return torch.cat(list(entries))
    most = max(entry.shape[2] for entry in entries)
    padded = (torch.nn.functional.pad(e, (*(0, 0) * (e.dim() - 3), most - e.shape[2], 0)) for e in entries)
    return torch.cat(list(padded))


def _by_backend(module: Any, drawn: Drawn, shape: Shape, backend: str) -> tuple[Tensor, Tensors]:
    """In pieces, each from the state that the last one left; packed sequences in one call."""
    if drawn.bounds:
        bounds = torch.tensor(drawn.bounds, device=next(iter(drawn.x.values())).device)
        y, final = module.op(
            **drawn.x, initial_state=drawn.state, output_final_state=True, cu_seqlens=bounds, backend=backend
        )
        return y, final
    ys, state = [], drawn.state
    for start, end in zip((0, *shape.cuts), (*shape.cuts, shape.tokens), strict=True):
        y, state = _whole(module, _span(module, drawn.x, start, end), state, backend)
        ys.append(y)
    assert state is not None
    return torch.cat(ys, 1), state


def _leaves(drawn: Drawn, dtype: torch.dtype | None, device: torch.device) -> Drawn:
    """The same values as leaves of a graph, all of one dtype where one is given."""

    def leaf(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t.to(device)
        return t.detach().to(device=device, dtype=dtype or t.dtype, copy=True).requires_grad_()

    state = drawn.state and {key: leaf(t) for key, t in drawn.state.items()}
    return Drawn({key: leaf(t) for key, t in drawn.x.items()}, state, drawn.bounds)


def _quantities(drawn: Drawn, y: Tensor, final: Tensors, seed: int) -> dict[str, dict[str, Tensor]]:
    """Values and gradients by name, in float64; the loss is one random cotangent for y and each final state."""
    generator = torch.Generator().manual_seed(seed)
    values = {"y": y} | {f"final {key}": t for key, t in sorted(final.items())}
    loss = torch.zeros((), dtype=torch.float64, device=y.device)
    for t in values.values():
        if t.is_floating_point():
            weight = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(y.device)
            loss = loss + (t.double() * weight).sum()
    leaves = {f"grad {key}": t for key, t in drawn.x.items()}
    leaves |= {f"grad initial {key}": t for key, t in (drawn.state or {}).items() if t.is_floating_point()}
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    grads = {key: torch.zeros_like(t) if g is None else g for (key, t), g in zip(leaves.items(), found, strict=True)}
    return {
        "values": {key: t.detach().double() for key, t in values.items()},
        "gradients": {key: t.detach().double() for key, t in grads.items()},
    }


# ---- comparing ------------------------------------------------------------------------------------------------------


def _rms(t: Tensor) -> float:
    return float(t.square().mean().sqrt()) if t.numel() else 0.0


def _error(got: Tensor, expected: Tensor, least: float) -> float:
    if got.shape != expected.shape:
        return math.inf
    difference = _rms(got - expected)
    if difference == 0:
        return 0.0
    return difference / max(_rms(expected), least) if max(_rms(expected), least) > 0 else math.inf


def _rows(
    backend: str,
    dtype: torch.dtype,
    shape: Shape,
    got: Mapping[str, Tensors],
    expected: Mapping[str, Tensors],
    lost: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[Row]:
    for family, wanted in expected.items():
        # what counts tokens is compared exactly: it says nothing of the other values' scale
        scale = max((_rms(t) for key, t in wanted.items() if key not in _COUNTS), default=0.0)
        least = _NOTHING[dtype] * scale
        for key in {**wanted, **got[family]}:
            both = key in wanted and key in got[family]
            error = _error(got[family][key], wanted[key], least) if both else math.inf
            most = _tolerance(dtype, key, lost)
            yield Row(backend, str(dtype).removeprefix("torch."), shape.label, key, error, most, error <= most)


def _steady(
    module: Any, shape: Shape, dtype: torch.dtype, device: torch.device, oracle: str, seed: int
) -> tuple[Drawn, dict[str, Tensors], dict[str, float]]:
    """The draw to compare at, what the oracle makes of it in float64, and what float32 costs the oracle itself.

    A recurrence that diverges says nothing of a backend: gates are made smaller until what the oracle loses by itself,
    in float32 and by inputs that are off by half a unit in the dtype's last place, stays within the tolerance.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    most = TOLERANCES[dtype] / 2 if half else TOLERANCES[torch.float32]
    found: list[tuple[float, int, tuple[Drawn, dict[str, Tensors], dict[str, float]]]] = []
    for strength in _CALMER:
        drawn = draw(module, shape, dtype=dtype, seed=seed, strength=strength)
        exact = _leaves(drawn, torch.float64, device)
        expected = _quantities(exact, *_by_oracle(module, exact, oracle), seed)
        others = [] if half else [_leaves(drawn, torch.float32, device)]
        if dtype != torch.float64:  # float32 by itself may be lucky
            others.append(_leaves(_disturbed(drawn, dtype, seed), torch.float64, device))
        lost: dict[str, float] = {}
        for given in others:
            other = _quantities(given, *_by_oracle(module, given, oracle), seed)
            for row in _rows(oracle, dtype if half else torch.float32, shape, other, expected):
                error = row.error if row.error == row.error else math.inf
                lost[row.quantity] = max(error, lost.get(row.quantity, 0.0))
        found.append((max(lost.values()), len(found), (drawn, expected, {} if half else lost)))
        if found[-1][0] <= most:
            break
    return min(found)[2]


def _disturbed(drawn: Drawn, dtype: torch.dtype, seed: int) -> Drawn:
    """The same values, in float64, each off by up to half a unit in the last place of the dtype."""
    generator = torch.Generator().manual_seed(seed + 1)

    def off(t: Tensor) -> Tensor:
        noise = torch.rand(t.shape, generator=generator, dtype=torch.float64) - 0.5
        return t.double() * (1 + torch.finfo(dtype).eps * noise) if t.is_floating_point() else t

    state = drawn.state and {key: off(t) for key, t in drawn.state.items()}
    return Drawn({key: off(t) for key, t in drawn.x.items()}, state, drawn.bounds)


def _tolerance(dtype: torch.dtype, key: str, lost: Mapping[str, float]) -> float:
    """An error of a few times what float32 costs the reference itself is no fault of a backend in float32."""
    if key in _COUNTS:
        return 0.0
    own = 0.0 if dtype == torch.float64 else 4 * lost.get(key, 0.0)
    return max(TOLERANCES[dtype], own if own < _HOPELESS else 0.0)


def _kernels_take(module: Any, shape: Shape) -> bool:
    """Whether the kernels have room for the layer's feature maps at this size; where not, "auto" takes torch."""
    made = getattr(module, "FEATURES", {})
    interpreted = "triton" in available(module, torch.device("cpu"))
    return interpreted or not made or max(sizes_of(module, shape.dims)[name] for name in made) <= module._MOST_FEATURES


def available(module: Any, device: torch.device) -> tuple[str, ...]:
    """The backends that can run on the device: triton on a GPU, or where Triton interprets its kernels."""
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    return ("torch", "triton") if device.type == "cuda" or interpreted else ("torch",)


def parity(
    module: Any,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
    shapes: Sequence[Shape] | None = None,
    backends: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    oracle: str = "reference",
) -> list[Row]:
    """Compare backends with the reference; by default all that can run here, on a GPU if there is one.

    `oracle="torch"` takes the torch backend's float64 for the reference, which is too slow for long sequences.

    Triton takes no float64, so it is compared in the other dtypes only.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    backends = available(module, device) if backends is None else backends
    rows: list[Row] = []
    for number, shape in enumerate(SHAPES if shapes is None else shapes):
        for dtype in dtypes:
            drawn, expected, lost = _steady(module, shape, dtype, device, oracle, seed + number)
            for backend in backends:
                if backend == "triton" and (dtype == torch.float64 or not _kernels_take(module, shape)):
                    continue
                leaves = _leaves(drawn, None, device)
                try:
                    got = _quantities(leaves, *_by_backend(module, leaves, shape, backend), seed + number)
                except Exception as error:
                    raise RuntimeError(f"{backend}, {dtype}, {shape.label}: {type(error).__name__}: {error}") from error
                rows.extend(_rows(backend, dtype, shape, got, expected, lost))
    return rows


def table(rows: Sequence[Row], title: str = "") -> Table:
    """The worst error of every quantity over all shapes, a column for each backend and dtype; misses in red."""
    from rich.table import Table

    columns = list(dict.fromkeys((row.backend, row.dtype) for row in rows))
    out = Table(title=title or None)
    out.add_column("relative RMS error")
    for backend, dtype in columns:
        out.add_column(f"{backend} {dtype}", justify="right")
    for quantity in dict.fromkeys(row.quantity for row in rows):
        cells = []
        for column in columns:
            found = [row for row in rows if row.quantity == quantity and (row.backend, row.dtype) == column]
            cells.append(_cell(found))
        out.add_row(quantity, *cells)
    return out


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    worst = max(rows, key=lambda row: (not row.ok, math.inf if math.isnan(row.error) else row.error))
    return f"{worst.error:.1e}" if worst.ok else f"[bold red]{worst.error:.1e} MISS[/]"
