"""Training under DistributedDataParallel with compressed gradients, and a checkpoint of the codec's state.

torchrun --standalone --nproc-per-node 2 examples/ddp_compressed.py --codec "error_feedback(topk(0.01))"
torchrun --standalone --nproc-per-node 2 examples/ddp_compressed.py --codec "powersgd(rank=2)" --checkpoint kept
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import farflung
from farflung.loop.optimizers import get_optimizer_state, load_optimizer_state
from farflung.seeding import create_generator
from farflung.state_trees import load_tree, save_tree
from farflung.workloads import create_workload

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--codec", default="error_feedback(topk(0.01))", help="or a reducer")
parser.add_argument("--workload", default="fashion-mnist/cnn")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--learning-rate", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument(
    "--checkpoint", type=Path, help="folder of the checkpoint, to resume from if it exists, and to write"
)
options = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
task = create_workload(options.workload)
train, test = task.load_datasets()
model = task.build_model(create_generator(options.seed, "model"))
optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)
ddp = DistributedDataParallel(model)
state, hook = farflung.ddp_hook(options.codec, seed=options.seed)
ddp.register_comm_hook(state, hook)

first, file = 0, options.checkpoint and options.checkpoint / f"rank-{rank}.safetensors"  # one for each rank
if file and file.exists():
    kept = load_tree(file)
    model.load_state_dict(kept["model"])
    load_optimizer_state(optimizer, kept["optimizer"])
    state.load_state_dict(kept["codec"])
    first = state.step

order = torch.randperm(len(train), generator=create_generator(options.seed, "order"))
for step in range(first, first + options.steps):
    places = torch.arange(options.batch_size) + (step * size + rank) * options.batch_size
    batch = train.take(order[places % len(order)], train=True)
    task.compute_losses(ddp, batch).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

if file:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_tree(
        file,
        {
            "model": dict(model.state_dict()),
            "optimizer": get_optimizer_state(optimizer),
            "codec": state.state_dict(),
        },
    )

with torch.no_grad():
    model.eval()
    if rank == 0:
        parts = torch.arange(len(test)).split(256)
        right = sum(float(task.compute_metrics(model, test.take(ids, train=False)).sum()) for ids in parts)
        dense = 4 * sum(parameter.numel() for parameter in model.parameters()) * options.steps
        print(
            json.dumps(
                {
                    "codec": options.codec,
                    "steps": state.step,
                    "accuracy": right / len(test),
                    "bytes_sent": state.sent_nbytes,
                    "bytes_of_dense_gradients": dense,
                }
            )
        )

dist.barrier()
state.close()
del ddp  # its destructor may wait forever for gloo's thread if it is the last to hold the group
dist.destroy_process_group()
