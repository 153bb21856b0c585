"""A lane: the tokens, the tree and the items that one rank computes. Decoding and validation.

Rank 0 validates every lane before any rank begins, so that a bad request never leaves a rank in a collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import wrong
from .routing import FREE, Routers

ALL_ALLOWED = 0xFFFFFFFF


@dataclass(frozen=True)
class Lane:
    """Columns of a lane. `masks` holds -1 where all tokens are allowed, `experts` where a router chooses."""

    tokens: np.ndarray
    segments: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    temperatures: np.ndarray
    masks: np.ndarray
    mask_table: np.ndarray
    experts: np.ndarray | None = None
    """Experts to use, `[tokens, layers, top_k]`; nothing: all routers choose."""

    @property
    def items(self) -> int:
        """Number of log-probabilities to compute."""
        return len(self.rows)


def dummy() -> Lane:
    """The lane of a rank that has nothing to compute: it takes part in every collective."""
    zero = np.zeros(1, np.int64)
    segments = np.array([[0, 1, 0, 0]], np.int64)
    return Lane(zero, segments, zero, zero, np.ones(1, np.float32), zero - 1, np.zeros((0, 0), np.uint32))


def column(source: dict[str, Any], name: str, dtype: str, at: str) -> np.ndarray:
    """A little-endian column of the map."""
    value = source.get(name, b"")
    width = np.dtype(dtype).itemsize
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise wrong(f"{at}.{name}", value, f"a byte string of {dtype} values")
    if len(value) % width:
        raise wrong(f"{at}.{name}", f"{len(value)} bytes", f"a multiple of {width} bytes")
    return np.frombuffer(value, dtype=np.dtype(dtype).newbyteorder("<"))


def first_bad(values: np.ndarray, bad: np.ndarray, field: str, allowed: str) -> None:
    """Refuses the first value that `bad` marks."""
    if bad.any():
        at = int(np.argmax(bad))
        raise wrong(f"{field}[{at}]", values[at].item(), allowed)


def parse(
    source: Any, at: str, vocabulary: int, max_tokens: int, routers: Routers | None = None
) -> Lane:
    """The lane of a request, validated. Experts are read for a model with these routers."""
    if not isinstance(source, dict):
        raise wrong(at, source, "a map with the columns of a lane")
    tokens = column(source, "tokens", "u4", at)
    if not 1 <= len(tokens) <= max_tokens:
        raise wrong(f"{at}.tokens", f"{len(tokens)} tokens", f"1 to max_tokens = {max_tokens} tokens")
    first_bad(tokens, tokens >= vocabulary, f"{at}.tokens", f"a token id below {vocabulary}")
    segments = column(source, "segments", "u4", at)
    if len(segments) % 4 or not len(segments):
        raise wrong(
            f"{at}.segments", f"{len(segments)} numbers", "4 numbers (start, len, position, parent + 1) each"
        )
    lane = Lane(
        tokens.astype(np.int64),
        segments.reshape(-1, 4).astype(np.int64),
        column(source, "rows", "u4", at).astype(np.int64),
        column(source, "targets", "u4", at).astype(np.int64),
        column(source, "temperatures", "f4", at).astype(np.float32),
        column(source, "masks", "u4", at).astype(np.int64),
        mask_table(source, at, vocabulary),
        experts(source, at, len(tokens), routers) if routers else None,
    )
    lane.masks[lane.masks == ALL_ALLOWED] = -1
    check_segments(lane, at)
    check_items(lane, at, vocabulary)
    return lane


def mask_table(source: dict[str, Any], at: str, vocabulary: int) -> np.ndarray:
    """The bit sets of allowed tokens, one row each."""
    words = source.get("mask_words", 0)
    table = column(source, "mask_table", "u4", at)
    needed = (vocabulary + 31) // 32
    if not isinstance(words, int) or isinstance(words, bool) or not 0 <= words <= needed:
        raise wrong(f"{at}.mask_words", words, f"0 to {needed} words of 32 tokens")
    if words == 0 and len(table):
        raise wrong(f"{at}.mask_table", f"{len(table)} words", "none when mask_words is 0")
    if words and len(table) % words:
        raise wrong(f"{at}.mask_table", f"{len(table)} words", f"a multiple of mask_words = {words}")
    return table.reshape(-1, words).copy() if words else np.zeros((0, 0), np.uint32)


def experts(source: dict[str, Any], at: str, tokens: int, routers: Routers) -> np.ndarray | None:
    """The experts of each token; nothing if there are none."""
    given = column(source, "routes", "u2", at)
    if not len(given):
        return None
    field, off = f"{at}.routes", 'or set trainer.replay_routing = "off"'
    if not routers.replays:
        raise wrong(field, f"{len(given)} values", f"none: {routers.why_not}")
    shape = (tokens, source.get("route_layers"), source.get("route_top_k"))
    expected = (tokens, routers.layers, routers.top_k)
    if shape != expected or len(given) != tokens * routers.layers * routers.top_k:
        raise wrong(field, shape, f"{expected}, those of the trained model; {off}")
    found = given.reshape(expected).astype(np.int32)
    found[found == FREE] = -1
    own = found[:, sorted(routers.modules)]
    if own.size and own.max() >= routers.count:
        raise wrong(field, int(own.max()), f"the number of an expert, below {routers.count}; {off}")
    ranked = np.sort(own, axis=2)
    if ((np.diff(ranked, axis=2) == 0) & (ranked[:, :, 1:] >= 0)).any():
        raise wrong(field, "an expert twice", f"different experts for a token in a layer; {off}")
    return found


def check_segments(lane: Lane, at: str) -> None:
    """Refuses segments that are not a forest that covers the tokens in order."""
    end = 0
    for index, (start, length, _position, parent) in enumerate(lane.segments.tolist()):
        field = f"{at}.segments[{index}]"
        if length < 1:
            raise wrong(f"{field}.len", length, "at least 1")
        if start != end:
            raise wrong(f"{field}.start", start, f"{end}, where the segment before it ends")
        if parent > index:
            raise wrong(f"{field}.parent", parent - 1, f"an earlier segment, below {index}")
        end += length
    if end != len(lane.tokens):
        raise wrong(f"{at}.segments", f"{end} tokens in all", f"{len(lane.tokens)}, the number of tokens")


def check_items(lane: Lane, at: str, vocabulary: int) -> None:
    """Refuses items that name no row, no token or no mask, or whose target is not allowed."""
    count = len(lane.rows)
    for name in ("targets", "temperatures", "masks"):
        if len(getattr(lane, name)) != count:
            raise wrong(
                f"{at}.{name}", f"{len(getattr(lane, name))} values", f"{count}, one for each of rows"
            )
    if not count:
        raise wrong(f"{at}.rows", "empty", "at least one item")
    first_bad(lane.rows, lane.rows >= len(lane.tokens), f"{at}.rows", f"a row below {len(lane.tokens)}")
    first_bad(lane.targets, lane.targets >= vocabulary, f"{at}.targets", f"a token id below {vocabulary}")
    heat = lane.temperatures
    first_bad(heat, ~(np.isfinite(heat) & (heat > 0)), f"{at}.temperatures", "a finite number above 0")
    sets, words = lane.mask_table.shape
    first_bad(
        lane.masks, lane.masks >= sets, f"{at}.masks", f"an index below {sets}, or 4294967295 for all tokens"
    )
    masked = np.flatnonzero(lane.masks >= 0)
    targets = lane.targets[masked]
    word = np.minimum(targets // 32, max(words - 1, 0))
    if len(masked):
        bits = lane.mask_table[lane.masks[masked], word] >> (targets % 32).astype(np.uint32)
        bad = (bits & 1 == 0) | (targets // 32 >= words)
        if bad.any():
            item = int(masked[np.argmax(bad)])
            raise wrong(
                f"{at}.targets[{item}]", int(lane.targets[item]), "a token that the item's mask allows"
            )
