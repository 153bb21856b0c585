"""Makes stream.arrow, an Arrow IPC stream of pool trajectories, with pyarrow 26.0.1."""

import pathlib
import pyarrow as pa

node = pa.struct(
    [
        ("parent", pa.int32()),
        ("kind", pa.string()),
        ("tokens", pa.list_(pa.uint32())),
        ("logprobs", pa.list_(pa.float32())),
        ("temperature", pa.float32()),
        ("version", pa.int64()),
        ("messages", pa.string()),
    ]
)
schema = pa.schema(
    [
        ("id", pa.string()),
        ("task", pa.string()),
        ("task_kind", pa.string()),
        ("group", pa.string()),
        ("group_size", pa.int32()),
        ("kind", pa.string()),
        ("reward", pa.float64()),
        ("success", pa.bool_()),
        ("nodes", pa.list_(node)),
        ("messages", pa.large_string()),
    ],
    metadata={
        "sinew.version": "1",
        "sinew.source": "pyarrow",
        "sinew.tokenizer": "64600a7cb8064d12426f8509cbc526ed55eb92fa6cd2ec3324ec75283fd96f6b",
    },
)


def row(i, logprobs):
    prompt = {"kind": "prompt", "tokens": [2, 6, 8, 0, 3], "messages": '[{"role": "user", "content": "A>"}]'}
    said = {"parent": 0, "kind": "sampled", "tokens": [10, 0], "logprobs": logprobs, "version": 3}
    return {"id": f"a{i}", "task": f"t{i // 2}", "task_kind": "corridor-1", "group": f"g{i // 2}", "group_size": 2,
            "kind": "rl", "reward": float(i % 2), "success": i % 2 == 1, "nodes": [prompt, said]}


said = '[{"role": "user", "content": "A>"}, {"role": "assistant", "content": "r"}]'
rows = [row(i, [-0.25 * i, -0.125]) for i in range(4)]
rows[1]["nodes"][1]["temperature"] = 0.7
rows.append(row(4, [float("nan"), -0.5]))
rows.append({"id": "s", "task": "t", "kind": "sft", "messages": said})
path = pathlib.Path(__file__).with_name("stream.arrow")
with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, schema) as stream:
    stream.write_batch(pa.RecordBatch.from_pylist(rows[:3], schema=schema))
    stream.write_batch(pa.RecordBatch.from_pylist(rows[3:], schema=schema))
