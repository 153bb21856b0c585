"""Questions over one corpus that all episodes share: generated pages, or pages of your own.

`search` ranks pages with BM25, `open` shows one or a part of it, `find` shows the places of a text in a page that is open. An answer counts
if it is right and cites exactly the pages that hold its facts, all of which were opened before.
"""

import collections
import functools
import inspect
import json
import math
import os
import random
import re
import zlib

from sinew import Done, Env, ToolError, tool

#: Things of each kind, countries, characters around a match, and matches that `find` shows.
THINGS, COUNTRIES, AROUND, FOUND = 60, 8, 100, 8
SYLLABLES = "ba bel cor dan el fa gor hal in jor ka lem mar nor ost pel qui ras sol tam ul ver wen zor".split()
TRADES = "glass clocks ships paper maps lenses".split()
#: Questions by the number of pages that they need, with the fact that answers them.
QUESTIONS = {
    1: [("Who founded {0}?", "founder"), ("What does the company {0} make?", "trade")],
    2: [
        ("In which town was the founder of {0} born?", "town"),
        ("In which year was the founder of {0} born?", "year"),
    ],
    3: [
        ("On which river is the town where the founder of {0} was born?", "river"),
        ("In which country was the founder of {0} born?", "country"),
    ],
}


def words(text):
    return re.findall(r"[^\W_]+", text.lower())


def plain(text):
    """A text for comparison: its words without articles."""
    return " ".join(word for word in words(text) if word not in ("the", "a", "an"))


class Index:
    """BM25 over texts. k1 = 1.2, b = 0.75: Robertson and Zaragoza (2009), equation 3.15, with a logarithm that is never negative."""

    def __init__(self, texts):
        self.lengths, self.held = [], collections.defaultdict(list)
        for at, text in enumerate(texts):
            counts = collections.Counter(words(text))
            self.lengths.append(sum(counts.values()))
            for word, count in counts.items():
                self.held[word].append((at, count))
        self.mean = sum(self.lengths) / len(self.lengths)

    def best(self, query, limit):
        """Places of the texts that fit best, best first; of equal ones the first."""
        scores = collections.defaultdict(float)
        for word in words(query):
            found = self.held.get(word, ())
            rare = math.log(1 + (len(self.lengths) - len(found) + 0.5) / (len(found) + 0.5))
            for at, count in found:
                norm = 1.2 * (0.25 + 0.75 * self.lengths[at] / self.mean)
                scores[at] += rare * count * 2.2 / (count + norm)
        return sorted(scores, key=lambda at: (-scores[at], at))[:limit]


@functools.lru_cache(maxsize=None)
def generated(seed):
    """Generated pages, and of each company its facts and the pages that lead to them. No model knows the names."""
    draw, known = random.Random(f"search {seed}"), set()

    def name():
        new = "".join(draw.choices(SYLLABLES, k=3)).capitalize()
        if new in known:
            return name()
        known.add(new)
        return new

    pages, facts = [], {}
    countries = [name() for _ in range(COUNTRIES)]
    for at, country in enumerate(countries):
        text = f"{country} is a country. People pay with the {name()}. It exports clocks and maps."
        pages.append({"id": f"country-{at}", "title": country, "text": text})
    towns, people = [], []
    for at in range(THINGS):
        town, river, country = name(), name(), draw.choice(countries)
        towns.append({"page": f"town-{at}", "town": town, "river": river, "country": country})
        text = f"{town} is a town on the river {river}. It belongs to {country}, and has a market on Fridays."
        pages.append({"id": f"town-{at}", "title": town, "text": text})
    for at in range(THINGS):
        person, year, town = f"{name()} {name()}", draw.randint(1801, 1990), draw.choice(towns)
        people.append({"page": f"person-{at}", "founder": person, "year": str(year), "born": town})
        text = f"{person} was born in {town['town']} in {year}, and wrote letters all through life. A street bears the name."
        pages.append({"id": f"person-{at}", "title": person, "text": text})
    for at in range(THINGS):
        company, trade, person = name(), draw.choice(TRADES), draw.choice(people)
        text = (
            f"{company} is a company that makes {trade}. It was founded by {person['founder']}, and is known for its workers' choir. "
            f"A museum shows its first {trade}."
        )
        pages.append({"id": f"company-{at}", "title": company, "text": text})
        way = [f"company-{at}", person["page"], person["born"]["page"]]
        facts[company] = {"way": way, "trade": trade, **person, **person["born"]}
    return pages, facts


