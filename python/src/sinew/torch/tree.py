"""The tree of a lane as input of a model: positions, attention masks, or flat rows.

A model that passes the start-up test (`models.py`) computes shared prefixes once, under a mask by ancestry.
Any other model gets each leaf's path as a separate row, padded at its end, under plain causal attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .lanes import Lane

FLEX_STEP = 512
"""FlexAttention compiles by length, so lengths are padded to multiples of this."""


@dataclass(frozen=True)
class Form:
    """The form of the input: flat rows, one mask, or a mask for each layer type."""

    flat: bool
    attention: str
    windows: dict[str, int | None] | None = None
    """Sliding window in tokens by layer type. Type "" stands for a single mask for all layers."""
    why_flat: str | None = None


@dataclass
class Pass:
    """Input of one call of the base model."""

    ids: torch.Tensor
    positions: torch.Tensor
    mask: Any
    rows: np.ndarray
    """Trie row at each place, -1 for padding."""


@dataclass
class Batch:
    """All passes of a lane, and where the hidden state of each trie row stands in their concatenation."""

    passes: list[Pass]
    places: np.ndarray


def owners(lane: Lane) -> tuple[np.ndarray, np.ndarray]:
    """Segment and position of each trie row."""
    segments = lane.segments
    owner = np.repeat(np.arange(len(segments)), segments[:, 1])
    return owner, segments[owner, 2] + np.arange(len(lane.tokens)) - segments[owner, 0]


def intervals(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Depth-first numbers: `b` descends from `a` if and only if `enter[a] <= enter[b] < leave[a]`."""
    count = len(parents)
    size = np.ones(count, np.int64)
    for index in range(count - 1, -1, -1):
        if parents[index] >= 0:
            size[parents[index]] += size[index]
    enter, free, roots = np.zeros(count, np.int64), np.zeros(count, np.int64), 0
    for index, parent in enumerate(parents):
        if parent < 0:
            enter[index], roots = roots, roots + size[index]
        else:
            enter[index] = free[parent]
            free[parent] += size[index]
        free[index] = enter[index] + 1
    return enter, enter + size


