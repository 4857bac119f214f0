"""Which launch configurations are right on this GPU: every choice of block, warps and stages, each in its own process.

Usage: python benchmarks/configs.py [--layers a,b:b=16] [--heads 64,128] [--tokens 256]
A configuration that Triton miscompiles shows here, by wrong numbers or an illegal access, and is excluded in
codegen/triton.py.j2 with its version. The oracle is the float64 torch backend.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp

from verify import parse


def run(job: tuple[str, int, int, int, int, int, int, int]) -> tuple[tuple[object, ...], str]:
    """Parity of one configuration."""
    import torch

    import ttmdsl
    from ttmdsl.parity import Shape, parity

    variant, head, T, block, warps, stages, chunk, heads = job
    name, consts = parse(variant)
    module = ttmdsl.load(name, **consts)
    module._BLOCK = block
    module._options = lambda kind, tiles: {"num_warps": warps, "num_stages": stages}
    if chunk:
        original = module._lengths
        module._lengths = lambda form: (chunk, chunk, 1) if form == "chunk" else original(form)
    try:
        rows = parity(
            module,
            dtypes=[torch.bfloat16],
            shapes=[Shape("s", batch=1, tokens=T, heads=heads, dims=(head,))],
            backends=["triton"],
            oracle="torch",
            device="cuda",
        )
    except Exception as error:
        text = str(error)
        return job, "ERROR " + ("illegal memory access" if "illegal" in text else text[-160:])
    bad = {r.quantity: f"{r.error:.1e}" for r in rows if not r.ok}
    return job, f"worst {max(r.error for r in rows):.1e}" + (f" MISSES {bad}" if bad else "")


def main() -> None:
    """Prints a line for each configuration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", default="linear_attention,mamba2,delta_net,gated_delta_net")
    parser.add_argument("--heads", default="64,128")
    parser.add_argument("--tokens", default="63,256")
    parser.add_argument("--blocks", default="32,64")
    parser.add_argument("--warps", default="4,8")
    parser.add_argument("--stages", default="1,2")
    parser.add_argument("--chunks", default="64")
    parser.add_argument("--H", type=int, default=2)
    args = parser.parse_args()
    given = (args.heads, args.tokens, args.blocks, args.warps, args.stages, args.chunks)
    choices = [[int(n) for n in text.split(",")] for text in given]
    jobs = [(v, *rest, args.H) for v in args.layers.split(",") for rest in itertools.product(*choices)]
    with mp.get_context("spawn").Pool(14, maxtasksperchild=1) as pool:
        for job, text in sorted(pool.imap_unordered(run, jobs), key=lambda r: str(r[0])):
            fields = ("layer", "D", "T", "block", "warps", "stages", "chunk", "H")
            print(*(f"{name}={value}" for name, value in zip(fields, job, strict=True)), text, flush=True)


if __name__ == "__main__":
    main()
