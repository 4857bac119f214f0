"""What else computes a layer: other packages' functions for it, by the layer's name, as data.

Input: a layer's name and `op`'s tensors. Output: the call that computes the same y by another package, where that is
installed. A layer that is not named here has no peer; nothing else in this package goes by a layer's name. The calls
follow fla-core 0.6.0, flash-linear-attention 0.6.0 (whose layers they are) and titans-pytorch 0.5.5.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True)
class Peer:
    """One package's functions for a layer: `whole` over sequences [B, T, H, ...], `step` for one token at T = 1.

    `arguments` makes their keywords from `op`'s tensors; `renamed` are those that `step` calls by another name. They
    return y and the final state.
    """

    who: str
    module: str
    whole: str
    step: str
    arguments: Callable[[Tensors], dict[str, Any]]
    renamed: Mapping[str, str] = field(default_factory=dict)

    def sequence(self, x: Tensors) -> Callable[[], Tensor]:
        """What computes y of whole sequences."""
        function = getattr(importlib.import_module(self.module), self.whole)
        return lambda: function(**self.arguments(x))[0]

    def token(self, x: Tensors) -> Callable[[], Any]:
        """What computes one token from the state of another, of the same values."""
        function = getattr(importlib.import_module(self.module), self.step)
        given = {self.renamed.get(key, key): value for key, value in self.arguments(x).items() if key != "normalize"}
        _, state = function(**given, output_final_state=True)
        return lambda: function(**given, initial_state=state, output_final_state=True)


@dataclass(frozen=True)
class Block:
    """A package's whole block, from [B, T, hidden] to the same, to be held against the layer's `Layer`."""

    who: str
    module: str
    make: Callable[[Any, int, int, int], Any]  # the package's module, heads, head size, tokens of a group

    def build(self, heads: int, head: int, group: int) -> Any:
        return self.make(importlib.import_module(self.module), heads, head, group)


def _fla(
    name: str,
    arguments: Callable[[Tensors], dict[str, Any]],
    renamed: Mapping[str, str] | None = None,
    block: Block | None = None,
) -> tuple[Peer | Block, ...]:
    function = Peer("fla", "fla.ops", f"chunk_{name}", f"fused_recurrent_{name}", arguments, renamed or {})
    return (function, block) if block else (function,)


def _fla_block(name: str, options: Callable[[int], dict[str, Any]]) -> Block:
    """One with heads of one size, short convolutions and an output gate, as `Layer` has them."""

    def make(package: Any, heads: int, head: int, _: int) -> Any:
        return getattr(package, name)(hidden_size=heads * head, num_heads=heads, expand_v=1, **options(head))

    return Block("fla Layer", "fla.layers", make)


def _qkv(x: Tensors) -> dict[str, Any]:
    return {"q": x["q"], "k": x["k"], "v": x["v"], "scale": 1.0}


def _rwkv7(x: Tensors) -> dict[str, Any]:
    step = x["beta"].unsqueeze(-1) * x["k"]
    return _qkv(x) | {"k": step, "a": x["k"], "b": -step, "gk": x["log_alpha"]}


def _titans(who: str, moves: Callable[[int], int | None]) -> Block:
    """A memory whose gradients of a chunk are taken where it was before the sequence, or so many tokens ago at most."""

    def make(package: Any, heads: int, head: int, group: int) -> Any:
        return package.NeuralMemory(
            dim=heads * head, chunk_size=group, batch_size=moves(group), dim_head=head, heads=heads
        )

    return Block(who, "titans_pytorch", make)


PEERS: dict[str, tuple[Peer | Block, ...]] = {
    "linear_attention": _fla("linear_attn", lambda x: _qkv(x) | {"normalize": False}),
    "retnet": _fla("simple_gla", lambda x: _qkv(x) | {"g_gamma": x["log_alpha"].detach()}),
    "mamba2": _fla("simple_gla", lambda x: _qkv(x) | {"g": x["log_alpha"]}),
    "gla": _fla(
        "gla",
        lambda x: _qkv(x) | {"g": x["log_alpha"]},
        {"g": "gk"},
        _fla_block("GatedLinearAttention", lambda head: {"expand_k": 1, "use_short_conv": True}),
    ),
    "hgrn2": _fla(
        "gla",
        lambda x: _qkv({**x, "k": (-torch.expm1(x["log_alpha"])).to(x["q"])}) | {"g": x["log_alpha"]},
        {"g": "gk"},
    ),
    "gsa": _fla("gsa", lambda x: _qkv(x) | {"s": (-torch.expm1(x["log_alpha"])).to(x["q"]), "g": x["log_alpha"]}),
    "delta_net": _fla(
        "delta_rule",
        lambda x: _qkv(x) | {"beta": x["beta"]},
        block=_fla_block("DeltaNet", lambda head: {"use_gate": True}),
    ),
    "gated_delta_net": _fla(
        "gated_delta_rule",
        lambda x: _qkv(x) | {"g": x["log_alpha"], "beta": x["beta"]},
        block=_fla_block("GatedDeltaNet", lambda head: {"head_dim": head}),
    ),
    "dplr": _fla("dplr_delta_rule", lambda x: _qkv(x) | {"a": x["a"], "b": x["b"], "gk": x["log_alpha"]}),
    "rwkv7": _fla("dplr_delta_rule", _rwkv7),
    "titans": (_titans("titans-pytorch", lambda group: None), _titans("titans-pytorch by groups", lambda group: group)),
}


def peers_of(layer: str) -> list[Peer | Block]:
    """The peers of a shipped layer whose packages are installed."""
    return [peer for peer in PEERS.get(layer, ()) if _installed(peer)]


def _installed(peer: Peer | Block) -> bool:
    found = importlib.util.find_spec(peer.module.partition(".")[0])
    if found and isinstance(peer, Block):  # blocks may be in a package of their own
        try:
            found = importlib.util.find_spec(peer.module)
        except ModuleNotFoundError:
            found = None
    return found is not None


def insist() -> None:
    """Lets fla run what it refuses to: its gated backward on Hopper, where this Triton gives it wrong gradients.

    For times only: what its gradients are worth is not looked at.
    """
    if importlib.util.find_spec("fla"):
        chunk_o = importlib.import_module("fla.ops.common.chunk_o")
        chunk_o.TRITON_ABOVE_3_7_1 = True  # type: ignore[attr-defined]


def tune_briefly() -> None:
    """Shortens the measurements by which Triton's autotuner chooses a peer's configurations: minutes, not an hour."""
    from triton.testing import do_bench

    _tune_by(lambda work, quantiles: do_bench(work, warmup=2, rep=12, quantiles=quantiles))


def compile_only() -> None:
    """Has the autotuner compile every configuration that it would measure, so that another process finds them compiled.

    What it chooses then is any of them, so it may read what was chosen before, but writes nothing.
    """
    from triton.runtime.autotuner import Autotuner

    on_disk = Autotuner.check_disk_cache

    def once(work: Callable[[], object], quantiles: object) -> list[float]:
        work()
        return [1.0, 1.0, 1.0]

    def unknown() -> None:
        raise LookupError

    def read_only(self: Any, key: object, configs: object, measure: Callable[[], object]) -> bool:
        try:
            return bool(on_disk(self, key, configs, unknown))
        except LookupError:
            measure()
            return False

    _tune_by(once)
    Autotuner.check_disk_cache = read_only


def _tune_by(measure: Callable[[Callable[[], object], Any], object]) -> None:
    from triton.runtime.autotuner import Autotuner

    def bench(work: Callable[[], object], quantiles: object = None, **_: object) -> object:
        return measure(work, quantiles)

    Autotuner.do_bench = property(lambda self: bench, lambda self, value: None)
