"""Ranks whose models were made apart train as if all had been made as rank 0's."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests import attach_jobs
from tests.pool import Pool, digest


def trains(rank: int, size: int, store: dist.Store, *, how: str, apart: bool) -> str:
    """What a rank ends with, from parameters of its own or those that rank 0 makes."""
    with attach_jobs.attached(rank, size, store, how=how, at=rank if apart else 0) as handle:
        attach_jobs.plain(handle._model, handle._optimizer, handle.no_sync, rank)
    return digest(dict(handle._model.state_dict()))


@pytest.mark.parametrize("how", ["local_sgd(2)", "diloco(sync_every=2)", "delayed(2, pull='swap')"])
def test_updates_are_those_from_rank_0s_parameters(pool: Pool, how: str) -> None:
    ends, wanted = (pool.run(2, f"{__name__}.trains", how=how, apart=apart) for apart in (True, False))
    assert ends == wanted
