"""Tensors for a generated module's `op`, drawn at random: sizes, inputs, gates in their ranges, states.

Input: a generated module (or anything with its surface) and a `Shape`. Output: `Drawn`, the same for the same seed.
Compares nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ttmdsl.spec import FeatureDim

Tensors: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes to compare at. `dims` are handed out to the layer's dims in order, and then over again.

    `cuts`: the sequence is fed in pieces that end there. `lengths`: sequences of those lengths, packed along T; `batch`
    and `tokens` do not count then. `state`: whether an initial state is given (it is in any case where the layer's
    inputs do not tell its size). `final`: whether the final state is asked for. `exact`: whether decays are as models
    keep them (`kept_exact`).
    """

    label: str
    batch: int = 1
    tokens: int = 1
    heads: int = 1
    dims: tuple[int, ...] = (8,)
    cuts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    state: bool = True
    final: bool = True
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """`op`'s tensors by keyword, the initial state, and the bounds of packed sequences."""

    x: Tensors
    state: Tensors | None
    bounds: tuple[int, ...] = ()


def dims_of(module: Any) -> dict[str, int]:
    """The layer's dims in order of appearance, with the size that a constant fixes, or 0."""
    shapes = [*module.INPUTS.values(), *module.GATES.values(), *module.PARAMS.values(), *module.MEMORY.values()]
    return {dim: int(module.CONSTS.get(dim, 0)) for shape in shapes for dim in shape}


def told(module: Any) -> set[str]:
    """The dims whose sizes tensors tell, as they have them, or features of these."""
    shapes = (*module.INPUTS.values(), *module.GATES.values(), *module.PARAMS.values())
    return {dim for axes in shapes for dim in axes} | set(getattr(module, "FEATURES", {}))


def is_deep(module: Any) -> bool:
    """Whether a memory has a dim whose size no tensor tells, as an MLP's inner one."""
    known = told(module)
    return any(dim not in known for axes in module.MEMORY.values() for dim in axes)


def dims_at(module: Any, head: int) -> tuple[int, ...]:
    """Sizes for `sizes_of`: the head's, or four times that for a dim that memories alone have, as `Layer` makes it."""
    known, made = told(module), getattr(module, "FEATURES", {})
    free = [dim for dim, fixed in dims_of(module).items() if not fixed and dim not in made]
    return tuple(head if dim in known else 4 * head for dim in free)


def kernels_hold(module: Any, sizes: Mapping[str, int]) -> bool:
    """Whether the kernels have room for the layer's feature maps at these sizes; where not, "auto" takes torch."""
    return all(sizes[made] <= module._MOST_FEATURES for made in getattr(module, "_HELD", ()))


def kept_exact(module: Any, name: str) -> bool:
    """Whether a tensor is a head's decay, one number: summed over many tokens, models keep it in float32."""
    axes = {**module.INPUTS, **module.GATES, **module.PARAMS}[name]
    return module.RANGES[name] == "decay" and not axes


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
    module: Any,
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    strength: float = 1.0,
    fading: float = 1.0,
) -> Drawn:
    """Tensors for `op` on the CPU: vectors of about unit length, gates in their ranges, a state like the declared.

    `strength` multiplies gates, params and momenta, `fading` the logarithms of decays.
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
        x[key] = in_range(t, module.RANGES[key]) * (fading if module.RANGES[key] == "decay" else strength)

    state: Tensors | None = None
    if any("L" in axes for axes in module.STATE.values()):
        state = _grown(module, shape, dtype, seed, strength) if shape.state else None
    elif shape.state or is_deep(module):
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
        {key: t.to(wide if shape.exact and kept_exact(module, key) else dtype) for key, t in x.items()},
        state and {key: t.to(wide) if t.is_floating_point() else t for key, t in state.items()},
        tuple(bounds) if shape.lengths else (),
    )


def _grown(module: Any, shape: Shape, dtype: torch.dtype, seed: int, strength: float) -> Tensors:
    """A state of keys and coefficients: what a few tokens leave behind, a different number in each sequence."""
    lengths = tuple(2 + n % 3 for n in range(len(shape.lengths) or shape.batch))
    before = draw(module, replace(shape, lengths=lengths, state=False), dtype=dtype, seed=seed + 1, strength=strength)
    bounds = torch.tensor(before.bounds)
    _, final = module.op(**before.x, output_final_state=True, cu_seqlens=bounds, backend="reference")
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
