"""Times of the generated kernels on this GPU: medians, warm, all that `op` does; eager and as a replayed CUDA graph.

Usage: python benchmarks/times.py [OUT.json] [--layers a,b:b=16] [--shapes 8,2048,16,64;4,8192,16,128]
Inputs are bf16: unit q and k, log-sigmoid decays, sigmoid gates. A row's first call is timed too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from triton.testing import do_bench
from verify import parse

import ttmdsl

LAYERS = (
    "linear_attention,mamba2,gla,delta_net,gated_delta_net,titans_linear:b=64,lattice_dec:b=64:project=0,trellis:b=64,"
    "lattice_dec"
)


def inputs(module, B: int, T: int, H: int, D: int) -> dict[str, torch.Tensor]:
    """Tensors for `op`, ready for gradients."""
    x = {}
    for name, axes in {**module.INPUTS, **module.GATES, **module.PARAMS}.items():
        lead = (H,) if name in module.PARAMS else (B, T, H)
        t = torch.randn(*lead, *(D for _ in axes), device="cuda")
        match module.RANGES[name]:
            case "decay":
                t = F.logsigmoid(t + 3)
            case "unit":
                t = torch.sigmoid(t).bfloat16()
            case "positive":
                t = F.softplus(t).bfloat16()
            case _:
                t = (F.normalize(t, dim=-1) if name != "v" and axes else t).bfloat16()
        x[name] = t.requires_grad_()
    return x


def graph(f):
    """A function that replays f as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        f()
    return g.replay


def measure(variant: str, B: int, T: int, H: int, D: int) -> dict[str, object]:
    """One row."""
    name, consts = parse(variant)
    module = ttmdsl.load(name, **consts)
    x = inputs(module, B, T, H, D)
    row: dict[str, object] = {"layer": variant, "shape": [B, T, H, D]}

    def forward():
        with torch.no_grad():
            return module.op(**x, backend="triton")[0]

    def both():
        y, _ = module.op(**x, backend="triton")
        return torch.autograd.grad(y, list(x.values()), dy)

    began = time.time()
    dy = torch.randn_like(forward())
    both()
    torch.cuda.synchronize()
    row["first_s"] = time.time() - began
    med = lambda f: float(do_bench(f, warmup=15, rep=60, return_mode="median"))  # noqa: E731
    row["fwd"], row["fwd_bwd"] = med(forward), med(both)
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    row["MiB"] = (torch.cuda.max_memory_allocated() - base) / 2**20
    for key, f in (("graph_fwd", forward), ("graph_fwd_bwd", both)):
        try:
            row[key] = med(graph(f))
        except Exception as error:
            row[key] = f"{type(error).__name__}: {error}"[:80]
            torch.cuda.synchronize()
    return row


def profile(variant: str, B: int, T: int, H: int, D: int) -> dict[str, float]:
    """Microseconds of each kernel in one forward + backward."""
    name, consts = parse(variant)
    module = ttmdsl.load(name, **consts)
    x = inputs(module, B, T, H, D)
    y, _ = module.op(**x, backend="triton")
    dy = torch.randn_like(y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        for _ in range(3):
            y, _ = module.op(**x, backend="triton")
            torch.autograd.grad(y, list(x.values()), dy)
        torch.cuda.synchronize()
    return {e.key: e.self_device_time_total / 3 for e in p.key_averages() if e.self_device_time_total / 3 > 2}


def main() -> None:
    """Measures every layer at every shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", default="")
    parser.add_argument("--layers", default=LAYERS)
    parser.add_argument("--shapes", default="8,2048,16,64;4,8192,16,128")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    rows = []
    print(torch.cuda.get_device_name(), torch.__version__, __import__("triton").__version__, time.strftime("%Y-%m-%d"))
    for shape in args.shapes.split(";"):
        sizes = [int(n) for n in shape.split(",")]
        for variant in args.layers.split(","):
            try:
                row = measure(variant, *sizes)
                if args.profile:
                    row["kernels"] = profile(variant, *sizes)
            except Exception as error:
                row = {"layer": variant, "shape": sizes, "error": f"{type(error).__name__}: {error}"[:300]}
            rows.append(row)
            figures = {k: v for k, v in row.items() if k != "kernels"}
            print(*(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items()), flush=True)
            for k, v in sorted(row.get("kernels", {}).items(), key=lambda kv: -kv[1]):
                print(f"      {v:9.1f} us  {k}")
    if args.out:
        Path(args.out).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
