"""Layers over a feature map beside torch's softmax attention: microseconds of kernels, forward and with backward.

python benchmarks/attention.py [B,T,H,D ...], on a GPU. A call without gradients is timed as one of inference. Torch's
backends are flash attention and cuDNN's, whose inputs lie as they like them best ([B, H, T, D]). Then a token's step
after T others: microseconds of kernels, and from first to last, with what the host takes meanwhile. Checks nothing:
`verify.py` does.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ttmdsl.bench.clock import CudaClock
from ttmdsl.bench.subjects import Case, own, tensors

LAYERS = ("attention", "swa", "swa:c=1024", "deep_transformer", "swdt", "dot")
SHAPES = ((8, 2048, 16, 64), (4, 8192, 16, 128))
DECODED = ((64, 4096, 16, 64), (1, 32768, 16, 128))

Shape = tuple[int, int, int, int]
Run = Callable[[], object]


def ours(shape: Shape) -> Iterator[tuple[str, Run, Run]]:
    for layer in LAYERS:
        case = Case(layer, shape, "bfloat16", "cuda", "triton")
        subject = own(case, case.load(), "triton")
        yield layer, subject.only_forward(), subject.both()


def torchs(shape: Shape) -> Iterator[tuple[str, Run, Run]]:
    B, T, H, D = shape
    q, k, v, d_y = (torch.randn(B, H, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def forward(backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def alone(forward: Callable[[], torch.Tensor] = forward) -> torch.Tensor:
            with torch.no_grad():
                return forward()

        def both(forward: Callable[[], torch.Tensor] = forward) -> object:
            return torch.autograd.grad(forward(), leaves, d_y)

        yield f"torch, {backend.name}", alone, both


def step(layer: str, shape: Shape) -> tuple[Run, int]:
    """A token after the one before it, and the bytes of the state."""
    case = Case(layer, shape, "bfloat16", "cuda", "triton")
    module = case.load()
    with torch.no_grad():
        _, state = module.op(**tensors(module, case), output_final_state=True)
    token = {key: t.detach() for key, t in tensors(module, case, (shape[0], shape[2])).items()}

    def run() -> None:
        nonlocal state
        with torch.no_grad():
            _, state = module.step(**token, initial_state=state)

    return run, sum(t.numel() * t.element_size() for t in state.values())


def main(shapes: list[Shape]) -> None:
    clock = CudaClock()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for shape in shapes:
        for subjects in (ours, torchs):
            for who, forward, both in subjects(shape):
                for run in (forward, both):
                    run()
                alone, whole = clock.kernels(forward), clock.kernels(both)
                kernels = {name.strip("_"): us for name, us in whole.items() if name.endswith("_kernel")}
                parts = ", ".join(f"{name} {us:.0f}" for name, us in kernels.items())
                print(f"{shape} {who:24} {sum(alone.values()):7.0f} {sum(whole.values()):7.0f}   {parts}", flush=True)
    for layer, shape in itertools.product(LAYERS[:-1], DECODED):
        run, size = step(layer, shape)
        run()
        kernels, whole = sum(clock.kernels(run).values()), 1e3 * clock.ms(run)
        print(f"{shape} {layer:24} a step {kernels:5.0f}, with the host {whole:5.0f}; state {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main([tuple(map(int, text.split(","))) for text in sys.argv[1:]] or list(SHAPES))  # type: ignore[misc]
