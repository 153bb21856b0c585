"""Memory over a horizon that is longer than what is seen: facts come page by page, each is shown once, and is asked for later.

Each page takes the one before out of the model's context: what was not kept as a note is gone. Notes are a graph: `store` ties a subject and a relation to an object, `recall` asks for them, `forget` frees room. Facts change, so that the newest
counts; `room` bounds the notes, so that not everything can be kept, and what will be asked is announced.
"""

import random

from sinew import Done, Env, Step, ToolError, tool

PEOPLE = "Ana Ben Cleo Dan Eva Finn Gina Hal Ida Jon Kay Lou".split()
RELATIONS = {
    "lives in": "Oslo Rome Lima Cairo Delhi Quito Bern Kyoto".split(),
    "plays": "chess cello rugby piano darts drums".split(),
    "owns": "cat horse boat tent kite bike".split(),
}


class Memory(Env):
    system = "You read pages, one after the other; none is shown again. Keep notes of what will be asked, then answer."
    #: Pages, facts on each, notes that fit, and questions at the end.
    pages = 6
    facts = 3
    room = 8
    questions = 3
    limit = 60

    def start(self, task):
        self.world = task.world
        self.book, self.asked = self.story(task.world)
        self.s = {"page": 0, "notes": [], "answers": [], "used": 0}
        return self.page()

    def page(self):
        """All that is seen of a page or a question: earlier ones have left the context."""
        topics = ", ".join(sorted({f"who {relation} what" for _, relation, _ in self.asked}))
        head = f"There are {len(self.book)} pages. You will be asked: {topics}. You can keep {self.room} notes, and have {len(self.s['notes'])}."
        return f"{head}\n{self.shown()}"

    @classmethod
    def story(cls, world):
        draw = random.Random(world)
        book, now = [], {}
        people = draw.sample(PEOPLE, 5)
        asked_for = draw.choice(sorted(RELATIONS))
        for _ in range(cls.pages):
            page = []
            for _ in range(cls.facts):
                relation = draw.choice(sorted(RELATIONS))
                who, what = draw.choice(people), draw.choice(RELATIONS[relation])
                now[who, relation] = what
                page.append((who, relation, what))
            book.append(page)
        known = sorted(key for key in now if key[1] == asked_for)
        if not known:
            who, what = people[0], RELATIONS[asked_for][0]
            book[0][0] = (who, asked_for, what)
            now = {(w, r): o for page in book for w, r, o in page}
            known = sorted(key for key in now if key[1] == asked_for)
        draw.shuffle(known)
        return book, [(who, relation, now[who, relation]) for who, relation in known[: cls.questions]]

    def shown(self):
        at = self.s["page"]
        if at < len(self.book):
            return f"Page {at + 1}: " + " ".join(
                f"{who} {relation} {what}." for who, relation, what in self.book[at]
            )
        question = len(self.s["answers"])
        who, relation, _ = self.asked[question]
        return f"Question {question + 1} of {len(self.asked)}: {who} {relation} what? Answer with one word."

    def spend(self):
        self.s["used"] += 1
        if self.s["used"] > self.limit:
            raise ToolError("The time is over: end your turn without a call.")

    @tool
    def next_page(self):
        "Turn to the next page. The one before is gone."
        self.spend()
        if self.s["page"] >= len(self.book):
            raise ToolError("there are no more pages: answer the question")
        self.s["page"] += 1
        return Step(self.page(), fresh=True)

    @tool
    def store(self, subject: str, relation: str, object: str):
        "Keep a note, such as: Ana, lives in, Oslo."
        self.spend()
        if len(self.s["notes"]) >= self.room:
            raise ToolError(f"all {self.room} notes are used: forget one")
        if max(map(len, (subject, relation, object))) > 20:
            raise ToolError("each part of a note has at most 20 characters")
        self.s["notes"].append([subject, relation, object])
        return f"{len(self.s['notes'])} of {self.room} notes"

    @tool
    def recall(self, subject: str = "", relation: str = ""):
        "Notes of a subject, of a relation, or of both; without either, all."
        self.spend()
        found = [n for n in self.s["notes"] if subject in ("", n[0]) and relation in ("", n[1])]
        return [" ".join(note) for note in found] or "nothing"

    @tool
    def forget(self, subject: str, relation: str):
        "Drop the notes of a subject and a relation."
        self.spend()
        kept = [n for n in self.s["notes"] if n[:2] != [subject, relation]]
        dropped = len(self.s["notes"]) - len(kept)
        self.s["notes"] = kept
        return f"dropped {dropped}"

    @tool
    def answer(self, word: str):
        "Answer the question that is shown."
        self.spend()
        if self.s["page"] < len(self.book):
            raise ToolError("read all pages first")
        self.s["answers"].append(word.strip().lower())
        return Done("The end.") if len(self.s["answers"]) == len(self.asked) else Step(self.page(), fresh=True)

    def reward(self, task):
        right = [said == what.lower() for said, (_, _, what) in zip(self.s["answers"], self.asked)]
        share = sum(right) / len(self.asked)
        return {"reward": share, "success": share == 1.0, "notes": len(self.s["notes"])}

    def state(self):
        return {key: value for key, value in self.s.items() if key != "used"}

    def snapshot(self):
        return {"s": self.s, "world": self.world}

    def restore(self, snapshot):
        self.s, self.world = snapshot["s"], snapshot["world"]
        self.book, self.asked = self.story(self.world)

    @classmethod
    def tasks(cls, split, seed):
        for i in range(2000 if split == "train" else 200):
            yield {
                "prompt": "Read, keep what matters, and answer.",
                "kind": "memory",
                "world": f"memory {split} {seed} {i}",
            }

    @classmethod
    def gold(cls, task):
        book, asked = cls.story(task.world)
        wanted = {(who, relation) for who, relation, _ in asked}
        way, kept = [], set()
        for page in book:
            turn = []
            for who, relation, what in page:
                if (who, relation) in wanted:
                    if (who, relation) in kept:
                        turn.append(("forget", {"subject": who, "relation": relation}))
                    turn.append(("store", {"subject": who, "relation": relation, "object": what}))
                    kept.add((who, relation))
            way.append([*turn, ("next_page", {})])
        for who, relation, what in asked:
            way.append([("recall", {"subject": who, "relation": relation}), ("answer", {"word": what})])
        return way


