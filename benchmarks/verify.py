"""Parity of the Triton backend on this GPU, outputs, states and all gradients, against float64; a process per layer.

Usage: python benchmarks/verify.py [OUT.json] [--layers a,b:b=16] [--heads 32,60,64,128] [--tokens 1,63,2048,8192]
The oracle is the reference backend up to 63 tokens, and beyond it the float64 torch backend, which the test suite
holds against the reference at 1e-9. Exit status 1 on any miss.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import time
import traceback
from pathlib import Path

VARIANTS = (
    "linear_attention mamba2 gla delta_net gated_delta_net titans_linear lattice_dec lattice_enc lattice_sim"
    " lattice_dec:b=16 lattice_dec:b=64:project=0 lattice_enc:b=16:project=0 lattice_sim:b=16:project=0"
    " trellis trellis:b=1"
).split()


def run(job: tuple[str, list[int], list[int], list[str]]) -> list[dict[str, object]]:
    """All comparisons of one variant."""
    import torch

    import ttmdsl
    from ttmdsl.aot import parse_variant
    from ttmdsl.drawing import Shape
    from ttmdsl.parity import parity

    variant, heads, tokens, dtypes = job
    name, consts = parse_variant(variant)
    module = ttmdsl.load(name, **consts)
    rows = []
    for head in heads:
        for T in tokens:
            shape = Shape(f"D={head} T={T}", batch=1, tokens=T, heads=2, dims=(head,))
            oracle = "reference" if T <= 63 else "torch"
            for dtype in dtypes:
                began = time.time()
                row = {"variant": variant, "D": head, "T": T, "dtype": dtype}
                try:
                    how = {"backends": ["triton"], "oracle": oracle, "device": "cuda"}
                    found = parity(module, dtypes=[getattr(torch, dtype)], shapes=[shape], **how)
                    worst = max(found, key=lambda r: r.error if r.error == r.error else float("inf"))
                    row |= {"worst": worst.error, "quantity": worst.quantity, "ok": all(r.ok for r in found)}
                    row["misses"] = {r.quantity: r.error for r in found if not r.ok}
                except Exception as error:
                    row |= {"worst": float("nan"), "ok": False, "error": f"{error}"[:400]}
                    row |= {"trace": traceback.format_exc()[-600:]}
                row["seconds"] = time.time() - began
                rows.append(row)
                if "illegal" in str(row.get("error", "")) or "misaligned" in str(row.get("error", "")):
                    return rows  # the context is gone
    return rows


def main() -> int:
    """Runs the comparisons in parallel and prints a line for each miss and a summary for each variant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", default="")
    parser.add_argument("--layers", default=",".join(VARIANTS))
    parser.add_argument("--heads", default="32,60,64,128")
    parser.add_argument("--tokens", default="1,63,2048,8192")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--jobs", type=int, default=14)
    args = parser.parse_args()
    heads, tokens = [int(h) for h in args.heads.split(",")], [int(t) for t in args.tokens.split(",")]
    largest_first = sorted(heads, reverse=True)
    jobs = [(v, [h], tokens, args.dtypes.split(",")) for v in args.layers.split(",") for h in largest_first]
    results: list[dict[str, object]] = []
    with mp.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for rows in pool.imap_unordered(run, jobs):
            results += rows
            for r in rows:
                if not r["ok"]:
                    print("MISS", {k: v for k, v in r.items() if k != "trace"}, flush=True)
    for v in args.layers.split(","):
        mine = [r for r in results if r["variant"] == v]
        for dtype in args.dtypes.split(","):
            w = [r for r in mine if r["dtype"] == dtype]
            bad = sum(not r["ok"] for r in w)
            top = max((float(r["worst"]) for r in w), default=float("nan"))
            print(f"{v:32} {dtype:9} {len(w):3} comparisons, {bad} misses, worst {top:.1e}", flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(results))
    return int(any(not r["ok"] for r in results))


if __name__ == "__main__":
    raise SystemExit(main())