class Search(Env):
    system = (
        "You answer questions from the pages of a library. Search them, open those that you need, then call answer with the ids of the "
        "pages that hold the facts, and no others."
    )
    #: A file with a page a line, `{"id": "tea", "title": "Tea", "text": "..."}`, in the folder of a class of your own. Empty: generated.
    corpus = ""
    corpus_seed = 0
    #: Pages that a generated question needs, 1 to 3.
    hops = [1, 2, 3]
    #: Calls of an episode, pages that a search shows, and characters of a page that are shown at once.
    limit = 20
    results = 5
    page_chars = 2000

    @classmethod
    def setup_worker(cls):
        if not cls.hops or not set(cls.hops) <= set(QUESTIONS):
            raise ValueError(f"hops = {cls.hops}: allowed: some of {sorted(QUESTIONS)}")
        if cls.page_chars < 1 or cls.results < 1:
            raise ValueError("page_chars and results are at least 1")
        cls.library()

    @classmethod
    @functools.lru_cache(maxsize=None)
    def library(cls):
        """The pages by id, and their index."""
        rows = cls.read() if cls.corpus else generated(cls.corpus_seed)[0]
        pages = {}
        for at, row in enumerate(rows, 1):
            if not isinstance(row, dict) or any(not isinstance(row.get(key), str) for key in ("id", "title", "text")):
                raise ValueError(f"corpus: page {at} has not the texts id, title and text")
            if row["id"] in pages:
                raise ValueError(f"corpus: page {at} has the id {row['id']!r} of a page before it")
            pages[row["id"]] = row
        if not pages:
            raise ValueError("corpus: there are no pages")
        return pages, Index(f"{page['title']} {page['text']}" for page in pages.values())

    @classmethod
    def read(cls):
        if cls.__module__ == __name__:
            raise ValueError(f"corpus = {cls.corpus!r}: derive a class in a file in the folder of the corpus, and name that in the recipe")
        with open(os.path.join(os.path.dirname(inspect.getfile(cls)), cls.corpus), encoding="utf-8") as file:
            for at, line in enumerate(file, 1):
                try:
                    if line.strip():
                        yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{cls.corpus}, line {at}: {error}") from None

    def start(self, task):
        self.key(task)
        self.s = {"used": 0, "opened": [], "answer": None, "cites": []}

    @classmethod
    def key(cls, task):
        """The right answers, and the pages to cite; `None`: any page that was opened."""
        answers, cites = task.get("answer"), task.get("citations")
        answers = [str(answers)] if isinstance(answers, (str, int)) else answers
        if not isinstance(answers, list) or not answers or any(not isinstance(answer, str) for answer in answers):
            raise ValueError("the column answer is no text, no whole number and no list of texts")
        if cites is not None and (not isinstance(cites, list) or any(not isinstance(page, str) for page in cites)):
            raise ValueError("the column citations is no list of ids")
        for page in cites or ():
            if page not in cls.library()[0]:
                raise ValueError(f"citations: the corpus has no page {page!r}")
        return answers, cites

    def spend(self):
        self.s["used"] += 1
        if self.s["used"] > self.limit:
            raise ToolError("The time is over: end your turn without a call.")

    def page(self, id):
        self.spend()
        pages = self.library()[0]
        if id not in pages:
            raise ToolError(f"there is no page {id!r}; search shows ids")
        return pages[id]

    @tool
    def search(self, query: str):
        "Search the pages for words."
        self.spend()
        pages, index = self.library()
        every = list(pages.values())
        found = [every[at] for at in index.best(query, self.results)]
        if not found:
            raise ToolError("no page has any of these words")
        return [{"id": page["id"], "title": page["title"], "begins": page["text"][:AROUND]} for page in found]

    @tool
    def open(self, id: str, part: int = 0):
        "Open a page. A long one has several parts, from 0."
        page = self.page(id)
        parts = max(1, math.ceil(len(page["text"]) / self.page_chars))
        if not 0 <= part < parts:
            raise ToolError(f"page {id} has the parts 0 to {parts - 1}")
        if id not in self.s["opened"]:
            self.s["opened"].append(id)
        place = f" (part {part} of 0 to {parts - 1})" if parts > 1 else ""
        return f"{page['title']}{place}\n{page['text'][part * self.page_chars :][: self.page_chars]}"

    @tool
    def find(self, id: str, text: str):
        "Find a text in an open page."
        page = self.page(id)["text"]
        if id not in self.s["opened"]:
            raise ToolError(f"open page {id} first")
        if not text:
            raise ToolError("text is empty")
        places = re.finditer(re.escape(text), page, re.IGNORECASE)
        found = [page[max(0, m.start() - AROUND) : m.end() + AROUND] for _, m in zip(range(FOUND), places)]
        if not found:
            raise ToolError(f"page {id} does not say {text!r}")
        return "\n".join(f"...{text}..." for text in found)

    @tool
    def answer(self, text: str, citations: list[str]):
        """Answer the question.

        Args:
            text: the answer, nothing else
            citations: ids of the pages that hold the facts
        """
        self.spend()
        self.s["answer"], self.s["cites"] = text, citations
        return Done("received")

    def reward(self, task):
        answers, pages = self.key(task)
        said, cites = plain(self.s["answer"] or ""), set(self.s["cites"])
        right = said != "" and any(plain(answer) == said for answer in answers)
        unopened = len(cites - set(self.s["opened"]))
        cited = unopened == 0 and (bool(cites) if pages is None else cites == set(pages))
        more = {"answer_right": right, "citations_right": cited, "cited_unopened": unopened}
        return {"reward": right and cited, **more, "opened": len(self.s["opened"])}

    def state(self):
        return {key: value for key, value in self.s.items() if key != "used"}

    def snapshot(self):
        return self.s

    def restore(self, snapshot):
        self.s = snapshot

    @classmethod
    def tasks(cls, split, seed):
        if cls.corpus:
            raise ValueError("pages of your own have questions of your own: rows of [tasks] with the columns answer and citations")
        facts = generated(cls.corpus_seed)[1]
        # A fifth of the companies is asked about in held-out tasks only.
        companies = [c for c in sorted(facts) if (zlib.crc32(c.encode()) % 5 == 0) == (split != "train")]
        for i in range(2000 if split == "train" else 200):
            draw, hops = random.Random(f"search {split} {seed} {i}"), cls.hops[i % len(cls.hops)]
            company, (text, fact) = draw.choice(companies), draw.choice(QUESTIONS[hops])
            asked = {"answer": facts[company][fact], "citations": facts[company]["way"][:hops]}
            yield {"prompt": text.format(company), "kind": f"search/{hops}", "number": i, **asked}

    @classmethod
    def gold(cls, task):
        answers, cites = cls.key(task)
        pages, index = cls.library()
        if cites is None:
            every = list(pages)
            cites = [every[at] for at in index.best(answers[0], 1)] or every[:1]
        looks = [[("search", {"query": pages[id]["title"]}), ("open", {"id": id})] for id in cites]
        return [*sum(looks, []), ("answer", {"text": answers[0], "citations": cites})]
