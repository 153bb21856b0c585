"""Reward functions for the shop. A parameter is bound by its name."""


def says_done(output):
    return "done" in output.lower()


def few_calls(calls, want):
    "1 with one call for each kind of item, less with more."
    return {"reward": min(1.0, len(want) / max(1, len(calls))), "calls": len(calls)}


def shortest(group):
    "A reward for the whole group: 1 for the shortest answer, 0 for the longest."
    lengths = [len(sample.output) for sample in group]
    spread = max(lengths) - min(lengths) or 1
    return [(max(lengths) - length) / spread for length in lengths]


def shorter(a, b):
    "A comparison of two samples: the shorter answer is better."
    if len(a.output) == len(b.output):
        return 0.5
    return a if len(a.output) < len(b.output) else b
