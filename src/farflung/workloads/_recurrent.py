"""Recurrent networks over numbered symbols: one answer per text, or one per position."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from farflung.data.text import PADDING

__all__ = ["AttentiveClassifier", "NextSymbol", "TextClassifier"]


class TextClassifier(nn.Module):
    """Embedding, LSTM in both directions, the largest of each feature over the words, one dense layer.

    Args:
      size: entries of the vocabulary.
      width: of the embedding.
      hidden: of the LSTM, in each direction.
      classes: outputs.
    """

    def __init__(self, size: int, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, width, padding_idx=PADDING)
        self.lstm = nn.LSTM(width, hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(2 * hidden, classes)

    @override
    def forward(self, words: Tensor) -> Tensor:
        """Logits, shape ``(n, classes)``, of ``words``, shape ``(n, length)``."""
        states, _ = self.lstm(self.embedding(words))
        states = states.masked_fill((words == PADDING).unsqueeze(-1), -1.0)  # no state of an LSTM is below -1
        logits: Tensor = self.head(self.dropout(states.amax(dim=1)))
        return logits


class AttentiveClassifier(nn.Module):
    r"""Embedding, two LSTMs in both directions one on the other, attention over the words in each, two dense layers.

    .. math:: y_l = \sum_t \alpha_{lt} h_{lt}, \qquad \alpha_l = \mathrm{softmax}_t\, \mathrm{ReLU}(a_l^\top h_{lt})

    Padding gets no attention. The dense layers see both layers' :math:`y_l`.

    Args:
      size: entries of the vocabulary.
      width: of the embedding.
      hidden: of each LSTM, in each direction.
      classes: outputs.

    References: the released code of Zeng et al. 2021 (Mercury), whose batch norm between the dense layers is left out,
      since a step may be made of one sample.
    """

    def __init__(self, size: int, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, width, padding_idx=PADDING)
        self.lstms = nn.ModuleList(
            nn.LSTM(inputs, hidden, batch_first=True, bidirectional=True) for inputs in (width, 2 * hidden)
        )
        self.attention = nn.ModuleList(nn.Linear(2 * hidden, 1, bias=False) for _ in self.lstms)
        both = 4 * hidden
        self.head = nn.Sequential(
            nn.Dropout(0.2), nn.Linear(both, both), nn.ReLU(), nn.Dropout(0.2), nn.Linear(both, classes)
        )

    @override
    def forward(self, words: Tensor) -> Tensor:
        """Logits, shape ``(n, classes)``, of ``words``, shape ``(n, length)``."""
        states, seen = self.embedding(words), []
        padding = (words == PADDING).unsqueeze(-1)
        for lstm, attention in zip(self.lstms, self.attention, strict=True):
            states, _ = lstm(states)
            scores = torch.relu(attention(states)).masked_fill(padding, torch.finfo(states.dtype).min)
            seen.append((scores.softmax(dim=1) * states).sum(dim=1))
        logits: Tensor = self.head(torch.cat(seen, dim=1))
        return logits


class NextSymbol(nn.Module):
    """Embedding, LSTM, one dense layer at every position.

    Args:
      symbols: how many there are.
      width: of the embedding.
      hidden: of the LSTM.
    """

    def __init__(self, symbols: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, symbols)
        with torch.no_grad():  # remember by default: forget gates start open
            self.lstm.get_parameter("bias_ih_l0")[hidden : 2 * hidden].fill_(1.0)

    @override
    def forward(self, symbols: Tensor) -> Tensor:
        """Logits of what follows each position, shape ``(n, length, symbols)``."""
        states, _ = self.lstm(self.embedding(symbols))
        logits: Tensor = self.head(states)
        return logits
