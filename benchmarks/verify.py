"""Parity of the Triton backend, outputs, states and all gradients, against float64; a process per layer.

Usage: python benchmarks/verify.py [OUT.json] [--layers a,b:b=16 | all] [--heads 32,60,64x128] [--tokens 1,63,2048,8192]
                                   [--drawn 60 --seed 1] [--seconds 560] [--device cuda | cpu] [--kept FOLDER]
Heads of 64x128 have dims of 64 and 128 in turn, in the order in which the layer declares them.
On a CPU Triton interprets the kernels, and bfloat16 is rounded as a GPU does (ttmdsl/interpreted.py): that shows what
the arithmetic loses, and nothing of what a GPU's compiler makes of it.

--drawn takes that many layers which nobody wrote (ttmdsl/strategies.py) in place of those named.

In float64 token by token, a deep memory takes minutes at 2048 tokens. FOLDER keeps what the oracle found: --oracle-only
fills it, on a machine that has the time, and a later run takes it from there. Beside a miss stands what the oracle
itself loses by inputs that are off by half a unit in their last place (in float32 also by computing in it).

The oracle is the reference backend up to 63 tokens, and beyond it the float64 torch backend, which the test suite
holds against the reference at 1e-9. OUT.json is written after every layer and head size; what it holds is not compared
again, so a run that was cut short goes on where it stopped. Exit status 1 on any miss.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

VARIANTS = (
    "linear_attention mamba2 gla delta_net gated_delta_net titans_linear lattice_dec lattice_enc lattice_sim"
    " lattice_dec:b=16 lattice_dec:b=64 lattice_enc:b=16 lattice_sim:b=16 lattice_dec:b=64:project=0"
    " lattice_enc:b=16:project=0 lattice_sim:b=16:project=0 trellis trellis:b=1"
).split()


# A variant, its spec if it is not a shipped layer's, head sizes, lengths, dtypes, and what `parity` is to be told.
Job = tuple[str, str, list[str], list[int], list[str], dict[str, Any]]


def run(job: Job) -> list[dict[str, object]]:
    """All comparisons of one variant."""
    import torch

    import ttmdsl
    from ttmdsl.aot import parse_variant
    from ttmdsl.drawing import Shape
    from ttmdsl.parity import parity

    variant, text, heads, tokens, dtypes, how = job
    if text:
        module = ttmdsl.compile(text)
    else:
        name, consts = parse_variant(variant)
        module = ttmdsl.load(name, **consts)
    rows = []
    for head in heads:
        for T in tokens:
            whole = Shape(f"D={head} T={T}", batch=1, tokens=T, heads=2, dims=tuple(map(int, head.split("x"))))
            # as training does it, and from a state that is given to one that is asked for
            shapes = [whole, replace(whole, label=f"{whole.label} y alone", state=False, final=False, exact=True)]
            oracle = "reference" if T <= 63 else "torch"
            for dtype in dtypes:
                began = time.time()
                row = {"variant": variant, "D": head, "T": T, "dtype": dtype}
                try:
                    found = parity(module, dtypes=[getattr(torch, dtype)], shapes=shapes, oracle=oracle, **how)
                    if not how["backends"]:
                        continue
                    if found:
                        worst = max(found, key=lambda r: r.error if r.error == r.error else float("inf"))
                        row |= {"worst": worst.error, "quantity": worst.quantity, "ok": all(r.ok for r in found)}
                        row["misses"] = {r.quantity: r.error for r in found if not r.ok}
                        row["lost"] = {r.quantity: r.lost for r in found if not r.ok}
                    else:
                        row |= {"worst": 0.0, "ok": True, "error": f"Triton does not take this layer at D = {head}"}
                except Exception as error:
                    row |= {"worst": float("nan"), "ok": False, "error": f"{error}"[:400]}
                    row |= {"trace": traceback.format_exc()[-600:]}
                row["seconds"] = time.time() - began
                rows.append(row)
                if "illegal" in str(row.get("error", "")) or "misaligned" in str(row.get("error", "")):
                    return rows  # the context is gone
    return rows


def main() -> int:
    """Runs the comparisons in parallel and prints a line for each miss and for each variant and head size."""
    import ttmdsl

    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--layers", default=",".join(VARIANTS))
    parser.add_argument("--drawn", type=int, default=0, help="that many drawn layers in place of --layers")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn layers")
    parser.add_argument("--heads", default="32,60,64,128")
    parser.add_argument("--tokens", default="1,63,2048,8192")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--kept", type=Path, help="a folder for what the oracle finds")
    parser.add_argument("--oracle-only", action="store_true", help="fill that folder and compare nothing")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after that many")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # the processes read it where kernels are defined
    end = time.monotonic() + args.seconds
    heads, tokens = args.heads.split(","), [int(t) for t in args.tokens.split(",")]
    layers = dict.fromkeys(ttmdsl.layers() if args.layers == "all" else args.layers.split(","), "")
    if args.drawn:
        from ttmdsl.strategies import distinct

        drawn = distinct(args.drawn, args.seed)
        layers = {f"drawn {args.seed}.{i} of {args.drawn}": text for i, text in enumerate(drawn)}
    largest_first = sorted(heads, key=lambda head: max(map(int, head.split("x"))), reverse=True)
    results: list[dict[str, object]] = json.loads(args.out.read_text()) if args.out and args.out.exists() else []
    known = {(r["variant"], str(r["D"]), r["T"], r["dtype"]) for r in results}
    dtypes = args.dtypes.split(",")
    how = {"backends": [] if args.oracle_only else ["triton"], "device": args.device, "kept": args.kept}
    jobs = [(v, text, [h], tokens, dtypes, how) for h in largest_first for v, text in layers.items()]
    jobs = [job for job in jobs if not {(job[0], job[2][0], t, d) for t in tokens for d in dtypes} <= known]
    with ProcessPoolExecutor(args.jobs, mp_context=mp.get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = {pool.submit(_until, end, job): job for job in jobs}
        for future in as_completed(waiting):
            variant, text, head, *_ = waiting[future]
            try:
                rows = future.result()
            except Exception as error:  # the process is gone
                print(f"LOST {variant} {head}: {error}", flush=True)
                continue
            results += rows
            for r in rows:
                if not r["ok"]:
                    print("MISS", {k: v for k, v in r.items() if k != "trace"}, flush=True)
            if text and not all(r["ok"] for r in rows):
                print(text, flush=True)
            for dtype in dtypes:
                mine = [r for r in rows if r["dtype"] == dtype]
                if mine:
                    bad, top = sum(not r["ok"] for r in mine), max(float(str(r["worst"])) for r in mine)
                    about = f"{mine[0]['variant']:28} D={mine[0]['D']:<4} {dtype:9}"
                    print(f"{about} {len(mine)} lengths, {bad} misses, worst {top:.1e}", flush=True)
            if args.out and rows:
                partial = args.out.with_suffix(".partial")
                partial.write_text(json.dumps(results))
                partial.replace(args.out)
    missed = [r for r in results if not r["ok"]]
    print(f"{len(results)} comparisons, {len(missed)} misses")
    return int(bool(missed))


def _until(end: float, job: Job) -> list[dict[str, object]]:
    """The job's rows; none if it is too late to begin (the clock is the machine's, the same in every process)."""
    return run(job) if time.monotonic() < end else []


if __name__ == "__main__":
    raise SystemExit(main())
