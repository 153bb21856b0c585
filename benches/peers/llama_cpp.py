"""Sampled tokens a second of llama.cpp. Arguments: dtype, batch.

The model is a GGUF of the same shape with random weights, made once in the temporary folder. The library is
the prebuilt one with kernels for each CPU: PEER_LLAMA_DIR is `bins/linux-x64` of the npm package
@node-llama-cpp/linux-x64, unpacked.
"""
import ctypes
import glob
import os
import sys
import tempfile
import time

import numpy as np
from llama_cpp_py_sync import _cffi_bindings as llama
from common import SHAPE, THREADS, report

PROMPT, STEPS, WARM = 64, 24, 3
dtype, batch = sys.argv[1], int(sys.argv[2])


def make_model(path):
    import gguf

    kind = {"f32": gguf.GGMLQuantizationType.F32, "bf16": gguf.GGMLQuantizationType.BF16}[dtype]
    random = np.random.default_rng(0)
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(1024)
    w.add_embedding_length(SHAPE["width"])
    w.add_block_count(SHAPE["layers"])
    w.add_feed_forward_length(SHAPE["ffn"])
    w.add_head_count(SHAPE["heads"])
    w.add_head_count_kv(SHAPE["kv_heads"])
    w.add_layer_norm_rms_eps(SHAPE["eps"])
    w.add_rope_freq_base(SHAPE["base"])
    w.add_vocab_size(SHAPE["vocab"])
    w.add_tokenizer_model("llama")
    w.add_token_list([f"<{i}>".encode() for i in range(SHAPE["vocab"])])
    w.add_token_scores([0.0] * SHAPE["vocab"])
    w.add_token_types([int(gguf.TokenType.NORMAL)] * SHAPE["vocab"])

    def matrix(name, rows, cols):
        values = (0.02 * random.standard_normal((rows, cols))).astype(np.float32)
        data = gguf.quants.quantize(values, kind)
        w.add_tensor(name, data, raw_dtype=kind)

    def norm(name):
        w.add_tensor(name, np.ones(SHAPE["width"], np.float32))

    q, kv, d = SHAPE["heads"] * SHAPE["head"], SHAPE["kv_heads"] * SHAPE["head"], SHAPE["width"]
    matrix("token_embd.weight", SHAPE["vocab"], d)
    norm("output_norm.weight")
    for i in range(SHAPE["layers"]):
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        for name, rows, cols in [
            ("attn_q", q, d),
            ("attn_k", kv, d),
            ("attn_v", kv, d),
            ("attn_output", d, q),
            ("ffn_gate", SHAPE["ffn"], d),
            ("ffn_up", SHAPE["ffn"], d),
            ("ffn_down", d, SHAPE["ffn"]),
        ]:
            matrix(f"blk.{i}.{name}.weight", rows, cols)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


path = os.path.join(tempfile.gettempdir(), f"sinew-peer-{dtype}.gguf")
if not os.path.exists(path):
    make_model(path + ".part")
    os.rename(path + ".part", path)

folder = os.environ.get("PEER_LLAMA_DIR", "")
found = glob.glob(os.path.join(folder, "libllama.v*.so"))
if not folder or not found:
    sys.exit("set PEER_LLAMA_DIR to bins/linux-x64 of the npm package @node-llama-cpp/linux-x64")
release = os.path.basename(found[0])[len("libllama.") : -len(".so")]
ctypes.CDLL(os.path.join(folder, "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
ggml = ctypes.CDLL(os.path.join(folder, f"libggml.{release}.so"), mode=ctypes.RTLD_GLOBAL)
ggml.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
ggml.ggml_backend_load_all_from_path(folder.encode())
ffi = llama.get_ffi()
lib = ffi.dlopen(found[0])
lib.llama_backend_init()
model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
settings = lib.llama_context_default_params()
# The header of the binding is of another release than the library: known defaults show that they agree.
if (settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max) != (512, 2048, 512, 1):
    sys.exit(f"llama-cpp-py-sync does not fit llama.cpp {release}")
settings.n_ctx = batch * (PROMPT + STEPS + WARM + 8)
settings.n_seq_max = batch
settings.n_batch = settings.n_ubatch = max(512, batch)
settings.n_threads = settings.n_threads_batch = THREADS
context = lib.llama_init_from_model(model, settings)
room = lib.llama_batch_init(max(512, batch), 0, 1)


def decode(rows, logits):
    room.n_tokens = len(rows)
    for i, (token, position, sequence) in enumerate(rows):
        room.token[i], room.pos[i], room.n_seq_id[i] = token, position, 1
        room.seq_id[i][0] = sequence
        room.logits[i] = logits
    if lib.llama_decode(context, room) != 0:
        raise RuntimeError("llama_decode failed")


for sequence in range(batch):
    decode([((i * 13 + sequence) % SHAPE["vocab"], i, sequence) for i in range(PROMPT)], False)
values = []
for step in range(WARM + STEPS):
    begin = time.perf_counter()
    decode([((step * 31 + s) % SHAPE["vocab"], PROMPT + step, s) for s in range(batch)], True)
    logits = ffi.buffer(lib.llama_get_logits(context), 4 * batch * SHAPE["vocab"])
    top = np.frombuffer(logits, np.float32).reshape(batch, -1).argmax(-1)
    assert len(top) == batch
    if step >= WARM:
        values.append(batch / (time.perf_counter() - begin))
report(f"llama.cpp {release}", values)
