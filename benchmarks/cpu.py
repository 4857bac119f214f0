"""The torch backend against the reference on the CPU: forward + backward, B=1, T=2048, H=4, D=64, float32, seconds.

Usage: python benchmarks/cpu.py [LAYER:b=16 ...]. The best of three runs of the torch backend, one of the reference.
"""

from __future__ import annotations

import sys
import time

import torch
from verify import parse

import ttmdsl
from ttmdsl.parity import Shape, draw


def seconds(module, drawn, backend: str) -> float:
    """One forward and backward pass."""
    x = {k: t.detach().requires_grad_() for k, t in drawn.x.items()}
    began = time.perf_counter()
    y, _ = module.op(**x, backend=backend)
    y.sum().backward()
    return time.perf_counter() - began


def main() -> None:
    """Prints a line for each layer."""
    for variant in sys.argv[1:] or ["gated_delta_net", "lattice_dec:b=16", "lattice_dec:b=16:project=0"]:
        name, consts = parse(variant)
        module = ttmdsl.load(name, **consts)
        drawn = draw(module, Shape("", tokens=2048, heads=4, dims=(64,), state=False), dtype=torch.float32)
        fast = min(seconds(module, drawn, "torch") for _ in range(3))
        slow = seconds(module, drawn, "reference")
        print(f"{variant:28} torch {fast:7.3f} s  reference {slow:7.2f} s  {slow / fast:6.1f}x", flush=True)


if __name__ == "__main__":
    main()
