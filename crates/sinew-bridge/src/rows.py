"""Rows of tasks: those of a function of their own, and those of the class of an environment.

The second part of the program of a worker, between `schema.py` and `worker.py`.
"""

import itertools
import time

#: Maximum bytes and rows of one page, and seconds after which a page ends with the rows that it has.
PAGE_BYTES, PAGE_ROWS, PAGE_S = 1 << 20, 10000, 1.0


def _row(row):
    """A row of a task as JSON text."""
    if isinstance(row, str):
        row = {"prompt": row}
    return json.dumps(row, default=_jsonable, ensure_ascii=False, allow_nan=False)


class RowSource:
    """Rows of a function, a list or another iterable, in pages.

    Pages are asked for in order. A generator runs on from page to page, so that its rows are never all in
    the memory of the worker, and one without an end is stopped by the limits of the host.
    """

    def __init__(self, found, place):
        self.found = found
        self.place = place
        #: For each split: the iterator, and how many rows it has given.
        self.open = {}

    @property
    def splits(self):
        """Whether the rows of a split are asked for by name."""
        return callable(self.found) and any(n == "split" for n, _ in parameters_of(self.found)[0])

    def begin(self, split, seed):
        rows = self.found
        if callable(rows):
            rows = finished(Bound(rows)({"split": split, "seed": seed}))
        if isinstance(rows, (str, bytes, collections.abc.Mapping)) or not hasattr(rows, "__iter__"):
            raise TypeError(
                "%s: it gives %s: expected rows, as a list or by yield" % (self.place, type(rows).__name__)
            )
        return iter(rows)

    def page(self, split, seed, offset):
        """Some rows of a split from `offset`, and whether they are the last."""
        if offset == 0:
            self.open[split] = [self.begin(split, seed), 0]
        kept = self.open.get(split)
        if kept is None or kept[1] != offset:
            raise RuntimeError("the worker that made the first rows ended: start again")
        page, size, until = [], 0, time.monotonic() + PAGE_S
        for row in itertools.islice(kept[0], PAGE_ROWS):
            try:
                page.append(_row(row))
            except (TypeError, ValueError) as e:
                raise ValueError("%s: index %d: the row is no JSON: %s" % (self.place, kept[1], e)) from None
            kept[1] += 1
            size += len(page[-1])
            if size > PAGE_BYTES or time.monotonic() > until:
                return {"rows": page, "done": False}
        done = len(page) < PAGE_ROWS
        if done:
            del self.open[split]
        return {"rows": page, "done": done}


class TasksTarget(RowSource):
    """A function that gives rows, or a list of rows, that a recipe names."""

    #: No text of a model reaches it.
    thing, is_async = None, False

    def __init__(self, found):
        if isinstance(found, type):
            raise TypeError("%r is a class: name a function or a list of rows" % (found,))
        place = shown_place(found) if callable(found) else "the list of rows"
        super().__init__(found, place)
        if callable(found):
            for name, needed in parameters_of(found)[0]:
                if needed and name not in ("split", "seed"):
                    raise BindError(
                        "%s: no value for the parameter %s; a function of tasks can have: split, seed"
                        % (place, name)
                    )

    def describe(self):
        return {"splits": self.splits, "place": self.place}
