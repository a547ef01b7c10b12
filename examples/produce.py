"""Publishes a workload's training samples to Kafka, at a given rate per second, for --stream "kafka(...)".

python examples/produce.py --servers broker:9092 --topic readings --devices 4 --rate 20
python examples/produce.py --servers broker:9092 --topic "readings-{rank}" --devices 2 --rate 50 12 --samples 1000
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

import torch
from confluent_kafka import KafkaError, Message, Producer

from farflung.streams import as_messages
from farflung.workloads import create_workload

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--workload", default="fashion-mnist/cnn")
parser.add_argument("--servers", required=True, help="bootstrap servers, host:port")
parser.add_argument(
    "--topic", required=True, help="with {rank} in it one for each device; otherwise device p has partition p"
)
parser.add_argument("--devices", type=int, default=1, help="one for each replica")
parser.add_argument("--rate", type=float, nargs="+", default=[20.0], help="per second: for all, or for each")
parser.add_argument(
    "--samples", type=int, default=sys.maxsize, help="of each device; until Ctrl-C if not given"
)
options = parser.parse_args()
rates = options.rate * options.devices if len(options.rate) == 1 else options.rate
if len(rates) != options.devices:
    parser.error(f"{len(rates)} rates for {options.devices} devices")

data, _ = create_workload(options.workload).load_datasets()
order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
producer = Producer({"bootstrap.servers": options.servers, "enable.idempotence": True, "linger.ms": 5})
producer.list_topics(timeout=10)  # connects, or reports why it cannot
each = "{rank}" in options.topic
sent = [0] * options.devices


def delivered(error: KafkaError | None, message: Message) -> None:
    del message
    if error is not None:
        sys.exit(f"a message was not delivered: {error.str()}")


def send(device: int, due: int) -> None:
    """Sends the unsent ones of a device's first ``due`` samples; devices take turns in the data set."""
    numbers = torch.arange(sent[device], due) * options.devices + device
    topic, partition = options.topic.format(rank=device), 0 if each else device
    for message in as_messages(data.get_rows(order[numbers % len(data)])):
        producer.produce(topic, message, partition=partition, on_delivery=delivered)
    sent[device] = due


begin = time.monotonic()
with contextlib.suppress(KeyboardInterrupt):
    while min(sent) < options.samples:
        elapsed_s = time.monotonic() - begin
        for device, rate in enumerate(rates):
            due = min(int(elapsed_s * rate), options.samples)  # a late sample does not delay later ones
            if due > sent[device]:
                send(device, due)
        producer.poll(0)
        time.sleep(0.002)
producer.flush()
print(f"{sum(sent)} samples in {time.monotonic() - begin:.3f} s")