class Ancestry:
    """Tensors that decide which token a token attends to, among `rows` of the trie and padding."""

    def __init__(self, lane: Lane, rows: np.ndarray, length: int, device: torch.device) -> None:
        owner, position = (column[rows] for column in owners(lane))
        enter, leave = intervals(lane.segments[:, 3] - 1)
        spare = length - len(rows)
        # Padding is a separate root: each row must attend to something.
        top = int(leave.max())
        columns = [
            np.concatenate([enter[owner], np.full(spare, top)]),
            np.concatenate([leave[owner], np.full(spare, top + 1)]),
            np.concatenate([position, np.arange(spare)]),
        ]
        self.enter, self.leave, self.position = (torch.from_numpy(c).to(device) for c in columns)
        self.length, self.device = length, device

    def rule(self, window: int | None) -> Any:
        """Decides whether row `query` attends to row `key`, in the form that FlexAttention compiles."""
        enter, leave, position = self.enter, self.leave, self.position

        def allowed(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            above = (enter[key] <= enter[query]) & (enter[query] < leave[key])
            seen = above & ((enter[key] != enter[query]) | (key <= query))
            return seen if window is None else seen & (position[query] - position[key] < window)

        return allowed

    def mask(self, attention: str, window: int | None, dtype: torch.dtype) -> Any:
        """The mask in the form that the attention implementation takes."""
        if attention == "flex_attention":
            from torch.nn.attention.flex_attention import create_block_mask

            # Compiled, it never holds the square mask, which takes 4 GiB for 64k tokens.
            compiled = self.device.type == "cuda"
            size = self.length
            return create_block_mask(
                self.rule(window), None, None, size, size, device=self.device, _compile=compiled
            )
        rows = torch.arange(self.length, device=self.device)
        seen = self.rule(window)(0, 0, rows[:, None], rows[None, :])[None, None]
        if attention == "sdpa":
            return seen
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def trees(lane: Lane) -> list[np.ndarray]:
    """The rows of each tree of the trie, in order."""
    root = np.arange(len(lane.segments))
    for index, parent in enumerate(lane.segments[:, 3] - 1):
        if parent >= 0:
            root[index] = root[parent]
    of = root[owners(lane)[0]]
    return [np.flatnonzero(of == one) for one in np.unique(of)]


def shared_rows(lane: Lane, flex: bool) -> list[np.ndarray]:
    """The trie rows of each row of a batch. A dense mask costs the square of a row's length, and trees do not
    attend to each other: rows are as long as the longest tree, unless padding would add more than half."""
    count = len(lane.tokens)
    if flex:
        return [np.arange(count)]
    largest_first = sorted(trees(lane), key=len, reverse=True)
    length = len(largest_first[0])
    filled: list[list[np.ndarray]] = []
    for one in largest_first:
        room = (row for row in filled if sum(map(len, row)) + len(one) <= length)
        row = next(room, None)
        if row is None:
            filled.append([one])
        else:
            row.append(one)
    if 2 * len(filled) * length > 3 * count:
        return [np.arange(count)]
    return [np.sort(np.concatenate(row)) for row in filled]


def shared_batch(lane: Lane, form: Form, device: torch.device, dtype: torch.dtype) -> Batch:
    """The lane in one pass in which each shared prefix stands once."""
    flex = form.attention == "flex_attention"
    rows = shared_rows(lane, flex)
    longest = max(len(one) for one in rows)
    length = -(-longest // FLEX_STEP) * FLEX_STEP if flex else longest
    ancestries = [Ancestry(lane, one, length, device) for one in rows]
    assert form.windows is not None
    masks = {}
    for kind, window in form.windows.items():
        made = [one.mask(form.attention, window, dtype) for one in ancestries]
        masks[kind] = made[0] if flex else torch.cat(made)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    places = np.zeros(len(lane.tokens), np.int64)
    owner = np.full(len(rows) * length, -1)
    for index, one in enumerate(rows):
        ids[index, : len(one)] = torch.from_numpy(lane.tokens[one])
        places[one] = index * length + np.arange(len(one))
    owner[places] = np.arange(len(lane.tokens))
    positions = torch.stack([one.position for one in ancestries])
    mask = masks[""] if "" in masks else masks
    return Batch([Pass(ids.to(device), positions, mask, owner)], places)


def paths(lane: Lane) -> list[np.ndarray]:
    """The trie rows of each leaf's path, root first."""
    parents = (lane.segments[:, 3] - 1).tolist()
    spans = [np.arange(start, start + length) for start, length in lane.segments[:, :2].tolist()]
    inner = set(parents)
    found = []
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        path, at = [], leaf
        while at >= 0:
            path.append(spans[at])
            at = parents[at]
        found.append(np.concatenate(path[::-1]))
    return found


def chunks(lane: Lane, budget: int) -> list[list[np.ndarray]]:
    """Rows of similar length together, each chunk with at most `budget` tokens when padded."""
    rows = sorted(paths(lane), key=len, reverse=True)
    cut: list[list[np.ndarray]] = []
    for row in rows:
        if cut and (len(cut[-1]) + 1) * len(cut[-1][0]) <= budget:
            cut[-1].append(row)
        else:
            cut.append([row])
    return cut


def flat_batch(lane: Lane, budget: int, passes: int, device: torch.device) -> Batch:
    """The lane as padded rows without sharing, in exactly `passes` calls (the number is equal on all
    ranks)."""
    _, position = owners(lane)
    places = np.full(len(lane.tokens), -1)
    made: list[Pass] = []
    offset = 0
    cut = chunks(lane, budget)
    for chunk in cut + [cut[-1][-1:]] * (passes - len(cut)):
        length = len(chunk[0])
        ids = np.zeros((len(chunk), length), np.int64)
        positions = np.zeros_like(ids)
        held = np.full_like(ids, -1)
        for index, row in enumerate(chunk):
            ids[index, : len(row)] = lane.tokens[row]
            held[index, : len(row)] = row
            # Padding continues the row: a jump would look like packed sequences to `transformers`.
            positions[index] = position[row[0]] + np.arange(length)
            new = places[row] < 0
            places[row[new]] = offset + index * length + np.flatnonzero(new)
        offset += ids.size
        columns = (torch.from_numpy(column).to(device) for column in (ids, positions))
        made.append(Pass(*columns, None, held.flatten()))
    return Batch(made, places)