class Graph(Memory):
    """Notes as a graph that is walked: who is known by whom, and where people live. A question needs two facts of different pages."""

    system = "You read pages, one after the other; none is shown again. Keep notes, newer facts replace older ones; `follow` walks from note to note. Then answer."
    people = 4
    questions = 2
    #: The relations on the way of a question.
    way = ("knows", "lives in")

    @classmethod
    def story(cls, world):
        draw, now, book = random.Random(world), {}, []
        people = draw.sample(PEOPLE, cls.people)

        def fact(who, relation):
            others = RELATIONS["lives in"] if relation == "lives in" else [p for p in people if p != who]
            now[who, relation] = draw.choice(others)
            return who, relation, now[who, relation]

        for _ in range(cls.pages):
            book.append([fact(draw.choice(people), draw.choice(cls.way)) for _ in range(cls.facts)])
        # A first question can always be asked: the last page completes its way.
        first, second = cls.way
        if (people[0], first) not in now:
            book[-1].append(fact(people[0], first))
        if (now[people[0], first], second) not in now:
            book[-1].append(fact(now[people[0], first], second))
        ends = {who: now.get((now[who, first], second)) for who in people if (who, first) in now}
        asked = [(who, f"{first} who {second}", what) for who, what in ends.items() if what]
        return book, asked[: cls.questions]

    @tool
    def follow(self, subject: str, relations: list[str]):
        """Walk over the notes.

        Args:
            subject: where the way begins
            relations: what to follow, one after the other
        """
        self.spend()
        if not 1 <= len(relations) <= 5:
            raise ToolError(f"there are {len(relations)} relations; allowed: 1 to 5")
        at, seen = subject, []
        for relation in relations:
            found = [note for note in self.s["notes"] if note[:2] == [at, relation]]
            if not found:
                return "; ".join([*seen, f"no note: {at} {relation}"])
            # The newest counts.
            seen.append(" ".join(found[-1]))
            at = found[-1][2]
        return "; ".join(seen)

    @classmethod
    def gold(cls, task):
        book, asked = cls.story(task.world)
        turns, kept = [], set()
        for page in book:
            turn = []
            for who, relation, what in page:
                if (who, relation) in kept:
                    turn.append(("forget", {"subject": who, "relation": relation}))
                turn.append(("store", {"subject": who, "relation": relation, "object": what}))
                kept.add((who, relation))
            turns.append([*turn, ("next_page", {})])
        for who, _, what in asked:
            turns += [("follow", {"subject": who, "relations": list(cls.way)}), ("answer", {"word": what})]
        return turns
