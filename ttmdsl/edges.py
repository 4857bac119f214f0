"""Numbers at the edges: gates next to 0 and 1, decays of e^-20, keys of norm 10, in every layer.

Input: generated modules, a device, a dtype and a number of tokens. Output: for each layer and edge whether everything
is finite that is finite in float64, and the error beside float64. Run as

    python -m ttmdsl.edges [OUT.md] [--tokens 65536] [--dtype bfloat16] [--device cuda] [--layers gla,rwkv7]
                           [--compared 4096] [--jobs 14]

Where float64 itself overflows, the recurrence diverges (a delta rule with keys of norm 10 and a rate near 1, say): that
is said, and is no failure. Nor is an error that the reference backend has, too, in the same dtype: then the recurrence
magnifies every rounding; up to 512 tokens it is measured beside ours. Exit status 1 if anything is not finite that is
finite in float64.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALL = sys.maxsize  # tokens
LARGE = 1e30  # beyond this float32 may overflow, and the recurrence diverges


@dataclass(frozen=True, slots=True)
class Edge:
    """One layer at one edge. `error` is the greatest relative RMS error of y and the inputs' gradients, none of these
    taken for less than 1e-4 of the largest; `lost` that of the reference in the same dtype, NaN where not measured;
    `diverges` where float64 overflows, too."""

    layer: str
    edge: str
    finite: bool
    diverges: bool
    error: float
    lost: float


def _decays(x: dict[str, Tensor], module: Any, of: Callable[[Tensor], Tensor]) -> None:
    for key in [key for key, kind in module.RANGES.items() if kind == "decay"]:
        x[key] = of(x[key])


def _gates(x: dict[str, Tensor], module: Any, number: float) -> None:
    for key in [key for key, kind in module.RANGES.items() if kind == "unit"]:
        x[key] = torch.full_like(x[key], number)


def _strong(t: Tensor) -> Tensor:
    """Every third value a decay of e^-20, the others of e^-1e-6."""
    number = torch.arange(t.numel(), device=t.device).view(t.shape)
    return torch.where(number % 3 == 0, -20.0, -1e-6).to(t.dtype)


def _long_keys(x: dict[str, Tensor], module: Any) -> None:
    for key in [key for key in module.INPUTS if key[0] == "k"]:
        x[key] = 10 * torch.nn.functional.normalize(x[key], dim=-1)


EDGES: Mapping[str, Callable[[dict[str, Tensor], Any], None]] = {
    "decays of e^-20": lambda x, m: _decays(x, m, lambda t: torch.full_like(t, -20.0)),
    "decays of 1 and e^-20": lambda x, m: _decays(x, m, _strong),
    "no decay": lambda x, m: _decays(x, m, torch.zeros_like),
    "gates of 1e-6": lambda x, m: _gates(x, m, 1e-6),
    "gates of 1 - 1e-6": lambda x, m: _gates(x, m, 1 - 1e-6),
    "keys of norm 10": _long_keys,
}


def _results(module: Any, x: Mapping[str, Tensor], state: Mapping[str, Tensor] | None, backend: str) -> list[Tensor]:
    """y and the gradients of the inputs, for a cotangent of ones."""
    leaves = {key: t.clone().requires_grad_() for key, t in x.items()}
    y, _ = module.op(**leaves, initial_state=state, backend=backend)
    found = torch.autograd.grad(y.sum(), list(leaves.values()), allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


def at_edges(
    name: str,
    module: Any,
    *,
    tokens: int,
    dtype: torch.dtype,
    device: str = "cpu",
    backend: str = "torch",
    compared: int = ALL,
) -> Iterator[Edge]:
    """One `Edge` for each entry of EDGES that concerns the layer; sequences of `tokens`, two heads, dims 12 and 20, on
    a GPU 64, where a layer's edges run side by side. The error is that of the first `compared` tokens: what diverges
    there is not looked at any further. Raises what `op` raises."""
    from ttmdsl.drawing import Shape, draw

    dims = (64,) if device == "cuda" else (12, 20)
    drawn = draw(module, Shape("", tokens=tokens, heads=2, dims=dims, state=False))
    state = drawn.state and {key: t.to(device) for key, t in drawn.state.items()}

    def at(edge: str) -> Edge | None:
        x = {key: t.to(device) for key, t in drawn.x.items()}
        before = dict(x)
        EDGES[edge](x, module)
        if all(x[key] is before[key] for key in x):
            return None  # the layer has nothing of the kind
        narrow = {key: t.to(dtype if key in module.INPUTS else torch.float32) for key, t in x.items()}

        def results(backend: str, count: int, wide: bool = False) -> list[Tensor]:
            first = {key: t if key in module.PARAMS else t[:, :count] for key, t in narrow.items()}
            return _results(module, {key: t.double() for key, t in first.items()} if wide else first, state, backend)

        count = min(compared, tokens)
        exact = results("torch", count, wide=True)
        if _diverges(exact):
            nan = float("nan")
            return Edge(name, edge, _finite(results(backend, count)), diverges=True, error=nan, lost=nan)
        error = _error(results(backend, count), exact)
        lost = _error(results("reference", count), exact) if count <= 512 else float("nan")
        finite, diverges = _finite(results(backend, tokens)), False
        while not finite and not diverges and count < tokens:
            count = min(2 * count, tokens)
            diverges = _diverges(results("torch", count, wide=True))
        return Edge(name, edge, finite, diverges, error, lost)

    found = _side_by_side(at, EDGES) if device == "cuda" else map(at, EDGES)
    yield from (row for row in found if row is not None)


def _side_by_side(at: Callable[[str], Edge | None], edges: Iterable[str]) -> list[Edge | None]:
    """Each on a stream of its own: two heads of one sequence keep two multiprocessors of a GPU busy."""

    def apart(edge: str) -> Edge | None:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return at(edge)

    with ThreadPoolExecutor(len(EDGES)) as pool:
        return list(pool.map(apart, edges))


def _finite(found: Sequence[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in found)


def _diverges(exact: Sequence[Tensor]) -> bool:
    return not _finite(exact) or any(float(t.abs().max()) > LARGE for t in exact)


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The greatest relative RMS error; of y by itself, of a gradient beside at least 1e-4 of the largest one."""
    from ttmdsl.parity import relative_error, rms

    least = 1e-4 * max(map(rms, exact[1:]))
    pairs = list(zip(found, exact, strict=True))
    return max(relative_error(f.double(), t, least if n else 0.0) for n, (f, t) in enumerate(pairs))


