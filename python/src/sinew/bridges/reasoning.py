"""Problems of reasoning-gym, scored by the package's own rules.

Each family makes its problems from a seed, and scores an answer by its own rules: another spelling of a right answer counts,
and some families give a part of the score for a part of the answer.
"""

import functools
import json

from sinew import Env
from sinew.bridges import package

#: Families with settings that a model of 135 million weights can begin with.
FAMILIES = {
    "chain_sum": {"max_terms": 2, "max_digits": 2},
    "gcd": {"max_value": 30},
    "letter_counting": {"min_words": 3, "max_words": 5},
    "products": {"max_digits": 1},
    "ransom_note": {"max_note_length": 3, "max_magazine_length": 6},
    "spell_backward": {"max_word_len": 4},
}


@functools.lru_cache(maxsize=None)
def problems(family, size, seed, settings):
    gym = package("reasoning_gym", "reasoning-gym==0.1.25")
    return gym.create_dataset(family, size=size, seed=seed, **json.loads(settings))


class Reasoning(Env):
    #: No code of the model runs. The package imports matplotlib, which asks a program for the fonts of the system.
    runs_code = False
    #: Families with their settings.
    families = FAMILIES
    #: Problems of each family, by split.
    train, held_out = 400, 50
    #: Longest answer, in characters: 1 for models that begin with nothing. 0: any.
    longest = 0

    @classmethod
    def source(cls, family, size=1, seed=0):
        return problems(family, size, seed, json.dumps(cls.families[family], sort_keys=True))

    @classmethod
    def scored(cls, output, family, entry):
        value = cls.source(family).score_answer(answer=answer_of(output), entry=entry)
        return {"reward": value, "success": value == 1.0}

    def reward(self, task, output):
        return self.scored(output, task.family, task.entry)

    @classmethod
    def tasks(cls, split, seed):
        # Problem i of a set has the seed of the set plus i: sets must lie far apart.
        start = 100_000 * (2 * seed + (split == "held-out"))
        size = cls.held_out if split == "held-out" else cls.train
        sets = [cls.source(family, size, start) for family in cls.families]
        for same_place in zip(*sets):
            for family, entry in zip(cls.families, same_place):
                if not cls.longest or len(entry["answer"]) <= cls.longest:
                    yield {"prompt": entry["question"], "kind": family, "family": family, "answer": entry["answer"], "entry": entry}

    @staticmethod
    def gold(task):
        return [str(task.entry["answer"])]


def answer_of(output):
    """What the model gives as its answer: the last line, without a mark before it."""
    lines = output.strip().splitlines() or [""]
    return lines[-1].rpartition("nswer:")[2].strip().rstrip(".")
