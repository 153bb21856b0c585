"""Tasks of reasoning-gym: rows by a function, and a reward that asks the package's own scorer.

    pip install -r examples/requirements-reasoning.txt
    sinew train recipes/reasoning.toml

Each family makes its problems from a seed, and scores an answer by its own rules: another spelling of a right
answer counts, and some families give a part of the score for a part of the answer.
"""

import functools

import reasoning_gym

#: Families with settings that a model of 135 million weights can begin with.
FAMILIES = {
    "chain_sum": {"max_terms": 2, "max_digits": 2},
    "gcd": {"max_value": 30},
    "letter_counting": {"min_words": 3, "max_words": 5},
    "products": {"max_digits": 1},
    "ransom_note": {"max_note_length": 3, "max_magazine_length": 6},
    "spell_backward": {"max_word_len": 4},
}
#: Problems of each family.
SIZES = {"train": 400, "held-out": 50}


@functools.lru_cache(maxsize=None)
def problems(family, size=1, seed=0):
    return reasoning_gym.create_dataset(family, size=size, seed=seed, **FAMILIES[family])


def rows(split, seed):
    """All families in turn, so that a part of the rows has problems of each."""
    # Problem i of a set has the seed of the set plus i: sets must lie far apart.
    start = 100_000 * (2 * seed + (split == "held-out"))
    sets = [problems(family, SIZES[split], start) for family in FAMILIES]
    for same_place in zip(*sets):
        for family, entry in zip(FAMILIES, same_place):
            yield {"prompt": entry["question"], "family": family, "answer": entry["answer"], "entry": entry}


def digits(split, seed):
    """Problems whose answer is one digit, for a model that begins with nothing."""
    return (row for row in rows(split, seed) if row["entry"]["answer"] in set("0123456789"))


def answer_of(output):
    """What the model gives as its answer: the last line, without a mark before it."""
    lines = output.strip().splitlines() or [""]
    return lines[-1].rpartition("nswer:")[2].strip().rstrip(".")


def score(output, family, entry):
    value = problems(family).score_answer(answer=answer_of(output), entry=entry)
    return {"reward": value, "success": value == 1.0}
