"""Reflection: an answer, what is wrong with it, and another try. What a correction gains is rewarded, less than being right at once.

The task is an order of letters that keeps some rules. After each try the model hears which rules are broken. `gain` is below 1, so that a wrong
first try on purpose costs; a last try that is worse than the first counts as it is.
"""

import itertools
import random
import re

from sinew import Done, Env

LETTERS = "ABCDEFGH"


class Order(Env):
    system = "Put the letters into an order that keeps all rules. Reply with the letters alone. If rules are broken you hear which, and try again."
    #: Letters, up to 8, and rules about them.
    letters = 5
    rules = 5
    #: Answers of an episode.
    tries = 3
    #: Share of what corrections gained that is rewarded.
    gain = 0.5
    #: What a broken rule costs: any order keeps most rules by chance.
    broken = 0.5

    def start(self, task):
        self.kept = [list(rule) for rule in task.rules]
        self.s = {"scores": []}

    @staticmethod
    def holds(rule, order):
        kind, a, b = rule
        at = order.index
        return {
            "before": lambda: at(a) < at(b),
            "next to": lambda: abs(at(a) - at(b)) == 1,
            "not next to": lambda: abs(at(a) - at(b)) > 1,
            "not first": lambda: at(a) != 0,
            "last": lambda: at(a) == len(order) - 1,
        }[kind]()

    @staticmethod
    def told(rule):
        return " ".join([rule[1], rule[0], rule[2]]).strip()

    @classmethod
    def read(cls, text):
        """The order of an answer; None: it has a letter twice, lacks one, or has other words."""
        found = re.sub(r"[\s,]", "", text)
        return list(found) if sorted(found) == list(LETTERS[: cls.letters]) else None

    def step(self, text):
        order = self.read(text)
        broken = self.kept if order is None else [rule for rule in self.kept if not self.holds(rule, order)]
        self.s["scores"].append(0.0 if order is None else max(0.0, 1 - self.broken * len(broken)))
        if not broken or len(self.s["scores"]) == self.tries:
            return Done("The end.")
        if order is None:
            return f"Write each of {' '.join(LETTERS[: self.letters])} once, and nothing else."
        return f"Broken: {'; '.join(self.told(rule) for rule in broken)}."

    def reward(self, task):
        first, last = (self.s["scores"][0], self.s["scores"][-1]) if self.s["scores"] else (0.0, 0.0)
        value = first + self.gain * (last - first) if last > first else last
        return {"reward": value, "success": last == 1.0, "first": first, "gained": last - first}

    def state(self):
        return self.s

    def snapshot(self):
        return {"s": self.s, "rules": self.kept}

    def restore(self, snapshot):
        self.s, self.kept = snapshot["s"], snapshot["rules"]

    @classmethod
    def true_rules(cls, order):
        """All rules that an order keeps."""
        pairs = list(itertools.permutations(order, 2))
        every = [[kind, a, b] for kind in ("before", "next to", "not next to") for a, b in pairs]
        every += [[kind, a, ""] for kind in ("not first", "last") for a in order]
        return [rule for rule in every if cls.holds(rule, order)]

    @classmethod
    def tasks(cls, split, seed):
        for i in range(2000 if split == "train" else 200):
            draw = random.Random(f"order {split} {seed} {i}")
            order = list(LETTERS[: cls.letters])
            draw.shuffle(order)
            rules = draw.sample(cls.true_rules(order), cls.rules)
            texts = "; ".join(cls.told(rule) for rule in rules)
            letters = " ".join(LETTERS[: cls.letters])
            yield {"prompt": f"Letters: {letters}. Rules: {texts}.", "kind": "order", "rules": rules, "number": i}

    @classmethod
    def gold(cls, task):
        orders = itertools.permutations(LETTERS[: cls.letters])
        return [" ".join(next(o for o in orders if all(cls.holds(rule, o) for rule in task.rules)))]
