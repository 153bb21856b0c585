"""Makes quants.gguf: one tensor for each stored type, and beside it `TYPE.expected` in F32.

Run: python make_quants.py     (gguf 0.19)

The blocks hold random bits, so that every bit of a format matters; their f16 scales are set to
small numbers. The expected values are those of the `gguf` package, an independent decoder.
"""
import pathlib

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

T = gguf.GGMLQuantizationType
# Byte offsets of the f16 scales inside a block.
SCALES = {T.F16: None, T.BF16: None, T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2],
          T.Q8_0: [0], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}

rng = np.random.default_rng(0)
w = gguf.GGUFWriter(pathlib.Path(__file__).parent / "quants.gguf", "llama")
for kind, scales in SCALES.items():
    values, size = GGML_QUANT_SIZES[kind]
    blocks = 2 * 512 // values
    if scales is None:
        plain = rng.normal(size=512 * 2).astype(np.float32)
        if kind == T.F16:
            raw = plain.astype(np.float16).view(np.uint8)
        else:
            raw = (plain.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        raw = rng.integers(0, 256, size=(blocks, size), dtype=np.uint8)
        for at in scales:
            scale = rng.normal(size=blocks).astype(np.float16) * np.float16(0.01)
            raw[:, at:at + 2] = scale.view(np.uint8).reshape(blocks, 2)
    raw = raw.reshape(2, -1)
    w.add_tensor(kind.name, raw, raw_dtype=kind)
    w.add_tensor(kind.name + ".expected", dequantize(raw, kind).reshape(2, 512).astype(np.float32))
w.write_header_to_file()
w.write_kv_data_to_file()
w.write_tensors_to_file()
w.close()
