"""A compiler for test-time-memory layers: declare the loss, get kernels, gradients and an nn.Module.

    import ttmdsl

    gated_delta_net = ttmdsl.load("gated_delta_net")    # a shipped layer, or the path of a .ttm file
    y, state = gated_delta_net.op(q=q, k=k, v=v, log_alpha=log_alpha, beta=beta, output_final_state=True)

Importing this package loads neither torch, triton nor sympy.
"""

from ttmdsl.errors import CheckError, DeriveError, LoadError, ParseError, SpecError, TtmError
from ttmdsl.loader import compile, layers, load
from ttmdsl.version import VERSION as __version__

__all__ = [
    "CheckError",
    "DeriveError",
    "LoadError",
    "ParseError",
    "SpecError",
    "TtmError",
    "__version__",
    "compile",
    "layers",
    "load",
]
