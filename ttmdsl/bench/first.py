"""A first call in a process of its own: what a user waits for before the first output and gradients.

Input: a `Case`; as a program, its fields as JSON. Output: the seconds of importing ttmdsl, loading the layer and the
first forward and backward pass; importing torch, starting the GPU and autograd, and drawing the inputs, which takes
torch's own kernels, do not count. Measures nothing twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttmdsl.bench.subjects import Case

_CACHES = ("TTM_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
_PACKAGES = str(Path(__file__).parents[2])


def cold_and_warm(case: Case) -> tuple[float, float]:
    """Seconds with empty caches, and in a second process with what the first left on disk."""
    with tempfile.TemporaryDirectory(prefix="ttmdsl_") as folder:
        caches = {name: str(Path(folder) / name.lower()) for name in _CACHES}
        return in_process(case, caches), in_process(case, caches)


def in_process(case: Case, environment: dict[str, str] | None = None) -> float:
    """Seconds of the first call, in a new process. RuntimeError if it fails."""
    paths = os.pathsep.join(filter(None, [_PACKAGES, os.environ.get("PYTHONPATH")]))
    # bytecode is kept from process to process, as it is unless an environment says otherwise
    variables = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "", **(environment or {})}
    command = [sys.executable, "-m", "ttmdsl.bench.first", json.dumps(asdict(case))]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return float(done.stdout.split()[-1])


def main() -> None:
    """Makes the first call and prints its seconds."""
    fields = json.loads(sys.argv[1])
    import torch

    started = torch.ones(1, device=fields["device"], requires_grad=True)
    torch.autograd.grad(started * started, started, torch.ones_like(started))  # imports sympy, of all things
    began = time.perf_counter()
    from ttmdsl.bench.measure import resolved
    from ttmdsl.bench.subjects import Case, own

    case = Case(**{**fields, "shape": tuple(fields["shape"])})
    module = case.load()
    loaded = time.perf_counter() - began
    subject = own(case, module, resolved(case))
    _finish(case)
    began = time.perf_counter()
    y = subject.forward()
    torch.autograd.grad(y, subject.leaves, torch.ones_like(y), allow_unused=True)
    _finish(case)
    print(loaded + time.perf_counter() - began)


def _finish(case: Case) -> None:
    """Waits for the device."""
    if case.device == "cuda":
        import torch

        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
