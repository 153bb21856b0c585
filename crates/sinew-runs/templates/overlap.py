"""The reward. Parameters are bound by name: columns of the task, output, messages, calls."""

import re
from collections import Counter

# Words, or single characters of scripts that do not separate words.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


def words(text):
    return Counter(WORD.findall(text.lower()))


def score(output, {answer}):
    """F1 of the words of the output against those of the answer, 0 to 1."""
    said, right = words(output), words({answer})
    shared = (said & right).total()
    return 2 * shared / max(said.total() + right.total(), 1)
