"""The whole matrix of ahead-of-time compilation: ten layers at three head sizes, two targets, two versions of Triton;
the other thirty at two head sizes with the newest.

Usage: python tests/aot_matrix.py [JOBS]
Writes docs/aot.md and exits with 1 if any kernel failed. Triton 3.6 is installed once, beside the environment, into
.triton36/; its processes find it there before the environment's own. test_aot.py runs a part of this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ttmdsl

ROOT = Path(__file__).parent.parent
OLD = "3.6.0"  # what torch 2.10 comes with
VARIANTS = (
    "linear_attention mamba2 gla delta_net gated_delta_net titans_linear lattice_dec:b=1 lattice_dec:b=16:project=0"
    " lattice_dec:b=16 lattice_enc:b=1 lattice_enc:b=16:project=0 lattice_sim:b=1 lattice_sim:b=16:project=0"
    " trellis:b=16 trellis:b=1"
).split()
HEADS, TARGETS = (32, 64, 128), ("sm_80", "sm_90")


def triton_36() -> Path:
    """The folder that holds Triton 3.6 alone; installed on first use, whole or not at all."""
    place = ROOT / ".triton36"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=ROOT, prefix=".triton36.") as temporary:
            made = Path(temporary) / "packages"
            install = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
            install += ["--no-deps", "--no-compile"]
            subprocess.run([*install, "--target", str(made), f"triton=={OLD}"], check=True)
            try:
                made.rename(place)
            except OSError:  # another process was first
                if not place.exists():
                    raise
    return place


def compile_matrix(
    jobs: int, packages: Path | None, variants: Sequence[str] = VARIANTS, heads: Sequence[int] = HEADS
) -> list[dict[str, Any]]:
    """All kernels, by the Triton in `packages` or by the environment's own."""
    environment = dict(os.environ)
    if packages:
        environment["PYTHONPATH"] = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "ttmdsl", "aot", *variants, "--heads", ",".join(map(str, heads))]
    command += ["--targets", ",".join(TARGETS), "--jobs", str(jobs), "--op-only", "--json"]
    rows: list[dict[str, Any]] = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE).stdout)
    return rows


def summary(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A line of a table for each variant: kernels, failures, and the worst spill and shared memory at each size."""
    rows = list(rows)
    columns = [(target, head) for target in TARGETS for head in sorted({r["head"] for r in rows})]
    lines = ["| layer | kernels | failures | " + " | ".join(f"{t}, {h}" for t, h in columns) + " |"]
    lines.append("|---|---|---|" + "---|" * len(columns))
    for variant in dict.fromkeys(r["variant"] for r in rows):
        mine = [r for r in rows if r["variant"] == variant]
        cells = [variant, str(len({r["kernel"] for r in mine})), str(sum(bool(r["error"]) for r in mine))]
        for target, head in columns:
            here = [r for r in mine if (r["target"], r["head"]) == (target, head)]
            stack, shared = (max((r[what] for r in here), default=0) for what in ("stack", "shared"))
            cells.append(f"{stack} / {shared / 1024:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def report(found: dict[str, list[dict[str, Any]]]) -> str:
    """docs/aot.md."""
    lines = ["# Kernels compiled ahead of time", ""]
    lines += [
        "Written by `python tests/aot_matrix.py`; inputs in bfloat16. Under each target and head size: the most bytes"
    ]
    lines += [
        "of stack that a kernel of the layer has per thread (above 0, registers are spilled), and the most shared"
    ]
    lines += [
        "memory in KiB. sm_80 has 163 KiB for a block, sm_90 227 KiB: a kernel that wants more counts as a failure."
    ]
    for name, rows in found.items():
        failures = [r for r in rows if r["error"]]
        lines += ["", f"## {name}", "", f"{len(rows)} kernels, {len(failures)} failures.", "", *summary(rows)]
        if failures:
            lines += ["", "Failures:", ""]
            lines += [f"- {r['variant']} {r['kernel']}, {r['target']}, {r['head']}: {r['error']}" for r in failures]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compiles everything and writes the report."""
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count() or 1
    here = f"Triton {version('triton')}"
    ten = {variant.partition(":")[0] for variant in VARIANTS}
    others = [name for name in ttmdsl.layers() if name not in ten]
    found = {
        here: compile_matrix(jobs, None),
        f"Triton {OLD}": compile_matrix(jobs, triton_36()),
        f"The other layers, {here}": compile_matrix(jobs, None, others, HEADS[1:]),
    }
    path = ROOT / "docs" / "aot.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(report(found), encoding="utf-8")
    print(path.read_text(encoding="utf-8"))
    return int(any(r["error"] for rows in found.values() for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
