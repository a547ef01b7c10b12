"""Trains under Ray Train: ray_train.py --storage /shared/ray --workers 4 --gpu"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device

import farflung
from farflung.engine.placement import move_batch
from farflung.loop.optimizers import get_optimizer_state, load_optimizer_state
from farflung.seeding import create_generator
from farflung.state_trees import load_tree, save_tree
from farflung.workloads import create_workload


def train(options: dict[str, Any]) -> None:
    task, device = create_workload(options["workload"]), get_device()
    data, _ = task.load_datasets()
    model = task.build_model(create_generator(0, "model")).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with farflung.attach(model, optimizer, options["recipe"]) as handle:
        own = f"rank-{handle.rank}.safetensors"  # residuals and late updates differ between replicas
        if (last := ray.train.get_checkpoint()) is not None:
            kept = load_tree(Path(last.to_directory(), own))
            model.load_state_dict(kept["model"])
            load_optimizer_state(optimizer, kept["optimizer"])
            handle.load_state_dict(kept["handle"])
        for step in range(handle.step, options["steps"]):
            drawn = torch.randint(len(data), (32,), generator=create_generator(0, "batch", step, handle.rank))
            loss = task.compute_losses(model, move_batch(data.take(drawn, train=True), device)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % options["every"] == 0:
                tree = {"model": dict(model.state_dict()), "optimizer": get_optimizer_state(optimizer)}
                with tempfile.TemporaryDirectory() as folder:
                    save_tree(Path(folder, own), {**tree, "handle": handle.state_dict()})
                    ray.train.report({"loss": loss.item()}, checkpoint=Checkpoint.from_directory(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", required=True, help="a folder that all nodes share, or a bucket")
    parser.add_argument("--workload", default="fashion-mnist/cnn")
    parser.add_argument("--recipe", default="synchronous")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    scaling = ScalingConfig(num_workers=options.workers, use_gpu=options.gpu)
    run = RunConfig(storage_path=options.storage, failure_config=FailureConfig(max_failures=10))
    trainer = TorchTrainer(train, train_loop_config=vars(options), scaling_config=scaling, run_config=run)
    print(trainer.fit())
