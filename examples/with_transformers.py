"""Trains a Hugging Face Trainer by a recipe; only one callback is added.

torchrun --standalone --nproc-per-node 2 examples/with_transformers.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from farflung.integrations.transformers import FarflungCallback

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--recipe", default="synchronous(codec=error_feedback(topk(0.1)))")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--folder", default="trained", help="folder for the trainer's output")
parser.add_argument("--resume", help="checkpoint, in that folder or another")
options = parser.parse_args()


class Regression(nn.Module):
    """Linear regression that returns its loss first, as the trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean squared error and the outputs."""
        outputs = self.layer(inputs)
        return nn.functional.mse_loss(outputs, labels), outputs


class Sums(Dataset[dict[str, Tensor]]):
    """Random vectors, and the sums of their entries."""

    def __init__(self) -> None:
        self._inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = self._inputs[index]
        return {"inputs": inputs, "labels": inputs.sum(dim=0, keepdim=True)}


model = Regression()
trainer = Trainer(
    model,
    TrainingArguments(
        options.folder,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=0.1,
        use_cpu=True,
        report_to="none",
        save_steps=10,
        disable_tqdm=True,
    ),
    train_dataset=Sums(),
)
trainer.add_callback(FarflungCallback(trainer, options.recipe))
trainer.train(resume_from_checkpoint=options.resume)
