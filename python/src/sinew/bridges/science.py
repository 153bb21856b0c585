"""ScienceWorld: experiments in a house of ten rooms, such as boiling water or testing what conducts. It needs a Java program in PATH.

Each episode has a simulator of its own, a Java process of some hundred MiB, which is kept for the next one: set `sessions_per_worker = 1`,
`sandbox.processes = 128` and `sandbox.memory_mb = 4096`.
"""

from sinew import Done, Env, ToolError, tool
from sinew.bridges import Spares, package


class Science(Env):
    system = "You do an experiment. Give one command a turn, such as: open door to kitchen, go to kitchen, pick up thermometer, activate stove."
    #: Name of the experiment, and what is made easier: `easy`, or parts of it with commas between them.
    name, simplify = "boil", "easy"
    #: Commands until an episode ends.
    limit = 100
    train, held_out = 100, 20

    @classmethod
    def setup_worker(cls):
        cls.package = package("scienceworld", "scienceworld==1.2.3")
        cls.spares = Spares(1)

    @classmethod
    def opened(cls, variation, gold=False):
        env = cls.spares.take(lambda: cls.package.ScienceWorldEnv(envStepLimit=cls.limit))
        env.load(cls.name, variation, cls.simplify, generateGoldPath=gold)
        return env

    @classmethod
    def left(cls, env):
        if not cls.spares.give(env):
            env.close()

    def start(self, task):
        self.used, self.over, self.commands = 0, False, []
        self.env = self.opened(task.variation)
        self.env.server.reset()
        return f"{self.env.get_task_description()}\n\n{self.env.server.step('look around')}"

    def one(self, command):
        if self.over:
            raise ToolError("the experiment is over")
        # The package's own step asks for much more after each command, and is a hundred times slower.
        seen = str(self.env.server.step(" ".join(command.split())[:200])).strip()
        self.used += 1
        self.commands.append(command)
        self.over = bool(self.env.server.getCompleted()) or self.used >= self.limit
        return Done(seen) if self.over else seen

    @tool
    def act(self, command: str):
        "Give a command."
        return self.one(command)

    def step(self, text):
        lines = text.strip().splitlines() or [""]
        return self.one(lines[-1].removeprefix("> "))

    def reward(self):
        # A mistake that cannot be put right has a score below 0.
        score = max(0.0, float(self.env.server.getScore()))
        return {"reward": score, "success": score >= 1.0, "commands": self.used}

    def state(self):
        return self.commands

    def close(self):
        if getattr(self, "env", None) is not None:
            self.left(self.env)

    @classmethod
    def tasks(cls, split, seed):
        env = cls.opened(0)
        try:
            numbers = env.get_variations_train() if split == "train" else env.get_variations_test()
        finally:
            cls.left(env)
        most = cls.train if split == "train" else cls.held_out
        for number in list(numbers)[:most]:
            yield {"prompt": "Your task:", "kind": cls.name, "variation": int(number)}

    @classmethod
    def gold(cls, task):
        env = cls.opened(task.variation, gold=True)
        try:
            return [("act", {"command": command}) for command in env.get_gold_action_sequence()]
        finally:
            cls.left(env)
