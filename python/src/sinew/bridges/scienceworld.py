"""Tasks of ScienceWorld. It needs Java 8 or later in the sandbox; each episode holds a process of Java of its own.

The package's `step` asks for much that is not shown here. Its server is asked for the observation, the score and the end alone,
which is faster by two orders of magnitude.
"""

from sinew import Done, Env, ToolError, tool
from sinew.bridges import Spares, package


class ScienceWorld(Env):
    system = "You act in a text world with a scientific task. Give one command a turn, such as: look around, open door to kitchen."
    #: Names of tasks; empty: all.
    names = []
    simplified = "easy"
    limit = 100
    spares = Spares(8)

    @classmethod
    def setup_worker(cls):
        cls.module = package("scienceworld", "scienceworld==1.2.3")

    @classmethod
    def made(cls):
        return cls.spares.take(lambda: cls.module.ScienceWorldEnv("", envStepLimit=cls.limit))

    def start(self, task):
        self.env, self.commands, self.score, self.over = self.made(), [], 0, False
        self.env.load(task.name, task.variation, self.simplified)
        seen, _ = self.env.reset()
        return f"{self.env.get_task_description()}\n\n{seen}"

    def one(self, command):
        if self.over:
            raise ToolError("the episode is over")
        seen = str(self.env.server.step(" ".join(command.split())[:200]))
        self.commands.append(command)
        self.score = max(0, round(100 * self.env.server.getScore()))
        self.over = bool(self.env.server.getCompleted()) or len(self.commands) >= self.limit
        return Done(seen) if self.over else seen

    @tool
    def act(self, command: str):
        "Give a command."
        return self.one(command)

    def step(self, text):
        lines = text.strip().splitlines() or [""]
        return self.one(lines[-1])

    def reward(self):
        return {"reward": self.score / 100, "success": self.score == 100, "commands": len(self.commands)}

    def state(self):
        return self.commands

    def close(self):
        env, self.env = getattr(self, "env", None), None
        if env is not None and not self.spares.give(env):
            env.close()

    @classmethod
    def tasks(cls, split, seed):
        env = cls.made()
        try:
            for name in cls.names or env.get_task_names():
                env.load(name, 0, cls.simplified)
                held_out = split == "held-out"
                variations = env.get_variations_test() if held_out else env.get_variations_train()
                for variation in variations:
                    yield {"prompt": "Your task:", "kind": name, "name": name, "variation": variation}
        finally:
            cls.spares.give(env)
