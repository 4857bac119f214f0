"""Parity: every backend of a generated module against its reference, outputs, final states and all gradients.

Input: a generated module (or anything with its surface). Output: one `Row` for each quantity compared, and a table of
them. Compares numbers only: it measures no time, prints nothing, and knows no layer.

The reference runs in float64, on the same values that the backend gets after rounding to its dtype. Every quantity is
compared by its relative RMS error. Where a quantity is much smaller than its family (all gradients of a run, or its
output and states), what counts is the error relative to a fraction of the family: a gradient that is zero by symmetry
is rounding noise, in any backend. Rates at which the recurrence itself diverges say nothing of a backend: where the
reference in float32, or at inputs that are off by half a unit in their last place, is far from the reference in
float64, the draw is repeated with smaller gates and params, at last with decays near 1. What the reference still loses
then by float32 alone, a backend in float32 may lose too.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ttmdsl.drawing import Drawn, Shape, Tensors, draw, kernels_hold, sizes_of
from ttmdsl.interpreted import interpreted, rounded

if TYPE_CHECKING:
    from rich.table import Table

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}

_COUNTS = ("final position", "final tokens")

# What gates and params, and the logarithms of decays, are multiplied by: the first at which the reference is
# well-conditioned. Decays stay but at last, for memories of which nothing is left where they have faded.
_CALMER = ((1.0, 1.0), (1 / 4, 1.0), (1 / 16, 1.0), (1 / 64, 1.0), (1 / 64, 1 / 256))

# What cotangents are drawn in: they are inputs, too, and numbers in half precision and in double must be the same.
_COTANGENTS = torch.bfloat16

# An error of the reference in float32 that says nothing any more.
_HOPELESS = 1e-2

# The fraction of its family's RMS below which a quantity counts as zero.
_NOTHING = {torch.float64: 1e-5, torch.float32: 3e-2, torch.bfloat16: 1e-1, torch.float16: 1e-1}


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of one backend: y, `final S`, `grad k`, `grad initial S`.

    `lost`: the oracle's own error at inputs that are off by half a unit in their last place, or in float32.
    """

    backend: str
    dtype: str
    shape: str
    quantity: str
    error: float
    tolerance: float
    ok: bool
    lost: float = 0.0


SHAPES = (
    Shape("T=1", batch=2, tokens=1, dims=(8, 4)),
    Shape("T=5, shorter than a chunk", batch=2, tokens=5, heads=2, dims=(4, 8)),
    Shape("T=67, from the default state", tokens=67, heads=2, dims=(16, 8), state=False),
    Shape("T=33, dims 60 and 24", batch=1, tokens=33, dims=(60, 24)),
    Shape("T=37, cut at 5 and 22", batch=2, tokens=37, dims=(8, 16), cuts=(5, 22)),
    Shape("packed 9+0+1+23", heads=2, dims=(8, 8, 4), lengths=(9, 0, 1, 23)),
)


# ---- running --------------------------------------------------------------------------------------------------------


def _whole(
    module: Any, x: Tensors, state: Tensors | None, backend: str, final: bool = True, **packed: Tensor
) -> tuple[Tensor, Tensors]:
    """y and the final state, which is empty where it is not asked for."""
    y, end = module.op(**x, initial_state=state, output_final_state=final, backend=backend, **packed)
    return y, end or {}


def _span(module: Any, x: Tensors, start: int, end: int) -> Tensors:
    return {key: t if key in module.PARAMS else t[:, start:end] for key, t in x.items()}


def _by_oracle(module: Any, drawn: Drawn, shape: Shape, oracle: str) -> tuple[Tensor, Tensors]:
    """The whole of it, or each packed sequence by itself."""
    if not drawn.bounds:
        return _whole(module, drawn.x, drawn.state, oracle, shape.final)
    ys, finals = [], []
    for n, (start, end) in enumerate(pairwise(drawn.bounds)):
        state = drawn.state and {key: t[n : n + 1] for key, t in drawn.state.items()}
        y, final = _whole(module, _span(module, drawn.x, start, end), state, oracle, shape.final)
        ys.append(y)
        finals.append(final)
    return torch.cat(ys, 1), {key: _stacked([final[key] for final in finals]) for key in finals[0]}


