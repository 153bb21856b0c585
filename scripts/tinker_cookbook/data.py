"""Small data sets in the formats of those that the cookbook's recipes load, generated from rules with a seed.

Each has the columns that a recipe reads, no more, and rows short enough for two processor cores. None is a copy or an extract
of the data set whose name it stands under: numbers that come out of it say that a recipe runs and learns, and nothing about the
real data set.
"""

import json
import random

NAMES = ["Tom", "Ann", "Ben", "Eva", "Sam", "Mia", "Leo", "Ida", "Max", "Zoe"]
THINGS = ["apples", "books", "coins", "cards", "pens", "eggs", "shells", "stamps", "balls", "keys"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"]
ANIMALS = {"dog": 4, "hen": 2, "ant": 6, "spider": 8, "horse": 4, "duck": 2, "cow": 4, "bee": 6}


def word_problem(rng: random.Random) -> tuple[str, str, int]:
    """A question of one step with small numbers, its working and its answer."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    if rng.random() < 0.5:
        question = f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have?"
        return question, f"{name} has {a} + {b} = {a + b} {thing}.", a + b
    a, b = max(a, b) + 1, min(a, b)
    question = f"{name} has {a} {thing} and loses {b}. How many {thing} does {name} have?"
    return question, f"{name} has {a} - {b} = {a - b} {thing}.", a - b


def fact(rng: random.Random) -> tuple[str, str]:
    """A question about the calendar, the alphabet, numbers or animals, and its answer as a sentence."""
    kind = rng.randrange(5)
    if kind == 0:
        i = rng.randrange(7)
        return f"Which day comes after {DAYS[i]}?", f"{DAYS[(i + 1) % 7]} comes after {DAYS[i]}."
    if kind == 1:
        i = rng.randrange(12)
        return f"Which month comes after {MONTHS[i]}?", f"{MONTHS[(i + 1) % 12]} comes after {MONTHS[i]}."
    if kind == 2:
        i = rng.randrange(25)
        return f"Which letter comes after {chr(65 + i)}?", f"{chr(66 + i)} comes after {chr(65 + i)}."
    if kind == 3:
        animal = rng.choice(list(ANIMALS))
        return f"How many legs does one {animal} have?", f"One {animal} has {ANIMALS[animal]} legs."
    i = rng.randrange(2, 90)
    return f"Which number comes after {i}?", f"{i + 1} comes after {i}."


SENTENCES = {
    "en": "{name} has {n} books and reads them on {day}.",
    "de": "{name} hat {n} Bücher und liest sie am Abend.",
    "fr": "{name} a {n} livres et les lit avec une amie.",
    "es": "{name} tiene {n} libros y los lee por la noche.",
}


def language(rng: random.Random) -> dict:
    """A sentence, and the two letters of its language: what the teacher of prompt_distillation would have answered."""
    label = rng.choice(list(SENTENCES))
    text = SENTENCES[label].format(name=rng.choice(NAMES), n=rng.randint(2, 99), day=rng.choice(DAYS))
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": label}]}


def rows(count: int, seed: str, make) -> list[dict]:
    rng = random.Random(seed)
    return [make(rng) for _ in range(count)]


def conversation(rng: random.Random) -> dict:
    question, answer = fact(rng)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def gsm8k(rng: random.Random) -> dict:
    question, working, answer = word_problem(rng)
    return {"question": question, "answer": f"{working}\n#### {answer}"}


SUFFIXES = [" Provide a numerical answer without units, written inside \\boxed{}.", " Write your answer in \\boxed{} format."]


def boxed(rng: random.Random) -> dict:
    """A word problem as the recipes put it, and its answer in a box."""
    question, working, answer = word_problem(rng)
    reply = f"{working} \\boxed{{{answer}}}"
    return {"messages": [{"role": "user", "content": question + rng.choice(SUFFIXES)}, {"role": "assistant", "content": reply}]}


def math(rng: random.Random) -> dict:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    problem = f"Compute ${a} + {b}$."
    return {"problem": problem, "solution": f"${a} + {b} = \\boxed{{{a + b}}}$", "answer": str(a + b)}


def polaris(rng: random.Random) -> dict:
    question, _, answer = word_problem(rng)
    return {"problem": question, "answer": str(answer), "difficulty": "1/8"}


def deepmath(rng: random.Random) -> dict:
    question, _, answer = word_problem(rng)
    return {"question": question, "final_answer": str(answer), "difficulty": 1.0}


def thoughts(rng: random.Random) -> dict:
    question, working, answer = word_problem(rng)
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": f"{working} The answer is {answer}."}]}


def preference(rng: random.Random) -> dict:
    """Two answers to one question: a short one that is right, and one that talks about something else."""
    question, answer = fact(rng)
    _, other = fact(rng)
    prompt = f"\n\nHuman: {question}\n\nAssistant: "
    return {"chosen": prompt + answer, "rejected": prompt + f"I would rather not say. {other}"}


def multiple_choice(rng: random.Random) -> dict:
    question, _, answer = word_problem(rng)
    wrong = rng.sample([n for n in range(1, 20) if n != answer], 3)
    texts = [str(n) for n in [answer, *wrong]]
    rng.shuffle(texts)
    return {
        "domain": "Chemistry",
        "details": {"level": "L3"},
        "type": "mcq-4-choices",
        "question": question,
        "choices": {"label": list("ABCD"), "text": texts},
        "answerKey": "ABCD"[texts.index(str(answer))],
    }


def tool_call(rng: random.Random) -> dict:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    name, sign = rng.choice([("add", "plus"), ("subtract", "minus")])
    return {
        "instruction": f"Tools: add(a, b), subtract(a, b). Which call answers: what is {a} {sign} {b}?",
        "output": f"Action: {name}\nAction Input: {{\"a\": {a}, \"b\": {b}}}",
    }


def page_line(rng: random.Random) -> dict:
    """A line of a text in which the words that the counting task asks for occur."""
    words = ["after", "before", "between", "during", "many", "most", "over", "several", "their", "through", "under", "until", "when"]
    name, thing, day = rng.choice(NAMES), rng.choice(THINGS), rng.choice(DAYS)
    line = f" {name} counted {rng.choice(words)} {rng.randint(2, 99)} {thing} on {day} , {rng.choice(words)} {rng.choice(MONTHS)} . \n"
    return {"text": line}


def forecast_row(i: int, rng: random.Random, month: int) -> dict:
    """An event with one market, whose outcome follows from the report among its sources."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    outcome = rng.randrange(2)
    market = f"{name} buys {thing}"
    report = f"{name} {'has already ordered' if outcome else 'has cancelled the order of'} the {thing}."
    day = rng.randint(1, 20)
    return {
        "submission_id": f"s{i}",
        "event_ticker": f"E{i}",
        "title": f"Will {name} buy {thing}?",
        "snapshot_time": f"2025-{month:02}-{day:02}T00:00:00+00:00",
        "close_time": f"2025-{month:02}-{day + 5:02}T00:00:00+00:00",
        "market_outcome": json.dumps({market: outcome}),
        "category": "Shops",
        "markets": json.dumps([market]),
        "sources": json.dumps([{"ranking": 1, "title": "Report", "summary": report}]),
    }


def forecasts(train: int, validation: int) -> list[dict]:
    """Rows on both sides of the recipe's split date, 2025-10-20."""
    rng = random.Random("forecasts")
    early = [forecast_row(i, rng, 9) for i in range(train)]
    return early + [forecast_row(train + i, rng, 11) for i in range(validation)]

