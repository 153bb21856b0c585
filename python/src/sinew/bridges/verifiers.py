"""Tasksets of `verifiers` as environments: its prompts, and its rewards, metrics and stops of one reply.

A taskset is a package of its own. Rewards that need a runtime (files of a container, tool servers) are left out by that project's
own rule; a task that has only such rewards is unscored. What is not carried is refused by name: an environment of the package with a
`run` of its own (several turns, several agents), containers, tool servers, set-up, skills, and parts of prompts that are no text.
"""

import asyncio
import importlib
import itertools

from sinew import Env, Unscored
from sinew.bridges import package

INSTALL = "verifiers==0.4.0"


class Verifiers(Env):
    #: The taskset, as in `vf.load_taskset`, and its keys.
    taskset = ""
    keys = {}
    #: Most tasks that are read. Every tenth is held out.
    most = 10_000

    @classmethod
    def setup_worker(cls):
        cls.vf = package("verifiers.v1", INSTALL)
        if not cls.taskset:
            raise ValueError("taskset is empty: name the package of a taskset, as options = { taskset = \"...\" }")
        config = cls.vf.taskset_config_type(cls.taskset)(id=cls.taskset, **cls.keys)
        cls.rows = list(itertools.islice(iter(cls.vf.load_taskset(config)), cls.most))
        if len(cls.rows) < 2:
            raise ValueError(f"the taskset {cls.taskset} has {len(cls.rows)} tasks; at least 2 are needed")
        # It asks git, once: a process that starts in an episode would be taken for code of the model.
        importlib.import_module("verifiers.v1.utils.version").verifiers_commit()
        # math-verify limits its time by signals, which a main thread gets: elsewhere it raises an error, for which `verifiers` gives 0.
        # The deadline of the call ends what takes too long.
        for name in ("math_verify.parser", "math_verify.grader"):
            importlib.import_module(name).timeout = lambda timeout_seconds: lambda function: function
        cls.refuse()

    @classmethod
    def refuse(cls):
        """Raises an error that names what this bridge does not carry."""
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        own, plain = loaders.environment_class(cls.taskset), cls.vf.SingleAgentEnv
        where = f"the taskset {cls.taskset}"
        hooks = [name for name in ("setup", "run", "finalize") if getattr(own, name) is not getattr(plain, name)]
        if hooks:
            raise ValueError(
                f"{where} brings the environment {own.__name__}, whose own {', '.join(hooks)} would be lost here: only tasks of one reply are "
                "played; run it as an agent program behind the gateway (docs/agents.md)"
            )
        for row in cls.rows:
            kind, data = type(row), row.data
            lost = [name for name in ("setup", "finalize", "stage_verifier") if getattr(kind, name) is not getattr(cls.vf.Task, name)]
            lost += ["toolsets"] if kind.toolsets(row.config) else []
            lost += ["NEEDS_CONTAINER"] if row.NEEDS_CONTAINER else []
            lost += [name for name in ("image", "skills", "artifacts") if getattr(data, name)]
            lost += ["prompt"] if data.prompt is None else []
            for message in data.prompt if isinstance(data.prompt, list) else []:
                parts = message.content if isinstance(message.content, list) else []
                lost += sorted({part.type for part in parts if part.type != "text"})
            if lost:
                raise ValueError(f"{where}: {kind.__name__} {data.idx} has what is not carried here: {', '.join(lost)}")

    def start(self, task):
        data = self.rows[task.row].data
        messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        if isinstance(data.prompt, str):
            return [*messages, {"role": "user", "content": data.prompt}]
        for message in data.prompt or []:
            content = message.content if isinstance(message.content, str) else data.prompt_text
            messages.append({"role": message.role, "content": content})
        return messages

    async def reward(self, task, output, messages):
        row = self.rows[task.row]
        trace = self.trace(row, messages)
        await asyncio.wait_for(row.score(trace), 60)
        if not trace.rewards:
            return Unscored(f"{self.taskset}: no reward can be had without a runtime")
        metrics = {name: float(value) for name, value in trace.metrics.items()}
        parts = {name: float(reward.score) for name, reward in trace.rewards.items()}
        return {**metrics, **parts, "reward": float(trace.reward), "success": trace.reward >= 1.0}

    def trace(self, row, messages):
        """The episode as that project records it: one chain of messages."""
        vf = self.vf
        state = importlib.import_module("verifiers.v1.state").state_cls(type(row))()
        kinds = {"system": "SystemMessage", "user": "UserMessage", "assistant": "AssistantMessage"}
        types = importlib.import_module("verifiers.v1.types")
        nodes = []
        for message in messages:
            said = getattr(types, kinds[message["role"]])(content=message["content"])
            own = message["role"] == "assistant"
            parent = len(nodes) - 1 if nodes else None
            nodes.append(vf.MessageNode(parent=parent, message=said, sampled=own))
        task = vf.TraceTask(type=type(row).__name__, data=row.data, key=row.key, hash=row.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig(), name="agent", trainable=False)
        return vf.Trace(task=task, state=state, agent=agent, nodes=nodes, is_completed=True, ok=True)

    @classmethod
    def tasks(cls, split):
        for i, row in enumerate(cls.rows):
            if (i % 10 == 9 or len(cls.rows) < 10 and i == 1) == (split == "held-out"):
                yield {"kind": cls.taskset, "prompt": row.data.prompt_text, "row": i}
