"""Rows of a benchmark as a table, as JSON on disk, and as a plot over T.

Input: `Row`s. Output: text, files. The JSON is {"machine": {...}, "rows": [...]}, replaced whole after every row: a run
that is cut short has lost nothing. Measures nothing.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttmdsl.bench.measure import Row
from ttmdsl.cache import write_atomically
from ttmdsl.errors import LoadError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


def machine(device: str) -> dict[str, Any]:
    """Where and with what the rows were measured."""
    import torch

    found = {"device": platform.processor() or platform.machine(), "torch": torch.__version__}
    if device == "cuda" and torch.cuda.is_available():
        import triton

        found |= {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
    return found | {"date": time.strftime("%Y-%m-%d %H:%M")}


def save(path: Path, about: dict[str, Any], rows: Sequence[Row]) -> None:
    """Replaces the file."""
    lines = ",\n".join(f"  {json.dumps(_known(row))}" for row in rows)
    try:
        write_atomically(path, f'{{"machine": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n')
    except OSError as error:
        raise LoadError(f"{path}: cannot write the results ({error.strerror})") from None


def _known(row: Row) -> dict[str, Any]:
    """What a row says, times to five digits."""
    fields = {name: value for name, value in asdict(row).items() if value not in (None, "", {})}
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in fields.items()}


def saved(path: Path) -> list[Row]:
    """The rows of a file, none if there is no file."""
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [Row(**{**row, "shape": tuple(row["shape"])}) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LoadError(f"{path}: not the results of a benchmark: {error}") from None


# ---- the table ----------------------------------------------------------------------------------------------

_COLUMNS: tuple[tuple[str, Callable[[Row], float | None], str], ...] = (
    ("forward", lambda r: r.forward, ".3f"),
    ("graph", lambda r: r.graph_forward, ".3f"),
    ("+ backward", lambda r: r.both, ".3f"),
    ("graph", lambda r: r.graph_both, ".3f"),
    ("floor", lambda r: over(r.graph_forward or r.forward, r.floor_forward), ".1f×"),
    ("floor", lambda r: over(r.graph_both or r.both, r.floor_both), ".1f×"),
    ("step", lambda r: r.graph_step or r.step, ".3f"),
    ("MiB", lambda r: r.peak, ".0f"),
    ("cold, s", lambda r: r.first_cold, ".1f"),
    ("warm, s", lambda r: r.first_warm, ".1f"),
    ("error", lambda r: r.error, ".1e"),
)


def over(a: float | None, b: float | None) -> float | None:
    """How many times b a is, where both are known."""
    return a / b if a is not None and b else None


def table(rows: Sequence[Row]) -> Table:
    """A line for each row, ms; columns that no row has are left out. Peers' times have ours beside them, as a ratio."""
    from rich.table import Table

    shown = [column for column in _COLUMNS if any(column[1](row) is not None for row in rows)]
    result = Table("layer", "B,T,H,D", "by", box=None, pad_edge=False)
    for title, _, _ in shown:
        result.add_column(title, justify="right")
    result.add_column("against ours")
    ours = {(row.layer, row.shape, row.dtype): row for row in reversed(rows) if row.who.startswith("ttmdsl t")}
    for row in rows:
        cells = [_cell(value(row), form) for _, value, form in shown]
        own = ours.get((row.layer, row.shape, row.dtype))
        note = row.failed if row.failed or own is None or own is row else _ratios(row, own)
        shape = ",".join(map(str, row.shape))
        result.add_row(row.layer, shape, row.who, *cells, note, style="red" if row.failed else "")
    return result


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return f"{value:{form.rstrip('×')}}" + "×" * form.endswith("×")


def _ratios(row: Row, own: Row) -> str:
    pairs = (over(row.forward, own.forward), over(row.both, own.both))
    return ", ".join(_cell(ratio, ".2f×") for ratio in pairs if ratio is not None)


