"""Invent a layer, and train it on a recall task: `python examples/invent_a_layer.py`, about fifteen seconds on a CPU.

The layer is in no paper. It is a delta rule whose loss grows like |e| instead of e^2 once an error is large, so that no
single value can write more than its key's length into the memory. Ten lines say so; the rest is derived.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ttmdsl

SPEC = """
layer RobustDelta {
  dim       d_k, d_v
  input     q[d_k], k[d_k], v[d_v]
  gate      alpha: decay, beta: unit
  const     b = 8                          # tokens that share one gradient point
  memory    S[d_v, d_k]
  fn        charbonnier(e) = sqrt(1 + e^2)
  bias      sum(charbonnier(S @ k - v))
  retention alpha * S
  optimizer gd(rate = beta, batch = b)
  read      S @ q
}
"""

KEYS, VALUES, PAIRS, QUERIES = 16, 8, 12, 12


class Recall(nn.Module):
    """Pairs of a key and a value, then keys alone: which value did each of them come with?"""

    def __init__(self, layer: nn.Module, hidden: int) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(KEYS, hidden), nn.Embedding(VALUES + 1, hidden)
        self.norm, self.layer, self.head = nn.RMSNorm(hidden), layer, nn.Linear(hidden, VALUES)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        x = self.key(keys) + self.value(values)
        return self.head(x + self.layer(self.norm(x))[0])


def draw(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of every position, and the answers of the queries; a query shows the value VALUES, `unknown`."""
    keys = torch.rand(batch, KEYS).argsort(1)[:, :PAIRS]
    values = torch.randint(VALUES, (batch, PAIRS))
    asked = torch.rand(batch, PAIRS).argsort(1)[:, :QUERIES]
    unknown = torch.full((batch, QUERIES), VALUES)
    return torch.cat([keys, keys.gather(1, asked)], 1), torch.cat([values, unknown], 1), values.gather(1, asked)


def main() -> None:
    robust_delta = ttmdsl.compile(SPEC)
    print("the generated module, with the derived update in its header:", robust_delta.__file__)

    torch.manual_seed(0)
    model = Recall(robust_delta.Layer(64, 2, conv_size=1), 64)  # a token says all by itself: no convolution
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(1, 101):
        keys, values, answers = draw(32)
        loss = F.cross_entropy(model(keys, values)[:, PAIRS:].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    with torch.no_grad():
        keys, values, answers = draw(512)
        accuracy = (model(keys, values)[:, PAIRS:].argmax(-1) == answers).float().mean().item()
    print(f"recalled: {accuracy:.1%}, by chance {1 / VALUES:.1%}")
    assert accuracy > 0.9


if __name__ == "__main__":
    main()
