"""What the demonstration shows: the table of results and the figure of the loss curves.

Input: the results. Output: a rich table, and a PNG. Computes nothing but the figure's running mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ttmdsl.demo.train import Curve, Settings

# Okabe and Ito's, told apart by everybody.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_MARKERS = ("o", "s", "^", "D")
_INK, _FAINT = "#222222", "#8a8a8a"


@dataclass(frozen=True)
class Result:
    """One trained model. `decoding`: bytes per second of `step`, one sequence."""

    name: str
    recurrence: str
    parameters: int
    curve: Curve
    decoding: float
    sample: str


def table(results: Sequence[Result], bigram: float) -> Table:
    """A row for each model, the best first, and the bigram model's last."""
    out = Table(box=SIMPLE_HEAD, padding=0, collapse_padding=True, pad_edge=False)
    out.add_column("layer", style="bold", no_wrap=True)
    out.add_column("recurrence", no_wrap=True)
    for heading in ("weights", "held-out\nbits/byte", "against\nbigram", "training\ntokens/s", "decoding\ntokens/s"):
        out.add_column(heading, justify="right", no_wrap=True)
    for result in sorted(results, key=lambda result: result.curve.final):
        gain = 1 - result.curve.final / bigram
        out.add_row(
            result.name,
            result.recurrence,
            f"{result.parameters:,}",
            f"{result.curve.final:.3f}",
            f"[{'green' if gain > 0 else 'red'}]{-100 * gain:+.0f} %[/]",
            f"{result.curve.speed:,.0f}",
            f"{result.decoding:,.0f}",
        )
    out.add_section()
    out.add_row("bigram model", "", "65,536", f"{bigram:.3f}", "", "", "", style="dim")
    return out


def figure(results: Sequence[Result], bigram: float, settings: Settings, path: Path) -> None:
    """The loss curves: every step's batch, faint, and the held-out text on top."""
    made = Figure(figsize=(9, 5.4), dpi=160, layout="constrained")
    FigureCanvasAgg(made)
    axes = made.subplots()
    for result, color, marker in zip(results, _COLORS, _MARKERS, strict=False):
        smooth = _running_mean(result.curve.train, 5)
        axes.plot(range(1, len(smooth) + 1), smooth, color=color, alpha=0.25, linewidth=1)
        steps, bits = zip(*result.curve.heldout, strict=True)
        label = f"{result.name}: {result.curve.final:.2f}"
        axes.plot(steps, bits, color=color, linewidth=1.8, marker=marker, markersize=5, label=label)
    axes.axhline(bigram, color=_INK, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.annotate(
        f"bigram model: {bigram:.2f}",
        (1, bigram),
        xytext=(0, 5),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        color=_INK,
    )
    bottom, top = min(result.curve.final for result in results) - 0.25, bigram + 0.75
    axes.set_xlim(0, 1.01 * max(len(result.curve.train) for result in results))
    axes.set_ylim(min(bottom, bigram - 0.5), top)
    axes.set_xlabel(f"training step ({settings.batch} × {settings.length} bytes each)")
    axes.set_ylabel("loss (bits per byte)")
    axes.set_title(
        "Byte-level language models that differ only in their memory layer\n",
        loc="left",
        fontweight="bold",
        color=_INK,
    )
    axes.text(
        *(0, 1.02),
        f"English text of Python's help topics; width {settings.hidden}, depth {settings.blocks}. "
        "Marked: held-out text. Faint: training batches, mean of 5.",
        transform=axes.transAxes,
        fontsize=9,
        color=_FAINT,
    )
    axes.legend(title="held-out bits per byte at the end", frameon=False, alignment="left", loc="upper right")
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path)


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Over the last `width` values, fewer at the start."""
    spans = (values[max(0, n - width) : n] for n in range(1, len(values) + 1))
    return [sum(span) / len(span) for span in spans]
