"""Sums of rank-one terms left(i) right(j), made as few and as short as possible.

Input: pairs of scalar formulas in the symbols of functions.py. Output: pairs with the same sum. "Uniform" is what does
not vary from component to component: numbers, n, constants, aggregates. Does not know where the pairs come from.
"""

from __future__ import annotations

from itertools import combinations

import sympy

from ttmdsl.functions import X, Y
from ttmdsl.structure import random_point, varying

_LARGE = 150  # operations, beyond which they take seconds


def ratio(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """a / b where it does not vary from component to component."""
    if b == 0:
        return None
    quotient = a / b
    if varying(quotient):
        if a.free_symbols & varying(a) != b.free_symbols & varying(b):
            return None
        quotient = sympy.cancel(sympy.together(quotient))
    return None if varying(quotient) else sympy.factor_terms(quotient)


def tidy(e: sympy.Expr) -> sympy.Expr:
    """The shortest of a few equal forms, in the same functions: simplify knows more, such as cosh, and takes longer."""
    forms = [e, sympy.factor_terms(e)]
    if sympy.count_ops(e) < _LARGE:
        whole = sympy.together(e)
        forms += [sympy.factor_terms(whole), sympy.factor_terms(sympy.cancel(whole)), sympy.powsimp(e)]

    def length(form: sympy.Expr) -> int:
        return int(sympy.count_ops(-form if form.could_extract_minus_sign() else form))  # a sign stands anywhere

    return min(forms, key=length)


Pairs = list[tuple[sympy.Expr, sympy.Expr]]


def least_rank(pairs: Pairs) -> Pairs:
    """As few rank-one terms as possible, with everything uniform on the left."""
    found: Pairs = []
    for left, right in pairs:
        right = tidy(right)
        if left == 0 or right == 0:
            continue
        uniform, right = right.as_independent(*varying(right), as_Add=False) if varying(right) else (right, 1)
        found.append((left * uniform, sympy.sympify(right)))
    merged = True
    while merged:
        merged = False
        for i, j in combinations(range(len(found)), 2):
            joined = _join(found[i], found[j])
            if joined is not None:
                rest = [p for k, p in enumerate(found) if k not in (i, j)]
                found = ([joined] if joined[0] != 0 and joined[1] != 0 else []) + rest
                merged = True
                break
    return _eliminate(found)


def _join(p: tuple[sympy.Expr, sympy.Expr], q: tuple[sympy.Expr, sympy.Expr]) -> tuple[sympy.Expr, sympy.Expr] | None:
    quotient = ratio(q[1], p[1])
    if quotient is not None:
        return tidy(p[0] + quotient * q[0]), p[1]
    quotient = ratio(q[0], p[0])
    if quotient is not None:
        return p[0], tidy(p[1] + quotient * q[1])
    return None


def _eliminate(pairs: Pairs) -> Pairs:
    """Rank factorisation over the field of uniform formulas, where that takes fewer terms."""
    if len(pairs) < 2:
        return pairs
    lefts, rights = ([_parts(p[side]) for p in pairs] for side in (0, 1))
    rows = list(dict.fromkeys(part for d in lefts for part in d))
    columns = list(dict.fromkeys(part for d in rights for part in d))
    matrix = sympy.zeros(len(rows), len(columns))
    for left, right in zip(lefts, rights, strict=True):
        for a, ca in left.items():
            for b, cb in right.items():
                matrix[rows.index(a), columns.index(b)] += ca * cb
    point = random_point(matrix.free_symbols)
    if matrix.subs(point).evalf(30).rank(iszerofunc=lambda z: abs(z) < sympy.Float("1e-20")) >= len(pairs):
        return pairs
    matrix = matrix.applyfunc(tidy)
    reduced, pivots = matrix.rref(simplify=tidy)
    result: Pairs = []
    for k, pivot in enumerate(pivots):
        left = sympy.Add(*(matrix[i, pivot] * part for i, part in enumerate(rows)))
        right = sympy.Add(*(reduced[k, j] * part for j, part in enumerate(columns)))
        result.append((tidy(left), tidy(right)))
    return result


def _parts(e: sympy.Expr) -> dict[sympy.Expr, sympy.Expr]:
    """The formula as a sum of uniform coefficients times varying parts."""
    found: dict[sympy.Expr, sympy.Expr] = {}
    for term in sympy.Add.make_args(sympy.expand(e)):
        coefficient, part = term.as_independent(*varying(term), as_Add=False) if varying(term) else (term, 1)
        found[sympy.sympify(part)] = found.get(sympy.sympify(part), 0) + coefficient
    return found


# ---- in terms of the result ---------------------------------------------------------------------------------


def in_result(pairs: Pairs, value: sympy.Expr) -> Pairs:
    result: Pairs = []
    for left, right in pairs:
        quotient = ratio(right, value) if _is_formula(value) else None
        if quotient is not None:
            left, right = left * quotient, Y
        result.append((by_result(left, value), right))
    return result


def _is_formula(value: sympy.Expr) -> bool:
    return bool(value.has(X)) and value != X


def by_result(e: sympy.Expr, value: sympy.Expr) -> sympy.Expr:
    """The formula with y for the function's value, where that is shorter and divides by nothing that may be zero."""
    if not _is_formula(value) or not e.has(X):
        return tidy(e)
    quotient = ratio(e, value)
    if quotient is not None:
        return tidy(quotient) * Y
    e = tidy(e)
    quotient = sympy.cancel(e / value)
    if varying(sympy.fraction(quotient)[1]) - varying(sympy.fraction(e)[1]):
        return e
    candidate = tidy(quotient) * Y
    return candidate if sympy.count_ops(candidate) < sympy.count_ops(e) else e
