"""Games of TextWorld, each generated from its task's seed: rooms, things, and a quest.

A game is compiled in the worker's own folder, and kept for the episodes of its group.
"""

import functools
import os
import tempfile
import threading

from sinew import Done, Env, ToolError, tool
from sinew.bridges import package, seeds


def one_at_a_time(function):
    lock = threading.Lock()

    @functools.wraps(function)
    def alone(*arguments, **named):
        with lock:
            return function(*arguments, **named)

    return alone


class TextWorld(Env):
    system = "You play a text adventure. Give one command a turn, such as: go east, take key, open chest, put key on table."
    rooms, objects, quest = 3, 5, 3
    #: Commands until an episode ends.
    limit = 50
    #: Show the commands that are possible.
    hints = False
    train, held_out = 1000, 100
    #: Games that a worker keeps.
    most = 256

    @classmethod
    def setup_worker(cls):
        cls.textworld = package("textworld", "textworld==1.7.0")
        cls.folder, cls.made, cls.lock = tempfile.mkdtemp(), [], threading.Lock()
        # All games are read by one parser, which has state of its own.
        parser = package("textworld.logic", "textworld==1.7.0")._PARSER
        parser.parse = one_at_a_time(parser.parse)

    @classmethod
    def game(cls, seed):
        """The file of a game."""
        kind = f"{cls.rooms}-{cls.objects}-{cls.quest}-{seed}"
        path = os.path.join(cls.folder, f"{kind}.z8")
        # The generator has state of its own: one game at a time.
        with cls.lock:
            if path not in cls.made:
                options = cls.textworld.GameOptions()
                options.nb_rooms, options.nb_objects = cls.rooms, cls.objects
                options.quest_length, options.seeds, options.path = cls.quest, seed, path
                options.force_recompile = True
                cls.textworld.make(options)
                cls.made.append(path)
                if len(cls.made) > cls.most:
                    old = cls.made.pop(0)
                    for name in (old, old[:-3] + ".json", old[:-3] + ".ni"):
                        if os.path.exists(name):
                            os.remove(name)
        return path

    @classmethod
    def opened(cls, seed, **more):
        infos = cls.textworld.EnvInfos(objective=True, max_score=True, score=True, won=True, lost=True, **more)
        return cls.textworld.start(cls.game(seed), infos)

    def start(self, task):
        self.used, self.over, self.commands = 0, False, []
        self.env = self.opened(task.seed, **({"admissible_commands": True} if self.hints else {}))
        self.now = self.env.reset()
        # Most games begin with the objective in their own text.
        shown, objective = self.shown(), self.now.objective or ""
        told = " ".join(objective.split()) in " ".join(shown.split())
        return shown if told else f"{objective}\n\n{shown}"

    def shown(self):
        text = self.now.feedback.strip()
        # The title of the game is drawn with letters.
        text = text.rpartition("$$$")[2].strip() or text
        if self.hints and not self.over:
            text += "\nPossible: " + ", ".join(self.now.admissible_commands)
        return text

    def one(self, command):
        if self.over:
            raise ToolError("the game is over")
        self.now, _, done = self.env.step(" ".join(command.split())[:200])
        self.used += 1
        self.commands.append(command)
        self.over = bool(done) or self.used >= self.limit
        return Done(self.shown()) if self.over else self.shown()

    @tool
    def act(self, command: str):
        "Give a command."
        return self.one(command)

    def step(self, text):
        lines = text.strip().splitlines() or [""]
        return self.one(lines[-1].removeprefix("> "))

    def reward(self):
        share = self.now.score / self.now.max_score if self.now.max_score else 0.0
        return {"reward": share, "success": bool(self.now.won), "commands": self.used}

    def state(self):
        return self.commands

    def close(self):
        if getattr(self, "env", None) is not None:
            self.env.close()

    @classmethod
    def tasks(cls, split, seed):
        for number in seeds(split, seed, cls.train, cls.held_out):
            yield {"prompt": "Your task:", "kind": f"quest {cls.quest}", "seed": number}

    @classmethod
    def gold(cls, task):
        env = cls.opened(task.seed, policy_commands=True)
        try:
            return [("act", {"command": command}) for command in env.reset().policy_commands]
        finally:
            env.close()