def line(row: Row) -> str:
    """One row as a line of text, for a run that is followed as it goes."""
    head = f"{row.layer} {','.join(map(str, row.shape))} {row.who}:"
    if row.failed:
        return f"{head} FAILED {row.failed}"
    cells = (f"{title} {_cell(value(row), form)}" for title, value, form in _COLUMNS if value(row) is not None)
    kernels = (f"\n  {us:9.1f} us  {name}" for name, us in row.kernels.items())
    return f"{head} {', '.join(cells)}{''.join(kernels)}"


# ---- the plot -----------------------------------------------------------------------------------------------


def require_matplotlib() -> None:
    """A LoadError where there is none: before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise LoadError("a plot needs matplotlib: pip install 'ttmdsl[demo]'") from None


_PLOTTED: dict[str, Callable[[Row], float | None]] = {
    "forward": lambda r: r.forward,
    "forward + backward": lambda r: r.both,
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Forward, and forward and backward, over T: a line for each layer and who computes it; both axes logarithmic."""
    figure = _figure(4.5)
    found = [row for row in rows if row.forward is not None]
    layers = list(dict.fromkeys(row.layer for row in found))
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(found, key=lambda row: row.shape[1]):
        lines.setdefault((row.layer, row.who), []).append(row)
    for axes, (title, value) in zip(figure.subplots(1, 2), _PLOTTED.items(), strict=True):
        for (layer, who), points in lines.items():
            style = "-" if who.startswith("ttmdsl t") else "--"
            lengths, color = [row.shape[1] for row in points], f"C{layers.index(layer) % 10}"
            axes.plot(lengths, [value(row) for row in points], style, color=color, marker="o", label=f"{layer}, {who}")
        axes.set(xscale="log", yscale="log", title=title, xlabel="T", ylabel="ms")
        axes.set_xticks(sorted({row.shape[1] for row in found}), minor=False)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    _write(figure, path)


def beside(rows: Sequence[Row], peer: str) -> list[tuple[Row, Row]]:
    """What the kernels' op took, and a peer's function on the same tensors: not whole blocks, nor what failed."""
    theirs = {(row.layer, row.shape): row for row in rows if row.who == peer and not row.failed}
    ours = [row for row in rows if row.who == "ttmdsl triton" and not row.failed]
    return [(row, theirs[row.layer, row.shape]) for row in ours if (row.layer, row.shape) in theirs]


def draw_ratios(rows: Sequence[Row], peers: Sequence[str], path: Path) -> None:
    """Peers' times over ours, a point for each layer and shape, hollow for all but the first peer; logarithmic: above 1
    ours is faster."""
    figure = _figure(4)
    pairs = {peer: beside(rows, peer) for peer in peers}
    layers = list(dict.fromkeys(ours.layer for ours, _ in pairs[peers[0]]))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, value) in zip(panels, _PLOTTED.items(), strict=True):
        for i, shape in enumerate(dict.fromkeys(ours.shape for ours, _ in pairs[peers[0]])):
            for peer in peers:
                points = [(layers.index(a.layer), over(value(b), value(a))) for a, b in pairs[peer] if a.shape == shape]
                known = [(x, y) for x, y in points if y is not None]
                first = peer == peers[0]
                style = {"label": ", ".join(map(str, shape))} if first else {"fillstyle": "none"}
                axes.plot([x for x, _ in known], [y for _, y in known], "o", color=f"C{i}", alpha=0.8, **style)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(yscale="log", title=title)
        axes.set_xticks(range(len(layers)), layers, rotation=30, ha="right", fontsize=8)
        axes.set_yticks([0.5, 1, 2, 4, 8, 16], minor=False)
        axes.set_yticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}×")
        axes.grid(alpha=0.3)
    hollow = f" (hollow: {', '.join(peers[1:])})" if peers[1:] else ""
    panels[0].set_ylabel(f"time of {peers[0]} / time of ours{hollow}", fontsize=8)
    panels[1].legend(title="B, T, H, D", fontsize=7, title_fontsize=7)
    _write(figure, path)


def _figure(height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _write(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise LoadError(f"{path}: cannot write the plot ({error.strerror})") from None
