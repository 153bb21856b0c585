"""TransferQueue's rows a second: a batch is put, its metadata asked for, its data got, and it is cleared.

Arguments: rows of a round, bytes of a row, rows of a batch, rounds. Storage and controller are processes of
their own, as the package starts them; one process puts and gets by turns."""
import contextlib
import importlib.metadata
import json
import resource
import sys
import time

import ray
import torch
import transfer_queue
from tensordict import TensorDict

rows, size, batch, rounds = (int(a) for a in sys.argv[1:5])
with contextlib.redirect_stdout(sys.stderr):
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
client = transfer_queue.get_client()
source = torch.zeros(batch, size, dtype=torch.uint8)


def one_batch():
    data = TensorDict({"trace": source.clone()}, batch_size=batch)
    client.put(data, partition_id="bench")
    meta = client.get_meta(data_fields=["trace"], batch_size=batch, partition_id="bench", mode="fetch", task_name="bench")
    got = client.get_data(meta)["trace"]
    assert len(got) == batch
    client.clear_samples(meta)


rates = []
with contextlib.redirect_stdout(sys.stderr):
    for number in range(rounds + 1):
        begin = time.perf_counter()
        for _ in range(rows // batch):
            one_batch()
        # The first warms it up.
        if number > 0:
            rates.append(rows // batch * batch / (time.perf_counter() - begin))
    transfer_queue.close()
    ray.shutdown()
version = "TransferQueue " + importlib.metadata.version("TransferQueue")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"version": version, "values": rates, "peak_bytes": peak}), flush=True)
