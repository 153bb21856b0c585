"""Two roles of one policy: solver and verifier, proposer and solver. Each role's turn has a reward of its own, so that credit goes to who earned it.

`Verify`: the model solves, then judges an answer that is shown to it. Half of those are wrong, whatever it said itself. `Propose`: the model writes
a sum that a weaker solver gets right half of the time, then solves it. The solver is a formula: each digit and each carry is a chance to slip.
"""

import random
import re

from sinew import Done, Env, Step

#: Share of an episode's reward for each of its two roles.
HALF = 0.5


class Duo(Env):
    """Two turns, one a role. A class says what each of them earns."""

    def start(self, task):
        self.task = {key: task[key] for key in self.keys}
        self.s = {"earned": [], "said": None}

    def step(self, text):
        role = self.second if self.s["earned"] else self.first
        earned, said = role(text.strip())
        self.s["earned"].append(earned)
        if len(self.s["earned"]) == 2:
            return Done(said, HALF * earned)
        return Step(said, HALF * earned)

    def reward(self, task):
        # The turns have had theirs.
        one, two = (self.s["earned"] + [0.0, 0.0])[:2]
        return {"reward": 0.0, "success": min(one, two) >= self.enough, self.roles[0]: one, self.roles[1]: two}

    def state(self):
        return self.s

    def snapshot(self):
        return {"s": self.s, "task": self.task}

    def restore(self, snapshot):
        self.s, self.task = snapshot["s"], snapshot["task"]


class Verify(Duo):
    system = "You are first a solver, then a verifier. Reply with a number, then with `right` or `wrong`."
    #: Numbers of a sum, and the largest of them.
    numbers = 3
    largest = 50
    keys = ("total", "shown")
    roles = ("solved", "verified")
    #: What the first role must earn for a success.
    enough = 1.0

    def first(self, text):
        shown = f"Another solver says {self.task['shown']}. Is that right or wrong?"
        return float(text == str(self.task["total"])), shown

    def second(self, text):
        verdict = "right" if self.task["shown"] == self.task["total"] else "wrong"
        return float(text.lower() == verdict), "The end."

    @classmethod
    def tasks(cls, split, seed):
        for i in range(2000 if split == "train" else 200):
            draw = random.Random(f"verify {split} {seed} {i}")
            parts = [draw.randint(1, cls.largest) for _ in range(cls.numbers)]
            signs = [draw.choice("+-") for _ in parts[1:]]
            terms = [n if sign == "+" else -n for sign, n in zip(["+", *signs], parts)]
            text = " ".join([str(parts[0]), *(f"{sign} {n}" for sign, n in zip(signs, parts[1:]))])
            answer = sum(terms)
            # Mistakes that are made: one off, a carry, a sign.
            last = draw.randrange(1, len(terms))
            wrong = draw.choice([answer + 1, answer - 1, answer + 10, answer - 10, answer - 2 * terms[last]])
            right = i % 2 == 0
            yield {
                "prompt": f"Solve: {text}",
                "kind": "right" if right else "wrong",
                "total": answer,
                "shown": answer if right else wrong,
                "number": i,
            }

    @classmethod
    def gold(cls, task):
        return [str(task.total), "right" if task.shown == task.total else "wrong"]


class Propose(Duo):
    system = "Write a sum `A + B` that the solver gets right half of the time: each digit of the longer number and each carry is a chance to slip. Then solve it."
    #: Chances that the solver slips at one place. Each has its own number of places (1 to 16) at which it is right half of the time.
    slips = tuple(round(1 - 0.5 ** (1 / places), 4) for places in (1, 2, 3, 5, 7, 11, 16))
    #: Most digits of a number.
    digits = 9
    keys = ("slip",)
    roles = ("proposed", "solved")
    enough = 0.9

    @classmethod
    def read(cls, text):
        """The two numbers of a proposal; None: it is none."""
        found = re.fullmatch(r"([1-9]\d*) \+ ([1-9]\d*)", text, re.ASCII)
        pair = found and [found[1], found[2]]
        return [int(n) for n in pair] if pair and max(map(len, pair)) <= cls.digits else None

    @staticmethod
    def places(a, b):
        """Digits of the longer number, and carries."""
        count, carry, digits = 0, 0, len(str(max(a, b)))
        for _ in range(digits):
            carry = (a % 10 + b % 10 + carry) // 10
            count += carry
            a, b = a // 10, b // 10
        return digits + count

    @classmethod
    def worth(cls, pair, slip):
        """1 where the solver is right half of the time, 0 where it is a fifth more or less often: one sum does not fit all solvers."""
        right = (1 - slip) ** cls.places(*pair)
        return max(0.0, 1 - 5 * abs(right - 0.5))

    def first(self, text):
        pair = self.read(text)
        self.s["said"] = pair
        if pair is None:
            return 0.0, "That is no sum. The end of your turn; reply with anything."
        return self.worth(pair, self.task["slip"]), f"Now you are the solver: {text}"

    def second(self, text):
        # To solve a sum that taught nothing earns nothing.
        pair, (proposed,) = self.s["said"], self.s["earned"]
        return proposed * (pair is not None and text == str(sum(pair))), "The end."

    @classmethod
    def tasks(cls, split, seed):
        for i in range(2000 if split == "train" else 200):
            slip = cls.slips[i % len(cls.slips)]
            draw = random.Random(f"propose {split} {seed} {i}")
            shown = []
            for _ in range(3):
                size = draw.randint(1, cls.digits)
                pair = [draw.randrange(10 ** (size - 1), 10**size) for _ in range(2)]
                right = round(100 * (1 - slip) ** cls.places(*pair))
                shown.append(f"{pair[0]} + {pair[1]}: right {right} of 100")
            text = "What the solver did: " + "; ".join(shown) + "."
            yield {"prompt": text, "kind": f"slip {slip}", "slip": slip, "number": i}

    @classmethod
    def gold(cls, task):
        def pair(digits, carries):
            return [int("1" * (digits - carries) + "5" * carries)] * 2

        every = [pair(n, c) for n in range(1, cls.digits + 1) for c in range(n + 1)]
        a, b = max(every, key=lambda p: cls.worth(p, task.slip))
        return [f"{a} + {b}", str(a + b)]
