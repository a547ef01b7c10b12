"""Runs the tests of DDP that are in torch's wheel: python -m tests.pytorch_ddp hook:identity [REGEX] [--out FILE].

The mode is plain, hook:CODEC or attach:RECIPE. Each test runs in two processes under gloo.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import tempfile
import unittest
from collections import Counter
from pathlib import Path

import torch

from tests.pytorch_ddp.adapters import ADAPTERS
from tests.pytorch_ddp.no_gpu import pretend_gpus

ABOUT_DDP = r"ddp|DDP|Distributed|parallel|no_sync|hook|static|get_future|graph|unused"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pytorch_ddp", description=__doc__)
    parser.add_argument("mode")
    parser.add_argument("only", nargs="?", default="")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "barrier").mkdir()
        os.environ.update(
            BACKEND="gloo", WORLD_SIZE="2", TEMP_DIR=folder, DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="90"
        )
        torch.set_num_threads(1)
        pretend_gpus()
        kind, _, how = arguments.mode.partition(":")
        ADAPTERS[kind](how)
        results = run_tests(arguments.only)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1))
    print(dict(Counter(result["status"] for result in results.values())))


def run_tests(only: str) -> dict[str, dict[str, str]]:
    """Runs those whose name matches; status and reason by name."""
    from torch.testing._internal.common_utils import instantiate_parametrized_tests
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class Spawned(TestDistBackend, DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    instantiate_parametrized_tests(Spawned)
    results = {}
    for name in unittest.TestLoader().getTestCaseNames(Spawned):
        source = inspect.getsource(inspect.unwrap(getattr(Spawned, name)))
        if re.search(only, name) and re.search(ABOUT_DDP, name + source):
            results[name] = run_test(Spawned(name))
            print(f"{results[name]['status']:4}  {name}", flush=True)
    return results


def run_test(test: unittest.TestCase) -> dict[str, str]:
    result = unittest.TestResult()
    try:
        test.run(result)
    except SystemExit as ended:  # how these tests skip in a process of their own
        return {"status": "skip", "why": f"exit {ended.code}"}
    if result.skipped:
        return {"status": "skip", "why": result.skipped[0][1]}
    if result.wasSuccessful():
        return {"status": "pass", "why": ""}
    return {"status": "fail", "why": "\n".join(why for _, why in (*result.errors, *result.failures))}


main()
