"""Agent Lightning's proxy with its store in memory: `agent_lightning.py UPSTREAM PORT ROLLOUTS`.

Prints one line of JSON when it listens: the base URLs of as many rollouts. Runs until it is ended.
"""

import asyncio
import importlib.metadata
import json
import os
import sys

# LiteLLM writes a banner where only one line is expected.
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("LITELLM_LOG", "ERROR")
os.environ.setdefault("LITELLM_TELEMETRY", "False")

from agentlightning import InMemoryLightningStore, LLMProxy  # noqa: E402


async def main(upstream: str, port: int, rollouts: int) -> None:
    store = InMemoryLightningStore()
    model = {
        "model_name": "fake",
        "litellm_params": {"model": "openai/fake", "api_base": upstream, "api_key": "sk-none"},
    }
    proxy = LLMProxy(port=port, host="127.0.0.1", model_list=[model], store=store, launch_mode="asyncio")
    paths = []
    for _ in range(rollouts):
        rollout = await store.start_rollout(input={})
        resource = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
        paths.append("/" + resource.endpoint.split("/", 3)[3])
    await proxy.start()
    print(json.dumps({"version": importlib.metadata.version("agentlightning"), "paths": paths}), file=out, flush=True)
    await asyncio.Event().wait()


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
