"""The reward. Parameters are bound by name: columns of the task, output, messages, calls."""


def score(output, topic):
    """Share of small letters. 1 or more counts as a success; None would mean "no score", never 0."""
    text = output.strip()
    if topic in text:
        return 0.0
    return sum("a" <= c <= "z" for c in text) / max(len(text), 1)
