"""Mathematical equivalence by the package math-verify, as a reward function.

The package's own time limits end as a wrong answer. Here they are off: the deadline of the call ends what takes
too long, and the sample is unscored.
"""

import logging

try:
    from math_verify import parse, verify
except ImportError:
    raise ImportError(
        "math(...) needs the package math-verify: python3 -m pip install math-verify==0.9.0"
    ) from None

import sinew

# It warns that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def math(output, expected):
    gold = parse(expected, parsing_timeout=None)
    if not gold:
        raise sinew.Unscored("the expected value %.100r is no expression that math-verify can read" % expected)
    given = parse(output, parsing_timeout=None)
    return bool(given) and verify(gold, given, timeout_seconds=None, raise_on_error=True)
