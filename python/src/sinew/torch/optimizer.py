"""AdamW with clipping by the global norm, on this rank's parts of the tensors.

The arithmetic is that of the embedded trainer: bias corrections folded into the factors in f64, epsilon
after the corrected root, clipping without epsilon. A gradient that is not finite changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


@dataclass
class Trained:
    """A trained tensor. `tensor.grad` is its gradient."""

    name: str
    tensor: torch.Tensor
    decay: bool
    lr_scale: float = 1.0


@dataclass
class Update:
    """Numbers of one update, from the request."""

    number: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    max_grad_norm: float | None


def decays(name: str, tensor: torch.Tensor) -> bool:
    """Whether weight decay applies: not to norms, biases and vectors."""
    return tensor.dim() > 1 and not name.endswith(("norm.weight", "bias"))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AdamW:
    """Moments of the trained tensors, none before the first update."""

    def __init__(self, trained: list[Trained], rank: int) -> None:
        self.trained, self.rank = trained, rank
        self.moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.number = 0
        self.skipped = False

    def zeros(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Moments of the first update, sharded like the tensors."""
        return {t.name: (torch.zeros_like(t.tensor), torch.zeros_like(t.tensor)) for t in self.trained}

    def squares(self) -> torch.Tensor:
        """Sum of squares of each tensor's gradient over all ranks, in f64."""
        sums = []
        for one in self.trained:
            grad = one.tensor.grad
            # Every rank holds the whole of an unsharded tensor: rank 0 counts it.
            if grad is None or (self.rank and not isinstance(one.tensor, DTensor)):
                sums.append(torch.zeros((), dtype=torch.float64, device=one.tensor.device))
            else:
                norm = torch.linalg.vector_norm(local(grad), dtype=torch.float64)
                sums.append(norm.square())
        total = torch.stack(sums)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total

    @torch.no_grad()
    def apply(self, update: Update) -> dict[str, float | str]:
        """One update; the answer of the protocol."""
        squares = self.squares().tolist()
        for one, square in zip(self.trained, squares, strict=True):
            if not math.isfinite(square):
                self.number, self.skipped = update.number, True
                return {"skipped": one.name}
        norm = math.sqrt(math.fsum(squares))
        limit = update.max_grad_norm
        clip = limit / norm if limit is not None and norm > limit else 1.0
        if not self.moments:
            self.moments = self.zeros()
        for one in self.trained:
            self._step(one, update, clip)
        self.number, self.skipped = update.number, False
        return {"grad_norm": norm}

    def _step(self, one: Trained, update: Update, clip: float) -> None:
        weight = local(one.tensor)
        first, second = (local(m) for m in self.moments[one.name])
        if not weight.numel():
            return
        grad = torch.zeros_like(weight) if one.tensor.grad is None else local(one.tensor.grad)
        grad = grad if clip == 1.0 else grad * clip
        lr = update.lr * one.lr_scale
        first.mul_(update.beta1).add_(grad, alpha=1 - update.beta1)
        second.mul_(update.beta2).addcmul_(grad, grad, value=1 - update.beta2)
        root = second.sqrt().mul_(1 / math.sqrt(1 - update.beta2**update.number)).add_(update.eps)
        if one.decay and update.decay:
            weight.mul_(1 - lr * update.decay)
        weight.addcdiv_(first, root, value=-lr / (1 - update.beta1**update.number))