def page(rows: Sequence[Edge], tokens: int, dtype: str, device: str, compared: int = ALL) -> str:
    """The results as Markdown: a line for each layer, a column for each edge."""
    head = ["layer", *EDGES]
    by_layer: dict[str, dict[str, Edge]] = {}
    for row in rows:
        by_layer.setdefault(row.layer, {})[row.edge] = row

    def cell(row: Edge | None) -> str:
        if row is None:
            return ""
        if row.diverges or not row.finite:
            return "diverges" if row.diverges else "**not finite**"
        return f"{row.error:.0e}" + (f" ({row.lost:.0e})" if row.error > 1e-5 and row.lost == row.lost else "")

    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {n} | {' | '.join(cell(found.get(edge)) for edge in EDGES)} |" for n, found in by_layer.items()]
    how = f"{tokens} tokens, {dtype}, {device}, torch {torch.__version__}"
    if compared < tokens:
        how += f"; finite: over all of them; errors: over the first {compared}"
    return (
        f"""# Numbers at the edges

{how}.
The greatest relative RMS error of the output and of the inputs' gradients beside float64; where it is above 1e-5, in
brackets what the reference backend loses in the same dtype. `diverges`: the recurrence itself grows beyond {LARGE:.0e}.
Empty: the layer has nothing of the kind.

"""
        + "\n".join(lines)
        + "\n"
    )


def _of_layer(how: Mapping[str, Any], name: str) -> list[Edge]:
    """All edges of a layer; in a process of its own."""
    from ttmdsl.loader import load

    return list(at_edges(name, load(name), **how))


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page, or prints it."""
    from rich.console import Console
    from rich.progress import track

    import ttmdsl

    parser = argparse.ArgumentParser(prog="python -m ttmdsl.edges", description="Numbers at the edges of their ranges.")
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--layers", default=",".join(ttmdsl.layers()))
    parser.add_argument("--compared", type=int, default=ALL, help="tokens, the first ones, whose error is measured")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each at one layer")
    args = parser.parse_args(argv)
    how = {"tokens": args.tokens, "dtype": getattr(torch, args.dtype), "device": args.device, "compared": args.compared}
    how["backend"] = "auto" if args.device == "cuda" else "torch"
    names = args.layers.split(",")
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        waiting = pool.map(functools.partial(_of_layer, how), names)
        found = track(waiting, "at the edges", len(names), console=Console(stderr=True), transient=True)
        rows = [row for of_layer in found for row in of_layer]
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    text = page(rows, args.tokens, args.dtype, device, args.compared)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return int(any(not row.finite and not row.diverges for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
