"""Log-probabilities, entropies and gradients of the output matrix, in chunks.

Logits are computed for the items' rows only, `chunk` rows at a time, and never kept: the backward pass
computes them again. Items that share row, temperature and mask share one distribution. All sums are in f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .lanes import Lane

NOTHING = -200.0
"""Log-probabilities below this count as 0 in entropies: their exponential is 0 in f32, and -inf * 0 is not.
"""


@dataclass(frozen=True)
class Output:
    """Scale and cap that a model applies to the product of hidden state and output matrix."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass
class Items:
    """The items of a lane on the device. Distributions are unique (row, temperature, mask)."""

    places: torch.Tensor
    """Place of each distribution's hidden state, `[distributions]`."""
    temperatures: torch.Tensor
    masks: torch.Tensor
    """Row of `table`, or -1, `[distributions]`."""
    table: torch.Tensor
    """Bit sets as int32 words, `[masks, words]`."""
    owner: torch.Tensor
    """Distribution of each item, ascending, `[items]`."""
    targets: torch.Tensor
    order: torch.Tensor
    """Place of each item of the request in the two tensors above."""
    starts: list[int]
    """First item of each distribution, and the number of items at the end."""


def items_of(lane: Lane, places: np.ndarray, device: torch.device) -> Items:
    """The items of a lane, sorted by distribution."""
    heat = lane.temperatures.view(np.uint32).astype(np.int64)
    keys = np.stack([lane.rows, heat, lane.masks], axis=1)
    unique, owner = np.unique(keys, axis=0, return_inverse=True)
    owner = owner.reshape(-1)
    sorting = np.argsort(owner, kind="stable")
    order = np.empty_like(sorting)
    order[sorting] = np.arange(len(sorting))

    def put(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return Items(
        places=put(places[unique[:, 0]]),
        temperatures=put(unique[:, 1].astype(np.uint32).view(np.float32)),
        masks=put(unique[:, 2]),
        table=put(lane.mask_table.view(np.int32)),
        owner=put(owner[sorting]),
        targets=put(lane.targets[sorting]),
        order=put(order),
        starts=np.searchsorted(owner[sorting], np.arange(len(unique) + 1)).tolist(),
    )


def forbidden(items: Items, rows: slice, vocabulary: int) -> torch.Tensor | None:
    """`[rows, vocabulary]`, true where a token is not allowed; nothing if all tokens are."""
    masks = items.masks[rows]
    if not items.table.numel() or not bool((masks >= 0).any()):
        return None
    words = items.table[masks.clamp(min=0)]
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = ((words[:, :, None] >> bits) & 1).reshape(len(masks), -1)[:, :vocabulary].bool()
    if allowed.shape[1] < vocabulary:
        allowed = torch.nn.functional.pad(allowed, (0, vocabulary - allowed.shape[1]))
    return ~allowed & (masks >= 0)[:, None]


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Matrix product with f32 sums and an f32 result."""
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def logits_of(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, output: Output
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits in f32, and the hyperbolic tangent when they are capped softly."""
    logits = product(hidden, weight.t())
    if bias is not None:
        logits = logits + bias.float()
    if output.scale != 1.0:
        logits = logits * output.scale
    if output.softcap is None:
        return logits, None
    squashed = torch.tanh(logits / output.softcap)
    return squashed * output.softcap, squashed


def chunk_logits(ctx: Any, rows: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits over temperature, among allowed tokens, of some distributions."""
    logits, squashed = logits_of(ctx.hidden[rows], ctx.weight, ctx.bias, ctx.output)
    logits = logits / ctx.items.temperatures[rows, None]
    banned = forbidden(ctx.items, rows, logits.shape[1])
    if banned is not None:
        logits = logits.masked_fill(banned, float("-inf"))
    return logits, squashed


@dataclass
class _State:
    """Input of forward and backward of a chunk."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    items: Items
    output: Output
    chunk: int

    def parts(self) -> list[tuple[slice, slice]]:
        """Distributions and items of each chunk."""
        starts, count = self.items.starts, len(self.hidden)
        ends = [(at, min(at + self.chunk, count)) for at in range(0, count, self.chunk)]
        return [(slice(a, b), slice(starts[a], starts[b])) for a, b in ends]


class Scores(torch.autograd.Function):
    """Log-probabilities `[items]` and entropies `[distributions]`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        items: Items,
        output: Output,
        chunk: int,
        entropies: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = _State(hidden, weight, bias, items, output, chunk)
        scores = torch.empty(len(items.targets), device=hidden.device)
        spread = torch.zeros(len(hidden), device=hidden.device)
        for rows, own in state.parts():
            logits, _ = chunk_logits(state, rows)
            total = torch.logsumexp(logits, dim=1)
            owner = items.owner[own] - rows.start
            scores[own] = logits[owner, items.targets[own]] - total[owner]
            if entropies:
                shifted = logits.sub_(total[:, None])
                terms = shifted.exp() * shifted.clamp_(min=NOTHING)
                spread[rows] = -terms.sum(dim=1)
        ctx.save_for_backward(hidden, weight, bias, spread)
        ctx.rest = (items, output, chunk, entropies)
        return scores, spread

    @staticmethod
    def backward(ctx: Any, d_scores: torch.Tensor, d_spread: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, spread = ctx.saved_tensors
        items, output, chunk, entropies = ctx.rest
        state = _State(hidden, weight, bias, items, output, chunk)
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias else None
        for rows, own in state.parts():
            d_logits = _d_logits(state, rows, own, d_scores, d_spread if entropies else None, spread)
            narrow = d_logits.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[rows] = (narrow @ weight).to(hidden.dtype)
            if d_weight is not None and narrow.dtype == torch.float32:
                d_weight.addmm_(narrow.t(), hidden[rows])
            elif d_weight is not None:
                d_weight += product(narrow.t(), hidden[rows])
            if d_bias is not None:
                d_bias += d_logits.sum(dim=0)
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        if d_bias is not None:
            d_bias = d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _d_logits(
    state: _State,
    rows: slice,
    own: slice,
    d_scores: torch.Tensor,
    d_spread: torch.Tensor | None,
    spread: torch.Tensor,
) -> torch.Tensor:
    """Derivatives by the logits before temperature, cap and scale."""
    items = state.items
    logits, squashed = chunk_logits(state, rows)
    total = torch.logsumexp(logits, dim=1)
    shifted = logits.sub_(total[:, None])
    share = shifted.exp()
    owner = items.owner[own] - rows.start
    outer = torch.zeros(len(share), device=share.device).index_put_((owner,), d_scores[own], accumulate=True)
    if d_spread is None:
        slope = share.mul_(-outer[:, None])
    else:
        finite = shifted.clamp_(min=NOTHING)
        pull = finite.add_(spread[rows, None]).mul_(d_spread[rows, None])
        slope = share.mul_(pull.add_(outer[:, None]).neg_())
    slope.index_put_((owner, items.targets[own]), d_scores[own], accumulate=True)
    slope /= items.temperatures[rows, None]
    if squashed is not None:
        slope *= 1 - squashed.square()
    if state.output.scale != 1.0:
        slope *= state.output.scale
    return slope


@torch.no_grad()
def top(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    items: Items,
    output: Output,
    chunk: int,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` most likely tokens of each item with their log-probabilities, best first."""
    state = _State(hidden, weight, bias, items, output, chunk)
    ids = torch.empty(len(hidden), k, dtype=torch.long, device=hidden.device)
    scores = torch.empty(len(hidden), k, device=hidden.device)
    for rows, _ in state.parts():
        logits, _ = chunk_logits(state, rows)
        best = torch.topk(logits, k, dim=1)
        ids[rows] = best.indices
        scores[rows] = best.values - torch.logsumexp(logits, dim=1, keepdim=True)
    wanted = items.owner[items.order]
    return ids[wanted], scores[wanted]
