"""Search and research: questions of several hops over a corpus that is made from a seed, with citations that are checked.

`search` ranks passages with BM25, `open` shows one, `find` shows the lines of it that hold a word. An answer counts if it is right and it cites
exactly the pages of the way to it, whose facts were shown before; citing everything does not help, and a page that does not exist costs all.
"""

import random

from sinew import Done, Env, ToolError, tool
from sinew.worlds.search import Index, words

FIRST = "Alma Boris Clara Dario Edda Felix Greta Hugo Irma Jonas Kira Leon Marta Nils Olga Paul Runa Silas Thea Urs".split()
LAST = "Adler Brandt Conrad Dorn Ebner Falk Gruber Holm Iversen Jansen Keller Lindner Moser Nagel Otten Peters".split()
TOWNS = (
    "Arden Brook Calder Dunmore Elstow Fenwick Garth Hollin Ingle Jarrow Kelso Lorton Melby Norley".split()
)
FIELDS = "botany glass clocks bridges rivers moths harps maps salt wind".split()
#: Questions by the number of hops, with the relations that are followed.
HOPS = {
    1: [("born", "Where was {0} born?")],
    2: [
        ("teacher born", "Where was the teacher of {0} born?"),
        ("works mayor", "Who is the mayor of the town in which {0} works?"),
    ],
    3: [("teacher works mayor", "Who is the mayor of the town in which the teacher of {0} works?")],
}


class Research(Env):
    system = "Answer from the corpus alone: search, open pages, then call answer with the pages that hold the facts."
    #: People in the corpus. Twice as many pages.
    people = 24
    hops = (1, 2, 3)
    limit = 30

    def start(self, task):
        self.pages = self.corpus(task.world)[0]
        self.world = task.world
        self.s = {"used": 0, "read": {}, "answer": None, "cites": []}

    @classmethod
    def corpus(cls, world):
        """Pages by title, and the facts: `facts[name][relation]` is a name and the page that says it."""
        draw = random.Random(world)
        names = draw.sample([f"{a} {b}" for a in FIRST for b in LAST], cls.people + len(TOWNS))
        people, mayors = names[: cls.people], names[cls.people :]
        towns = draw.sample(TOWNS, len(TOWNS))
        facts = {town: {"mayor": (mayor, town)} for town, mayor in zip(towns, mayors)}
        pages = {}
        for town, mayor in zip(towns, mayors):
            pages[town] = (
                f"{town} is a town on a river, known for {draw.choice(FIELDS)}.\nIts mayor is {mayor}, elected in {draw.randint(1990, 2020)}.\n"
                f"Near it lies {draw.choice([t for t in towns if t != town])}."
            )
        for name in people:
            teacher = draw.choice([p for p in people if p != name])
            born, works = draw.sample(towns, 2)
            career = f"{name} (career)"
            pages[name] = (
                f"{name} was born in {born} in {draw.randint(1940, 1990)}.\nTo those who knew the family, {draw.choice(FIELDS)} was no surprise.\n"
                f"See also: {career}."
            )
            pages[career] = (
                f"{name} studied {draw.choice(FIELDS)} under {teacher}.\nToday the institute of {name} stands in {works}.\nPrizes: none."
            )
            facts[name] = {"born": (born, name), "teacher": (teacher, career), "works": (works, career)}
        return pages, facts

    @classmethod
    def steps(cls, world, name, relations):
        """The facts on the way to the answer, which is the last, each with its page."""
        facts, at, found = cls.corpus(world)[1], name, []
        for relation in relations.split():
            at, page = facts[at][relation]
            found.append((at, page))
        return found

    @classmethod
    def way(cls, world, name, relations):
        """The answer, and the pages that lead to it."""
        found = cls.steps(world, name, relations)
        return found[-1][0], [page for _, page in found]

    def spend(self):
        self.s["used"] += 1
        if self.s["used"] > self.limit:
            raise ToolError("The time is over: end your turn without a call.")

    @tool
    def search(self, query: str):
        "Titles of the five pages that fit the words best, with their first lines."
        self.spend()
        titles = sorted(self.pages)
        best = [titles[at] for at in Index(f"{title} {self.pages[title]}" for title in titles).best(query, 5)]
        return [{"page": title, "begins": self.pages[title].split("\n")[0][:80]} for title in best]

    def page(self, page):
        self.spend()
        if page not in self.pages:
            raise ToolError(f"there is no page {page!r}: search first")
        return self.pages[page].split("\n")

    def shown(self, page, lines):
        """Notes which lines of a page were shown."""
        if lines:
            known = self.s["read"].get(page, [])
            self.s["read"][page] = [line for line in self.pages[page].split("\n") if line in known or line in lines]
        return "\n".join(lines) or "no such line"

    def has_read(self, page, fact):
        """Whether a line of a page was shown that holds a fact."""
        return any(fact in line for line in self.s["read"].get(page, []))

    @tool
    def open(self, page: str):
        "Read a page."
        return self.shown(page, self.page(page))

    @tool
    def find(self, page: str, word: str):
        "Lines of a page that hold a word."
        lines = self.page(page)
        asked = set(words(word))
        return self.shown(page, [line for line in lines if asked and asked <= set(words(line))])

    @tool
    def answer(self, answer: str, cites: list[str]):
        """Give the answer.

        Args:
            answer: a name, nothing else
            cites: titles of the pages that hold the facts
        """
        self.s["answer"], self.s["cites"] = answer, cites
        return Done("received")

    def reward(self, task):
        steps = self.steps(task.world, task.name, task.relations)
        right, _ = steps[-1]
        said = " ".join(words(self.s["answer"] or ""))
        correct = said == " ".join(words(right))
        cites = set(self.s["cites"])
        read = all(self.has_read(page, fact) for fact, page in steps)
        honest = read and cites == {page for _, page in steps}
        made_up = len([c for c in cites if c not in self.pages])
        # Who read all facts and cites some of their pages is half right; a right answer that was not read is a guess.
        part = read and cites and cites <= {page for _, page in steps}
        return {
            "reward": 1.0 if correct and honest else 0.5 if correct and part else 0.0,
            "success": correct and honest,
            "correct": correct,
            "cited": honest,
            "made_up": made_up,
        }

    def state(self):
        return {key: value for key, value in self.s.items() if key != "used"}

    def snapshot(self):
        return {"s": self.s, "world": self.world}

    def restore(self, snapshot):
        self.s, self.world = snapshot["s"], snapshot["world"]
        self.pages = self.corpus(self.world)[0]

    @classmethod
    def tasks(cls, split, seed):
        for i in range(2000 if split == "train" else 200):
            world = f"research {split} {seed} {i}"
            draw = random.Random(f"question {world}")
            hops = cls.hops[i % len(cls.hops)]
            relations, text = draw.choice(HOPS[hops])
            people = sorted(name for name in cls.corpus(world)[1] if " " in name)
            name = draw.choice(people)
            yield {
                "prompt": text.format(name),
                "kind": f"{hops} hops",
                "world": world,
                "name": name,
                "relations": relations,
            }

    @classmethod
    def gold(cls, task):
        right, pages = cls.way(task.world, task.name, task.relations)
        opened = [("open", {"page": page}) for page in dict.fromkeys(pages)]
        return [("search", {"query": task.name}), *opened, ("answer", {"answer": right, "cites": pages})]
