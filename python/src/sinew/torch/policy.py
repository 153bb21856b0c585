"""The policy of this rank: the trained model, frozen scorers, the critic's head, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .errors import Refused
from .lanes import Lane
from .member import Member, load
from .models import Settings
from .optimizer import AdamW, Trained, Update, decays

VALUE_HEAD = "value_head"
OUTPUTS = ("logprobs", "entropies", "values", "router")
"""Names of what a pass gives: a column each, and the load-balancing loss."""


@dataclass
class Opening:
    """The request `open`, validated."""

    model: str
    settings: Settings
    sharing: str
    max_tokens: int
    chunk: int | None
    deterministic: bool
    seed: int
    critic: np.ndarray | None = None
    critic_scale: float = 1.0
    frozen: dict[str, str] = field(default_factory=dict)
    router_loss: bool = False


class Policy:
    """Computes this rank's lane of each wave. All methods are called by every rank in the same order."""

    def __init__(
        self,
        opening: Opening,
        mesh: DeviceMesh,
        device: torch.device,
        agree: Callable[[Callable[[], Any]], Any],
        share: Callable[[Any], Any],
    ) -> None:
        self.opening, self.mesh, self.device, self.agree = opening, mesh, device, agree
        self.rank, self.world = mesh.get_local_rank(), mesh.size()
        torch.manual_seed(opening.seed)
        torch.use_deterministic_algorithms(opening.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False
        self.members: dict[str, Member] = {}
        for name, folder in {"policy": opening.model, **opening.frozen}.items():
            loaded, wrapped = load(folder, opening.settings, mesh, device, name == "policy", agree, share)
            member = Member(loaded, wrapped, opening.settings, device, opening.max_tokens, opening.chunk)
            agree(lambda member=member: member.test(opening.sharing))
            self.members[name] = member
        self.main = self.members["policy"]
        agree(lambda: self.main.route(opening.router_loss))
        self.critic = self._critic()
        self.optimizer = AdamW(self._trained(), self.rank)
        self.outputs: tuple[torch.Tensor, ...] | None = None
        self.kept: Lane | None = None
        self.on_host = False
        self.carried: list[tuple[str, list[int]]] | None = None

    def _critic(self) -> torch.nn.Parameter | None:
        head = self.opening.critic
        if head is None:
            return None
        if len(head) != self.main.hidden + 1:
            raise Refused(
                f"critic.head is {len(head)} numbers, allowed is hidden + 1 = {self.main.hidden + 1}"
            )
        return torch.nn.Parameter(torch.from_numpy(head.copy()).to(self.device))

    def _trained(self) -> list[Trained]:
        named = [(n, t) for n, t in self.main.loaded.tensors.items() if t.requires_grad]
        trained = [Trained(name, tensor, decays(name, tensor)) for name, tensor in named]
        if self.critic is not None:
            trained.append(Trained(VALUE_HEAD, self.critic, False, self.opening.critic_scale))
        return trained

    def counts(self) -> tuple[int, int]:
        """Number of parameters, and of those that are trained."""
        tensors = self.main.loaded.tensors.values()
        extra = self.critic.numel() if self.critic is not None else 0
        trained = sum(t.numel() for t in tensors if t.requires_grad)
        return sum(t.numel() for t in tensors) + extra, trained + extra

    def member(self, of: str) -> Member:
        """The model that a request names."""
        return self.main if of == "base" else self.members[of]

    def drop(self) -> None:
        """Drops the activations of the last forward pass."""
        if self.outputs is not None:
            self.outputs = self.kept = None
            self.main.settle()

    def forward(
        self, lane: Lane, of: str, passes: int, entropies: bool, values: bool, backward: bool
    ) -> dict[str, Any]:
        """Scores of the lane. With `backward`, activations are kept until the next pass, `backward` or
        `zero`."""
        self.drop()
        member = self.member(of)
        value = self.critic if values else None
        grad = torch.enable_grad() if backward else torch.no_grad()
        balance = self.opening.router_loss and backward
        with grad, member.without_adapters(of == "base"):
            found = member.scores(lane, passes, entropies, value, balance)
        if backward:
            self.outputs, self.kept = found, lane
        answer: dict[str, Any] = {name: little(part) for name, part in zip(OUTPUTS[:3], found, strict=False)}
        return answer | ({"router": float(found[3].detach())} if balance else {})

    def backward(self, grads: dict[str, np.ndarray] | None) -> None:
        """Adds the gradients of the last forward pass, given derivatives by its scores (zero without any)."""
        assert self.outputs is not None
        outputs, slopes = [], []
        for name, output in zip(OUTPUTS, self.outputs, strict=True):
            if not output.numel() or not output.requires_grad:
                continue
            given = grads.get(name) if grads else None
            slope = torch.zeros_like(output)
            if given is not None and len(given):
                slope = torch.from_numpy(given.astype(np.float32)).to(self.device)
            outputs.append(output)
            slopes.append(slope)
        before = self.critic.grad if self.critic is not None else None
        if self.critic is not None:
            self.critic.grad = None
        torch.autograd.backward(outputs, slopes)
        self.outputs = self.kept = None
        if self.critic is not None:
            # The critic's head is not sharded, so its gradient is summed here.
            own = self.critic.grad if self.critic.grad is not None else torch.zeros_like(self.critic)
            if self.world > 1:
                dist.all_reduce(own)
            self.critic.grad = own if before is None else before + own

    def top(self, lane: Lane, of: str, passes: int, k: int) -> dict[str, bytes]:
        """The `k` most likely tokens of each item."""
        self.drop()
        member = self.member(of)
        with member.without_adapters(of == "base"):
            ids, scores = member.best(lane, passes, k)
        return {"ids": ids.to(torch.int32).cpu().numpy().tobytes(), "logprobs": little(scores)}

    def zero(self) -> None:
        """Gradients become 0 and kept activations are dropped."""
        self.drop()
        for one in self.optimizer.trained:
            one.tensor.grad = None

    def apply(self, update: Update) -> dict[str, float | str]:
        """One update of the optimizer."""
        self.drop()
        return self.optimizer.apply(update)

    def reside(self, where: str) -> None:
        """Moves weights, gradients and moments to host memory or back."""
        self.drop()
        target = torch.device("cpu") if where == "host" else self.device
        for member in self.members.values():
            member.wrapped.to(target)
            member.loaded.tensors = dict(member.causal.named_parameters())
        if self.critic is not None:
            self.critic.data = self.critic.data.to(target)
        by_name = dict(self.main.loaded.tensors)
        for one in self.optimizer.trained:
            one.tensor = by_name.get(one.name, one.tensor)
            if one.tensor.grad is not None:
                one.tensor.grad = one.tensor.grad.to(target)
        moments = self.optimizer.moments
        self.optimizer.moments = {n: (m.to(target), v.to(target)) for n, (m, v) in moments.items()}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.on_host = where == "host"


def little(tensor: torch.Tensor) -> bytes:
    """A column of f32."""
    return tensor.detach().float().cpu().numpy().astype("<f4", copy=False).tobytes()


def mesh_of(world: int, device: torch.device) -> DeviceMesh:
    """All ranks in one dimension."""
    return DeviceMesh(device.type, torch.arange(world))
