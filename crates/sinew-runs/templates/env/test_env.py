"""Tests of the environment, by hand (python3 test_env.py) or by pytest, with the Python package `sinew` installed.

`sinew env check env.py:Letters` tries more and needs no package: the program brings it.
"""

from types import SimpleNamespace

from env import Letters


def play(turns, want):
    env, task = Letters(), SimpleNamespace(want=want)
    env.start(task)
    for text in turns:
        env.step(text)
    return env.reward(task)


def test_new_letters_score():
    assert play(["ab", "cd", "ef"], want=6) == {"reward": 1.0, "success": True}


def test_a_letter_counts_once():
    assert play(["aa", "a", "a"], want=4) == {"reward": 0.25, "success": False}


if __name__ == "__main__":
    test_new_letters_score()
    test_a_letter_counts_once()
    print("ok")
