"""The text that the demonstration trains on, and the bigram model that it has to beat.

Input: nothing but the standard library: the help topics of Python's own documentation. Output: bytes as tensors, and
bits per byte. Knows no neural network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

VOCABULARY = 256
_SMOOTHING = 0.1  # added to every count; on this text better than 1, so the harder bar


@dataclass(frozen=True)
class Text:
    """Bytes as int64, in reading order; `heldout` is the end that no model trains on."""

    train: Tensor
    heldout: Tensor


def load(heldout: float = 0.1) -> Text:
    """All topics, joined; the last part held out."""
    data = "\n\n".join(topics.values()).encode()
    bytes_ = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    cut = round(len(bytes_) * (1 - heldout))
    return Text(bytes_[:cut], bytes_[cut:])


def bigram_bits(text: Text) -> float:
    """Held-out bits per byte of the bigram model: counts of the training part, smoothed."""
    pairs = text.train[:-1] * VOCABULARY + text.train[1:]
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).double().reshape(VOCABULARY, VOCABULARY) + _SMOOTHING
    log_p = (counts / counts.sum(1, keepdim=True)).log()
    return -float(log_p[text.heldout[:-1], text.heldout[1:]].mean()) / math.log(2)


def decode(tokens: list[int]) -> str:
    """Bytes as text; what is no UTF-8 shows as a replacement character."""
    return bytes(tokens).decode(errors="replace")
