"""Kernels compiled ahead of time, for a GPU that need not be there: failures and spills show before anything runs.

Input: a spec's text and constants, head sizes, targets such as "sm_90". Output: one `Resources` per kernel: registers,
stack (spilled bytes) and shared memory, or the compiler's error. Runs nothing on a GPU and times nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttmdsl.loader import compile as compile_spec
from ttmdsl.loader import load

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}


@dataclass(frozen=True)
class Resources:
    """What one kernel takes. `stack` in bytes: above 0, registers were spilled. `error` is empty if it compiled."""

    kernel: str
    target: str
    head: int
    dtype: str
    warps: int
    registers: int = 0
    stack: int = 0
    shared: int = 0
    seconds: float = 0.0
    error: str = ""


def sources(module: Any) -> Iterable[tuple[str, Any]]:
    """The kernels of a generated module: every Triton function that another does not only call."""
    import triton

    for name, value in vars(module).items():
        if isinstance(value, triton.runtime.jit.JITFunction) and name.endswith("_kernel"):
            yield name, value


def compile_kernels(
    name_or_path: str,
    consts: Mapping[str, float],
    heads: Iterable[int] = (64,),
    targets: Iterable[str] = ("sm_90",),
    dtype: str = "bfloat16",
    only: str = "",
) -> list[Resources]:
    """Compiles every kernel of a layer for each head size and target. Names of kernels can be filtered by `only`."""
    import triton  # before the module, which defines kernels only where Triton is in use

    del triton
    text = Path(name_or_path).read_text() if name_or_path.endswith(".ttm") else ""
    module = compile_spec(text, **consts) if text else load(name_or_path, **consts)
    return [
        _compile(module, kernel, fn, head, target, dtype)
        for kernel, fn in sources(module)
        if only in kernel
        for head in heads
        for target in targets
    ]


def _compile(module: Any, kernel: str, fn: Any, head: int, target: str, dtype: str) -> Resources:
    import time

    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sizes = {d: head for axes in {**module.INPUTS, **module.GATES, **module.PARAMS, **module.MEMORY}.values() for d in axes}
    constants, options = module.kernel_constants(kernel, sizes, getattr(torch, dtype))
    constants = {k: v for k, v in constants.items() if k in fn.arg_names}
    kinds = module.KERNEL_POINTERS[kernel]
    signature = {}
    for a in fn.arg_names:
        if a in constants:
            signature[a] = "constexpr"
        elif a in kinds:
            signature[a] = POINTERS[{"input": dtype, "gate": "float32", "float32": "float32"}[kinds[a]]]
        else:
            signature[a] = "*i64"
    aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(fn.arg_names) if signature[a] != "constexpr"}
    spot = Resources(kernel, target, head, dtype, options["num_warps"])
    began = time.perf_counter()
    try:
        source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=aligned)
        binary = triton.compile(source, target=GPUTarget("cuda", int(target[3:]), 32), options=options)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return _with(spot, error=f"{type(error).__name__}: {lines[-1][:300]}")
    registers, stack = resource_usage(binary.asm["cubin"])
    took = time.perf_counter() - began
    return _with(spot, registers=registers, stack=stack, shared=binary.metadata.shared, seconds=took)


def _with(resources: Resources, **changes: Any) -> Resources:
    from dataclasses import replace

    return replace(resources, **changes)


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and stack bytes of a cubin, by the cuobjdump in Triton's wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", out)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resources: {out[:200]}")
    return int(found[1]), int(found[2])


if __name__ == "__main__":  # python -m ttmdsl.aot LAYER[:b=16] HEADS TARGETS
    layer, *pairs = sys.argv[1].split(":")
    given = {k: float(v) for k, v in (p.split("=") for p in pairs)}
    for r in compile_kernels(layer, given, [int(h) for h in sys.argv[2].split(",")], sys.argv[3].split(",")):
        print(f"{sys.argv[1]:28} {r.kernel:34} {r.target} D={r.head:<4} w={r.warps} reg={r.registers} stack={r.stack} "
              f"smem={r.shared} {r.seconds:.1f}s {r.error}", flush=True)  # fmt: skip
