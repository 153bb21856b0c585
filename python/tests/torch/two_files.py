"""One of two ranks that save a model as several files: `two_files.py MODEL OUT STORE RANK`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from sinew.torch import checkpoint
from sinew.torch.models import Settings
from sinew.torch.policy import Opening, Policy, mesh_of


def main() -> None:
    """Opens, saves, loads."""
    model, out, store, rank = sys.argv[1:]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(rank), world_size=2)
    checkpoint.ONE_FILE = 0

    def share(value: object) -> object:
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]

    opening = Opening(model, Settings("f32", "auto", "none"), "auto", 256, None, True, 1)
    policy = Policy(opening, mesh_of(2, torch.device("cpu")), torch.device("cpu"), lambda step: step(), share)
    checkpoint.save(policy, out, None)
    dist.barrier()
    checkpoint.load(policy, out, 0, None)
    dist.destroy_process_group()


main()
