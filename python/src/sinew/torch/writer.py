"""A safetensors file written one tensor after the other, hashed while its bytes are warm, and synced."""

from __future__ import annotations

import json
import os
from typing import Any

import blake3
import torch

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory, not copied."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


class Writer:
    """Writes the tensors of `entries` (name, shape) in that order."""

    def __init__(
        self, folder: str, name: str, entries: list[tuple[str, list[int]]], dtype: torch.dtype
    ) -> None:
        self.name, self.dtype = name, dtype
        self.entries = list(entries)
        self.tensors: list[dict[str, Any]] = []
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for key, shape in entries:
            size = dtype.itemsize
            for length in shape:
                size *= length
            header[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.sum = blake3.blake3(max_threads=blake3.blake3.AUTO)
        self.bytes = 0
        self.file = open(os.path.join(folder, name), "wb")  # noqa: SIM115
        self._put(len(text).to_bytes(8, "little") + text)

    def _put(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.sum.update(data)
        self.bytes += len(data)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the next tensor."""
        expected, shape = self.entries[len(self.tensors)]
        if (name, list(tensor.shape)) != (expected, list(shape)):
            raise RuntimeError(
                f"tensor {name} {list(tensor.shape)} comes where {expected} {shape} is expected"
            )
        data = bytes_of(tensor.to(self.dtype))
        self._put(data)
        self.tensors.append(
            {
                "name": name,
                "dtype": NAMES[self.dtype],
                "shape": list(shape),
                "file": self.name,
                "blake3": blake3.blake3(data).hexdigest(),
            }
        )

    def close(self) -> dict[str, Any]:
        """Syncs the file; its entry in the answer."""
        if len(self.tensors) != len(self.entries):
            raise RuntimeError(f"{self.name} misses {len(self.entries) - len(self.tensors)} tensors")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {"path": self.name, "bytes": self.bytes, "blake3": self.sum.hexdigest()}


def write_text(folder: str, name: str, text: str) -> dict[str, Any]:
    """Writes and syncs a small file."""
    data = text.encode()
    with open(os.path.join(folder, name), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"path": name, "bytes": len(data), "blake3": blake3.blake3(data).hexdigest()}


def existing(folder: str, name: str) -> dict[str, Any]:
    """The entry of a file that another library wrote; it is synced here."""
    path = os.path.join(folder, name)
    total = blake3.blake3(max_threads=blake3.blake3.AUTO)
    total.update_mmap(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"path": name, "bytes": os.path.getsize(path), "blake3": total.hexdigest()}