def _expected(module: Any, draws: Sequence[Drawn], shape: Shape, oracle: str, seed: int) -> list[dict[str, Tensors]]:
    """What the oracle makes of draws of one dtype. The reference goes token by token, which takes hardly longer for
    more heads: all draws are heads of one run."""
    if oracle != "reference":
        return [_quantities(drawn, *_by_oracle(module, drawn, shape, oracle), seed) for drawn in draws]
    first, number = draws[0], len(draws)

    def joined(tensors: Sequence[Tensor], heads: int) -> Tensor:
        return torch.cat(list(tensors), heads) if tensors[0].dim() > heads else tensors[0]

    x = {key: joined([d.x[key] for d in draws], 0 if key in module.PARAMS else 2) for key in first.x}
    state = first.state and {key: joined([d.state[key] for d in draws if d.state], 1) for key in first.state}
    y, final = _by_oracle(module, Drawn(x, state, first.bounds), shape, oracle)
    ends = {key: t.chunk(number, 1) if t.dim() > 1 else (t,) * number for key, t in final.items()}
    parts = ((part, {key: t[i] for key, t in ends.items()}) for i, part in enumerate(y.chunk(number, 2)))
    return _quantities_of([(drawn, *part) for drawn, part in zip(draws, parts, strict=True)], seed)


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
        return _whole(module, drawn.x, drawn.state, backend, shape.final, cu_seqlens=bounds)
    ys, state = [], drawn.state
    for start, end in zip((0, *shape.cuts), (*shape.cuts, shape.tokens), strict=True):
        final = shape.final or end < shape.tokens
        y, state = _whole(module, _span(module, drawn.x, start, end), state, backend, final)
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


def _quantities(drawn: Drawn, y: Tensor, final: Tensors, seed: int) -> dict[str, Tensors]:
    """Values and gradients by name, in float64; the loss is one random cotangent for y and each final state."""
    return _quantities_of([(drawn, y, final)], seed)[0]


def _quantities_of(runs: Sequence[tuple[Drawn, Tensor, Tensors]], seed: int) -> list[dict[str, Tensors]]:
    """The same of several runs, in one backward pass: what they share of it is walked through once."""
    values = [{"y": y} | {f"final {key}": t for key, t in sorted(final.items())} for _, y, final in runs]
    loss = torch.zeros((), dtype=torch.float64, device=runs[0][1].device)
    for found in values:
        generator = torch.Generator().manual_seed(seed)
        for t in found.values():
            if t.is_floating_point():
                weight = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(_COTANGENTS)
                loss = loss + (t.double() * weight.to(t.device)).sum()
    leaves: dict[tuple[int, str], Tensor] = {}
    for i, (drawn, _, _) in enumerate(runs):
        leaves |= {(i, f"grad {key}"): t for key, t in drawn.x.items()}
        leaves |= {(i, f"grad initial {key}"): t for key, t in (drawn.state or {}).items() if t.is_floating_point()}
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients: list[Tensors] = [{} for _ in runs]
    for ((i, key), t), g in zip(leaves.items(), grads, strict=True):
        gradients[i][key] = (torch.zeros_like(t) if g is None else g).detach().double()
    return [
        {"values": {key: t.detach().double() for key, t in found.items()}, "gradients": gradients[i]}
        for i, found in enumerate(values)
    ]


# ---- comparing ------------------------------------------------------------------------------------------------------


def rms(t: Tensor) -> float:
    """The root of the mean square, of values whose squares float32 does not hold, too; 0 where there is nothing."""
    return float(t.double().square().mean().sqrt()) if t.numel() else 0.0


