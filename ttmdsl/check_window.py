"""A pass's window over past tokens, and its gradient steps per token.

Input: their clauses, and the scope. Output: `spec.Window`, the constant that counts the steps; errors in the scope.
"""

from __future__ import annotations

from ttmdsl import syntax
from ttmdsl.check_expr import Reader
from ttmdsl.check_past import MAX_WINDOW, free_of_memories, whole
from ttmdsl.expr import Expr, Ref
from ttmdsl.scope import MAX_NODES, Place, Scope, describe
from ttmdsl.simplify_expr import walk
from ttmdsl.spec import Optimizer, Window


def window(
    clause: syntax.Window, bias: Expr | None, earlier: frozenset[str], owner: str, one: str, scope: Scope
) -> Window | None:
    """`window(c, weight = gamma) of`: c is known, the weight a vector of c, the summand of inputs and gates alone."""
    place = Place("the window", frozenset(), earlier, owner, step_dim=one)
    read = Reader(scope, place).read(clause.size)
    size = None if read is None else whole(read, 1, MAX_WINDOW, "a window's size", clause.size.span, scope)
    weight: Expr | None = None
    fine = True
    for setting in clause.settings:
        if setting.name.text != "weight" or weight is not None:
            found = "is set twice" if setting.name.text == "weight" else "is no setting of a window: it has `weight`"
            scope.error(setting.name.span, f"`{setting.name.text}` {found}")
            fine = False
            continue
        weight = Reader(scope, place).read(setting.value)
        fine = weight is not None and fine
        if weight is None or size is None:
            continue
        length = scope.consts.get(weight.shape[0]) if len(weight.shape) == 1 else None
        if length != size:
            found = describe(weight.shape) + (f" with {weight.shape[0]} = {length:g}" if length is not None else "")
            hint = f"such as `gate gamma[c]`, c = {size}; its last entry is the current token's"
            wanted = f"the weight of a window of {size} tokens is a vector of {size}"
            scope.error(setting.value.span, f"{wanted}, and this is {found}", hint)
            fine = False
        fine = free_of_memories(weight, setting.value.span, "a window's weight", scope) and fine
    for node in walk(bias) if bias is not None else ():
        if isinstance(node, Ref) and node.kind == "pass":
            hint = "the summand is taken anew for every token of the window, and what was read out is not kept"
            scope.error(node.span, f"a window's bias may not use `{node.name}`, which an earlier pass reads out", hint)
            fine = False
    nodes = len(list(walk(bias))) if bias is not None else 0
    if size is not None and size * nodes > MAX_NODES:
        hint = "a window repeats the bias for each of its tokens"
        scope.error(clause.span, f"{size} times a bias of {nodes} nodes is more than {MAX_NODES} nodes", hint)
        fine = False
    return Window(size, weight, span=clause.span) if fine and size is not None else None


def step_dim(clause: syntax.OptimizerClause | None, scope: Scope) -> str:
    """The constant that counts the gradient steps of a token, if one does: tensors may have it as their first dim."""
    for s in clause.settings if clause and clause.kind.text == "gd" else ():
        if s.name.text == "steps" and isinstance(s.value, syntax.Name) and s.value.text in scope.consts:
            return s.value.text
    return ""


def no_pass_per_step(used: tuple[Expr, ...], optimizer: Optimizer, scope: Scope) -> None:
    """A pass of several steps may read what an earlier one made at the end alone."""
    for node in (n for e in used for n in walk(e)):
        if isinstance(node, Ref) and node.kind == "pass":
            hint = "it may stand in the readout"
            message = f"with {optimizer.per_token} steps for each token, no step may use `{node.name}`"
            scope.error(node.span, message, hint)
