"""Tasks of reasoning-gym: rows by a function, and a reward that asks the package's own scorer.

    pip install -r examples/requirements-reasoning.txt
    sinew train recipes/reasoning.toml

What makes and scores the problems is `sinew.bridges.reasoning`, which is an environment as well: here it gives rows for prompts and
rewards of a recipe.
"""

from sinew.bridges.reasoning import Reasoning


def rows(split, seed):
    """All families in turn, so that a part of the rows has problems of each."""
    return Reasoning.tasks(split, seed)


def digits(split, seed):
    """Problems whose answer is one digit, for a model that begins with nothing."""
    return (row for row in rows(split, seed) if row["entry"]["answer"] in set("0123456789"))


def score(output, family, entry):
    return Reasoning.scored(output, family, entry)


# No code of the model runs. The package imports matplotlib, which asks a program for the fonts of the system.
score.runs_code = False