def relative_error(got: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """The RMS of the difference over that of what is expected, which counts for `least` at least."""
    if got.shape != expected.shape:
        return math.inf
    difference = rms(got - expected)
    if difference == 0:
        return 0.0
    return difference / max(rms(expected), least) if max(rms(expected), least) > 0 else math.inf


def step_errors(module: Any, drawn: Drawn, backend: str, device: torch.device | str = "cpu") -> dict[str, float]:
    """By how much steps over the drawn tokens, one after the other, differ without gradients, as decoding takes them,
    from the same with: of y and of every entry of the state, the largest difference over the largest number."""
    start = {k: t.detach().to(device) for k, t in (drawn.state or {}).items()}
    starts, worst = {False: start, True: start}, dict.fromkeys(("y", *module.STATE), 0.0)
    for i in range(drawn.x[next(k for k in drawn.x if k not in module.PARAMS)].shape[1]):
        found = {}
        for recorded, state in starts.items():
            x = {k: (t if k in module.PARAMS else t[:, i]).detach().to(device) for k, t in drawn.x.items()}
            x = {k: t.clone().requires_grad_(recorded) for k, t in x.items()}
            y, end = module.step(**x, initial_state=state or None, backend=backend)
            assert y.requires_grad == recorded
            found[recorded] = {"y": y.detach(), **{k: t.detach() for k, t in end.items()}}
        for k in worst:
            alone, expected = found[False][k].double(), found[True][k].double()
            if alone.numel():
                error = float((alone - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
                worst[k] = max(worst[k], error) if error == error else math.inf
        starts = {recorded: {k: t for k, t in ends.items() if k != "y"} for recorded, ends in found.items()}
    return worst


def family_errors(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """The relative error of every quantity of a family, by name, where `dtype` is that of the inputs; infinite where
    there is only one of both."""
    # what counts tokens is compared exactly: it says nothing of the other values' scale
    scale = max((rms(t) for key, t in expected.items() if key not in _COUNTS), default=0.0)
    least, both = _NOTHING[dtype] * scale, got.keys() & expected.keys()
    names = {**expected, **got}
    return {key: relative_error(got[key], expected[key], least) if key in both else math.inf for key in names}


def _rows(
    backend: str,
    dtype: torch.dtype,
    shape: Shape,
    got: Mapping[str, Tensors],
    expected: Mapping[str, Tensors],
    lost: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[Row]:
    for family, wanted in expected.items():
        for key, error in family_errors(got[family], wanted, dtype).items():
            most = _tolerance(dtype, key, lost)
            name = str(dtype).removeprefix("torch.")
            yield Row(backend, name, shape.label, key, error, most, error <= most, lost.get(key, 0.0))


_Steady = tuple[Drawn, dict[str, Tensors], dict[str, float]]


def steady(
    module: Any,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str,
    oracle: str = "reference",
    seed: int = 0,
    kept: Path | None = None,
) -> _Steady:
    """What `_steady` finds; `kept` is a folder, from which it is taken where it has been found before."""
    device, how = torch.device(device), (oracle, seed)
    if kept is None:
        return _steady(module, shape, dtype, device, *how)
    key = repr((module.SPEC, module.CONSTS, _CALMER, _COTANGENTS, shape, dtype, how))
    file = kept / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.pt"
    if not file.exists():
        kept.mkdir(parents=True, exist_ok=True)
        drawn, expected, lost = _steady(module, shape, dtype, device, *how)
        partial = file.with_suffix(f".{os.getpid()}")
        torch.save((drawn.x, drawn.state, drawn.bounds, expected, lost), partial)
        partial.replace(file)
    x, state, bounds, expected, lost = torch.load(file, map_location="cpu", weights_only=True)
    moved = {family: {key: t.to(device) for key, t in found.items()} for family, found in expected.items()}
    return Drawn(x, state, bounds), moved, lost


def _steady(module: Any, shape: Shape, dtype: torch.dtype, device: torch.device, oracle: str, seed: int) -> _Steady:
    """The draw to compare at, what the oracle makes of it in float64, and what rounding costs the oracle itself.

    A recurrence that diverges says nothing of a backend: gates are made smaller until what the oracle loses by inputs
    that are off by half a unit in the last place, and in float32 if that is the dtype, stays within the tolerance.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    most = TOLERANCES[dtype] / 2 if half else TOLERANCES[torch.float32]
    found: list[tuple[float, int, _Steady]] = []
    for strength, fading in _CALMER:
        drawn = draw(module, shape, dtype=dtype, seed=seed, strength=strength, fading=fading)
        exact = [_leaves(d, torch.float64, device) for d in (drawn, _disturbed(drawn, dtype, seed))]
        expected, *others = _expected(module, exact, shape, oracle, seed)
        if dtype == torch.float32:  # which by itself may be lucky
            others += _expected(module, [_leaves(drawn, torch.float32, device)], shape, oracle, seed)
        lost: dict[str, float] = {}
        for other in others:
            _lose(lost, _rows(oracle, dtype if half else torch.float32, shape, other, expected))
        found.append((max(lost.values()), len(found), (drawn, expected, lost)))
        if found[-1][0] <= most:
            break
    least, _, steady = min(found)
    if dtype == torch.float32 and least > most:
        _lose_nearby(module, shape, steady, device, oracle, seed)
    return steady


def _lose_nearby(
    module: Any, shape: Shape, steady: _Steady, device: torch.device, oracle: str, seed: int, draws: int = 4
) -> None:
    """Adds to what float32 costs the oracle what it costs it at inputs nearby: where rounding is enlarged, one run says
    little of how far another may be off, on this machine or the next."""
    drawn, _, lost = steady
    near = [_disturbed(drawn, torch.float32, seed + i) for i in range(1, draws + 1)]
    leaves = ([_leaves(d, dtype, device) for d in near] for dtype in (torch.float64, torch.float32))
    both = (_expected(module, given, shape, oracle, seed) for given in leaves)
    for exact, found in zip(*both, strict=True):
        _lose(lost, _rows(oracle, torch.float32, shape, found, exact))


def _lose(lost: dict[str, float], rows: Iterable[Row]) -> None:
    """Adds errors to what is lost of each quantity at most."""
    for row in rows:
        error = row.error if row.error == row.error else math.inf
        lost[row.quantity] = max(error, lost.get(row.quantity, 0.0))


def _disturbed(drawn: Drawn, dtype: torch.dtype, seed: int) -> Drawn:
    """The same values, in float64, each off by up to half a unit in the last place of its dtype, states in that of the
    given one; of float32 where that is float64, since what that enlarges can be seen."""
    generator = torch.Generator().manual_seed(seed + 1)

    def off(t: Tensor, dtype: torch.dtype) -> Tensor:
        noise = torch.rand(t.shape, generator=generator, dtype=torch.float64) - 0.5
        eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        return t.double() * (1 + eps * noise) if t.is_floating_point() else t

    state = drawn.state and {key: off(t, dtype) for key, t in drawn.state.items()}
    return Drawn({key: off(t, t.dtype) for key, t in drawn.x.items()}, state, drawn.bounds)


def _tolerance(dtype: torch.dtype, key: str, lost: Mapping[str, float]) -> float:
    """An error of a few times what float32 costs the reference itself is no fault of a backend in float32."""
    if key in _COUNTS:
        return 0.0
    own = 4 * lost.get(key, 0.0) if dtype == torch.float32 else 0.0
    return max(TOLERANCES[dtype], own if own < _HOPELESS else 0.0)


def _kernels_take(module: Any, shape: Shape) -> bool:
    """Whether the kernels have room for the layer's feature maps at this size; where not, "auto" takes torch."""
    return interpreted() or kernels_hold(module, sizes_of(module, shape.dims))


def available(module: Any, device: torch.device) -> tuple[str, ...]:
    """The backends that can run on the device: triton on a GPU, or where Triton interprets its kernels."""
    return ("torch", "triton") if device.type == "cuda" or interpreted() else ("torch",)


def parity(
    module: Any,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
    shapes: Sequence[Shape] | None = None,
    backends: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    oracle: str = "reference",
    kept: Path | None = None,
) -> list[Row]:
    """Compare backends with the reference; by default all that can run here, on a GPU if there is one.

    `oracle="torch"` takes the torch backend's float64 for the reference, which is too slow for long sequences. `kept`
    is a folder for what the oracle finds of this module at these shapes: what is there already is taken from it.

    Triton takes no float64, so it is compared in the other dtypes only.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    backends = available(module, device) if backends is None else backends
    rows: list[Row] = []
    for number, shape in enumerate(SHAPES if shapes is None else shapes):
        for dtype in dtypes:
            drawn, expected, lost = steady(module, shape, dtype, device, oracle, seed + number, kept)
            for backend in backends:
                if backend == "triton" and (dtype == torch.float64 or not _kernels_take(module, shape)):
                    continue
                leaves = _leaves(drawn, None, device)
                try:
                    with rounded() if backend == "triton" and interpreted() else contextlib.nullcontext():
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
