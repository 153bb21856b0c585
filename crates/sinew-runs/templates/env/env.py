"""The environment: one object for each episode. `sinew env check env.py:Letters` tries it."""

from sinew import Done, Env


class Letters(Env):
    """The model says small letters, in three turns, and none of them twice."""

    system = "Say small letters that you have not said before."

    def start(self, task):
        self.said = set()
        self.turns = 0

    def step(self, text):
        self.turns += 1
        self.said |= {c for c in text if "a" <= c <= "z"}
        answer = "".join(sorted(self.said)) or "nothing"
        return Done(answer) if self.turns == 3 else answer

    def reward(self, task):
        return {"reward": len(self.said) / task.want, "success": len(self.said) >= task.want}

    def gold(task):
        letters = "abcdefghijklmnopqrstuvwxyz"
        return [letters[:4], letters[4:8], letters[8:12]]

    @staticmethod
    def tasks(split):
        wants = [5, 9] if split == "held-out" else [3, 4, 6, 7, 8, 10, 11, 12]
        return [{"prompt": f"Say {want} letters.", "want": want} for want in wants]
