"""The derived layer: closed-form Jacobians and factored gradients.

Input: built by `derive` from a `LayerSpec`. Output: `UpdateRule`, read by `explain` and by the lowering passes.
Holds data only.

A vector function f(x)[i] is described by scalar sympy formulas in these symbols (functions.py has them):

    x        the argument's component; in `left` it stands for x_i, in `right` for x_j
    y        the result's component, usable like x in diagonal, left and right
    s0, s1.. the aggregates, in order: aggregate r is sum_j summand_r(x_j, s0..s_{r-1})
    n        the length of the vector
    others   params by name (a vector param stands for its component, like x) and consts by value

Its Jacobian df_i/dx_j is diagonal(i) delta_ij + sum over low_rank of left(i) right(j).
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ttmdsl.expr import Expr
from ttmdsl.spec import LayerSpec, Memory


@dataclass(frozen=True)
class Jacobian:
    """Value and Jacobian of one vector function, diagonal plus low rank.

    `title` names the structure where it is one, such as "projection onto the orthogonal complement of s", else "".
    """

    fn: str
    aggregates: tuple[sympy.Expr, ...]
    value: sympy.Expr
    diagonal: sympy.Expr
    low_rank: tuple[tuple[sympy.Expr, sympy.Expr], ...]
    title: str = ""


@dataclass(frozen=True)
class PassRule:
    """Gradients of one pass's bias, one matrix expression for each of its memories.

    `definitions` are per-token intermediates in order (the residual e, for one), referred to by Ref(kind="let"). A
    Ref(kind="memory") in definitions and gradients is the memory at the gradient point. A gradient is built from sums,
    products, Outer, ColumnsJacT and RowsJacT, so that it stays factored.

    Where the optimizer is an argmin, a gradient is what the solved step subtracts (times the rate): of the bias at the
    solution, in terms of the state before it. `auxiliary` are matrices that the solution carries along beside the
    memories, with steps of their own among the gradients.

    `delays`: of a window, what the gradient of the token so many tokens ago is multiplied by, the current one first;
    without any, gradients are the current token's, or summed over the window.

    `group`: so many tokens in a row take their gradients at the state before the first of them. `first` and `last` mark
    with 1 where memories and momenta decay, and where memories add their momenta; all of a group come with its decays.
    """

    name: str
    definitions: tuple[tuple[str, Expr], ...]
    gradients: dict[str, Expr]
    auxiliary: tuple[Memory, ...] = ()
    delays: tuple[Expr, ...] = ()
    group: int = 1
    first: Expr | None = None
    last: Expr | None = None


@dataclass(frozen=True)
class UpdateRule:
    """A spec with everything that has been derived from it."""

    spec: LayerSpec
    jacobians: dict[str, Jacobian]
    passes: tuple[PassRule, ...]
