"""The reward. Parameters are bound by name: columns of the task, output, messages, calls."""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(output, {answer}):
    """True if the last number of the output is the one that the answer gives behind ####."""
    said = NUMBER.findall(output)
    right = NUMBER.findall({answer}.split("####")[-1])
    return bool(said) and float(said[-1].replace(",", "")) == float(right[-1].replace(",", ""))
