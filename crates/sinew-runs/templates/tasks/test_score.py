"""Tests of the reward, by hand (python3 test_score.py) or by pytest."""

from score import score


def test_small_letters_score_most():
    assert score("abc", "rain") == 1.0
    assert 0.0 < score("ab!", "rain") < 1.0
    assert score("", "rain") == 0.0


def test_the_topic_itself_scores_nothing():
    assert score("rain", "rain") == 0.0


if __name__ == "__main__":
    test_small_letters_score_most()
    test_the_topic_itself_scores_nothing()
    print("ok")
