"""Some of PyTorch's own tests of DDP, with the hook and over attach: only what is explained here fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PASSED_BY_THE_HOOK = (
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_ddp_create_graph",
    "test_ddp_join_model_equivalence",
    "test_ddp_static_graph_nested_types",
    "test_skip_all_reduce_unused_parameters",
)
FAILED_BY_THE_HOOK = {
    "test_ddp_comm_hook_logging": "looks for a DDP without a hook",
    "test_ddp_grad_div_uneven_inputs": "divides by the ranks that have data, which no hook of PyTorch's does either",
    "test_ddp_profiling_torch_profiler": "counts the all-reduces of gloo",
}
PASSED_BY_ATTACH = (
    "test_accumulate_gradients_no_sync",
    "test_ddp_forward_backward_hook",
    "test_ddp_namedtuple",
    "test_ddp_shared_grad_acc_unused_params",
)
FAILED_BY_ATTACH = {"test_ddp_sink_noclone": "sets an option of DDP's"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "passed", "failed"),
    [
        ("plain", PASSED_BY_THE_HOOK, {}),
        ("hook:identity", PASSED_BY_THE_HOOK, FAILED_BY_THE_HOOK),
        ("attach:synchronous", PASSED_BY_ATTACH, FAILED_BY_ATTACH),
    ],
)
def test_what_fails_is_what_is_explained(
    tmp_path: Path, mode: str, passed: tuple[str, ...], failed: dict[str, str]
) -> None:
    out = tmp_path / "results.json"
    only = f"^({'|'.join((*passed, *failed))})$"
    command = [sys.executable, "-m", "tests.pytorch_ddp", mode, only, "--out", str(out)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=500)
    statuses = {name: result["status"] for name, result in json.loads(out.read_text()).items()}
    assert statuses == dict.fromkeys(passed, "pass") | dict.fromkeys(failed, "fail")
