"""Makes ``src/farflung/devices/reference.toml``: what coding takes on this machine, and how fast it trains.

The coding of devices that are known by their data sheets is in proportion to it. To be run on a machine that does
nothing else, with torch's version in constraints.txt: ``OMP_NUM_THREADS=1 python scripts/measure_reference_device.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from farflung.calibration import (
    build_coding_tasks,
    build_ladder,
    calibrate,
    count_forward_flops,
    measure_coding,
    measure_message_cpu_costs,
)
from farflung.config import Training
from farflung.devices import CodingRates, DeviceProfile, format_device
from farflung.workloads import create_workload

WORKLOAD, BATCH_SIZE = "cifar10/resnet20", 16
CODECS = (
    "dgc(density=0.01)",
    "error_feedback(chunked_topk)",
    "error_feedback(chunked_topk, decay=0.95)",
    "error_feedback(int8)",
    "error_feedback(qsgd(bits=4))",
    "error_feedback(randomk(unbiased=False))",
    "error_feedback(sign)",
    "error_feedback(sign(bucket_size=1024))",
    "error_feedback(topk(density=0.001))",
    "error_feedback(topk(density=0.1))",
    "qsgd(bits=2)",
    "qsgd(bits=4)",
    "qsgd(bits=8)",
    "randomk(density=0.1)",
    "topk(density=0.001)",
    "topk(density=0.1)",
)
"""Besides all with their default options: what people ask for most."""
REDUCERS = (
    "powersgd(rank=1)",
    "powersgd(rank=2)",
    "powersgd(rank=4)",
    "shared_scale_qsgd(bits=4)",
    "shared_scale_qsgd(bits=8)",
)
ROUNDS = 9
TARGET = Path(__file__).parents[1] / "src" / "farflung" / "devices" / "reference.toml"


def main() -> int:
    """Measures, and writes the file."""
    torch.set_num_threads(1)
    work = create_workload(WORKLOAD)
    trained = calibrate(work, Training.resolve(work.defaults, {"batch_size": BATCH_SIZE})).device
    sample_s = trained.forward_per_sample_s + trained.backward_per_sample_s
    tasks = {task.name: task for task in (*build_coding_tasks(), *build_coding_tasks(CODECS, REDUCERS))}
    points = measure_coding(
        tasks.values(), build_ladder(), rounds=ROUNDS, on_begin=lambda name: print(name, flush=True)
    )
    device = DeviceProfile(_processor(), coding=CodingRates(points, *measure_message_cpu_costs()))
    notes = [
        "Written by scripts/measure_reference_device.py; see there.",
        f"{_processor()}, one thread, torch {torch.__version__}; flops_per_s: {WORKLOAD}, batches of {BATCH_SIZE}",
    ]
    passes = 3 * count_forward_flops(work)  # the backward pass makes two products for one of the forward pass
    text = format_device(device, comments=notes).splitlines(keepends=True)
    kept = [line for line in text if not line.startswith(("backward_s", "cores", "optimizer_s", "slowdown"))]
    TARGET.write_text(
        "".join(
            f"flops_per_s = {passes / sample_s:.4g}\n" if line.startswith("forward_s") else line
            for line in kept
        ),
        encoding="utf-8",
    )
    return 0


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name, family, model = (
        next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}\t"))
        for key in ("model name", "cpu family", "model")
    )
    return f"{name} (family {family}, model {model})"


if __name__ == "__main__":
    sys.exit(main())
