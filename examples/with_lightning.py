"""Trains a LightningModule by a recipe; only the strategy changes.

torchrun --standalone --nproc-per-node 2 examples/with_lightning.py
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from farflung.integrations.lightning import FarflungStrategy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--recipe", default="synchronous(codec=int8)")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--folder", default=".", help="for checkpoints")
parser.add_argument("--resume", help="a checkpoint")
parser.add_argument("--batch-size", type=int, default=8)
options = parser.parse_args()


class Regression(lightning.LightningModule):
    """Finds the weights of a linear function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        """Returns the mean squared error."""
        del number
        inputs, targets = batch
        return nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns SGD with momentum; under local steps each replica has its own momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


torch.manual_seed(0)
inputs = torch.randn(160, 8)
loader = DataLoader(
    TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=options.batch_size, shuffle=True
)
model = Regression()
trainer = lightning.Trainer(
    strategy=FarflungStrategy(options.recipe),
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    max_steps=options.steps,
    max_epochs=-1,
    callbacks=[ModelCheckpoint(options.folder, save_top_k=-1, save_on_train_epoch_end=True)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader, ckpt_path=options.resume)
