"""Fixtures: one process group of one rank for tests in this process, tiny models, one server of two ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # FlexAttention then runs without a compiler
sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402
import serving  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import worlds  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the tiny model of a family once."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = worlds.make(family, folder)
        return made[family]

    return get


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Group]:
    """One server of two ranks for the whole session."""
    with serving.group(tmp_path_factory.mktemp("pair"), 2) as found:
        yield found
