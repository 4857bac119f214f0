"""Times every kernel under each launch configuration on this GPU, and checks it: the data of a tuned table.

Usage: python benchmarks/tune.py OUT.json [--layers ...] [--shapes 8,2048,16,64;4,8192,16,128]
Compiles in parallel first. A configuration counts only if outputs and gradients agree with the default one's.
Prints, for each kernel, the times in microseconds by (warps, stages) and marks the best.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
from collections import defaultdict
from pathlib import Path

from verify import parse

CONFIGS = [(w, s) for w in (4, 8) for s in (1, 2, 3)]


def outputs(variant, sizes, config):
    """y and all gradients under one configuration, and what makes them."""
    import torch
    from times import inputs

    import ttmdsl

    name, consts = parse(variant)
    module = ttmdsl.load(name, **consts)
    torch.manual_seed(0)
    x = inputs(module, *sizes)
    if config is not None:
        module._options = lambda *a, **k: {"num_warps": config[0], "num_stages": config[1]}

    def run():
        y, _ = module.op(**x, backend="triton")
        torch.manual_seed(1)
        return [y, *torch.autograd.grad(y, list(x.values()), torch.randn_like(y))]

    return run


def compile_one(job):
    """Fills Triton's cache; a small batch is enough."""
    variant, sizes, config = job
    try:
        outputs(variant, (1, 256, sizes[2], sizes[3]), config)()
        import torch

        torch.cuda.synchronize()
        return job, ""
    except Exception as error:
        return job, f"{type(error).__name__}: {error}"[-200:]


def main() -> None:
    """Compiles, checks, times, prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    layers = "mamba2,delta_net,gated_delta_net,titans_linear:b=64,lattice_dec:b=64:project=0,trellis:b=64"
    parser.add_argument("--layers", default=layers)
    parser.add_argument("--shapes", default="8,2048,16,64;4,8192,16,128")
    args = parser.parse_args()
    shapes = [tuple(int(n) for n in s.split(",")) for s in args.shapes.split(";")]
    jobs = [(v, s, c) for v in args.layers.split(",") for s in shapes for c in [None, *CONFIGS]]
    with mp.get_context("spawn").Pool(15, maxtasksperchild=1) as pool:
        failed = {j[0:3]: e for j, e in pool.imap_unordered(compile_one, jobs) if e}
    for job, error in failed.items():
        print("FAILED", job, error, flush=True)
    import torch

    table = defaultdict(dict)
    for variant, sizes, config in jobs:
        if (variant, sizes, config) in failed:
            continue
        try:
            run = outputs(variant, sizes, config)
            got = run()
            if config is None:
                base = got
            else:
                pairs = zip(got, base, strict=True)
                worst = max(float((a - b).float().norm() / (b.float().norm() + 1e-9)) for a, b in pairs)
                if not worst < 1e-2:
                    print("WRONG", variant, sizes, config, worst, flush=True)
                    continue
            run()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
                for _ in range(5):
                    run()
                torch.cuda.synchronize()
            for e in p.key_averages():
                if e.key.endswith("_kernel") and not e.key.startswith("void"):
                    table[f"{variant} D={sizes[3]} {e.key}"][str(config)] = e.self_device_time_total / 5
        except Exception as error:
            print("ERROR", variant, sizes, config, str(error)[-200:], flush=True)
            if "illegal" in str(error):
                break
    for kernel, times in table.items():
        best = min(times, key=times.get)
        print(kernel, " ".join(f"{'*' if c == best else ''}{c}={t:.0f}" for c, t in times.items()), flush=True)
    Path(args.out).write_text(json.dumps(table))


if __name__ == "__main__":
    main()
