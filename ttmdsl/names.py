"""Which names a spec may give: none that the generated module, Python or the language itself needs.

Input: a name. Output: why it may not be given, or nothing. Knows no spec; clashes inside of one are `check`'s.
"""

from __future__ import annotations

import builtins
import keyword
import re

SCALAR_FUNCTIONS = (
    *("exp", "log", "sqrt", "abs", "sign"),
    *("sigmoid", "silu", "tanh", "gelu", "relu", "softplus"),
)
# Of past tokens and of compile-time sizes; `window` is a clause that looks like one.
PREPARED = ("delay", "power", "taylor", "residual", "window")
_VECTOR = (*SCALAR_FUNCTIONS, "sum", "mean", "size", "softmax", "max", "min", "columns", "rows", "stop")
FUNCTIONS = (*_VECTOR, "normalized", "last", *PREPARED)

# Keywords of `op`, `step`, `Layer` and `load`, and the names that a generated module holds beside the spec's own.
_GENERATED = (
    *("op", "step", "initial_state", "output_final_state", "cu_seqlens", "backend", "final_state"),
    *("hidden_size", "num_heads", "name_or_path", "text", "self", "cls", "state", "dtype", "device"),
    *("SPEC", "INPUTS", "GATES", "PARAMS", "MEMORY", "CONSTS", "FEATURES", "Layer", "State"),
    *("torch", "triton", "tl", "nn", "F", "Tensor", "Any", "Callable", "TypeVar", "annotations", "typing", "math"),
    *("contextlib", "dataclasses", "difflib", "functools", "inspect", "os", "sys", "weakref"),
)
_AXES = {"B": "the batch", "T": "the tokens (and `^T` the transpose)", "H": "the heads"}


def refusal(name: str) -> str:
    """Why no declaration may have this name; empty if it may."""
    if "__" in name:
        return "two underscores in a row are kept for generated names"
    if keyword.iskeyword(name):
        return "it is a keyword of Python"
    if name in FUNCTIONS:
        return "it is a function of the language"
    if name in _AXES:
        return f"it stands for {_AXES[name]}"
    if name in _GENERATED:
        return "the generated module uses it"
    if hasattr(builtins, name):
        return "it is a builtin of Python"
    return ""


def layer_refusal(name: str) -> str:
    """Why no layer may have this name, which the generated module also exports in snake case."""
    return refusal(name) or refusal(snake_case(name))


def snake_case(name: str) -> str:
    """`GatedDeltaNet` to `gated_delta_net`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
