"""What the agents tell the model. Small models need to see the work done before they can do it."""

SYSTEM = "Call the calculator for the math. Then reply Answer: ..."

#: Question, expression, result.
WORKED = [
    ("A baker makes 132 cakes a day for 14 days and sells 950. How many are left?", "132 * 14 - 950", "898"),
    ("What is 318 * 27 + 145?", "318 * 27 + 145", "8731"),
]

#: Most model calls in one run.
MAX_TURNS = 4
