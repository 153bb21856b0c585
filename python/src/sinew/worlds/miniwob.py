"""Pages of MiniWoB++ in a browser (Shi et al., World of Bits, 2017; Liu et al., 2018). The pages are plain files of the package `miniwob`,
under the MIT licence, which is not part of Sinew.

A task is a page and a seed of `Math.seedrandom`. The reward is the page's own, without its decay over time: 1 where the page gives its
full raw reward, else 0. The page's clock never ends an episode. A page is served once: another one, or the same one again, would have
another problem.
"""

import importlib.util
import os
import random
import re

from sinew.bridges import Missing
from sinew.worlds.web import Move, Response, Web, choose, click, fill

#: Starts the problem of a seed: without the cover, the clock and the display of rewards, which are not part of it. The largest delay of a
#: timer stands for no end. Without animations of jQuery, a page is what it is whenever it is looked at.
BEGIN = """(() => {
    Math.seedrandom(String(SEED)); core.EPISODE_MAX_TIME = 2147483647;
    if (window.jQuery) jQuery.fx.off = true;
    core.startEpisodeReal();
    for (const id of ['reward-display', 'click-canvas', 'sync-task-cover', 'query']) {
        const node = document.getElementById(id); if (node) node.style.visibility = 'hidden';
    }
    return core.getUtterance();
})()"""
PROBE = "[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".png": "image/png",
    ".gif": "image/gif",
    ".svg": "image/svg+xml",
}
#: Bytes of a file of a page at most.
LARGEST = 8 << 20


def texts(task):
    return re.findall(r'"([^"]*)"', task)


def between(task, before, after):
    """The text between the beginning and the end of a task in words."""
    if not (task.startswith(before) and task.endswith(after)):
        raise ValueError(f"the task is of no known form: {task}")
    return task[len(before) : len(task) - len(after)]


def boxes(task):
    names = between(task, "Select ", " and click Submit.").split(", ")
    return [click("checkbox", name) for name in names if name != "nothing"] + [click("button", "Submit")]


#: Families that can be played by their accessibility tree, each with its gold policy.
FAMILIES = {
    "click-button": lambda task: [click("button", texts(task)[0])],
    "click-button-sequence": lambda task: [click("button", "ONE"), click("button", "TWO")],
    "click-checkboxes": boxes,
    "click-dialog": lambda task: [click("button", "Close")],
    "click-dialog-2": lambda task: [click("button", "Close" if texts(task)[0] == "x" else texts(task)[0])],
    "click-link": lambda task: [click("text", texts(task)[0])],
    "click-option": lambda task: [click("radio", between(task, "Select ", " and click Submit.")), click("button", "Submit")],
    "click-tab": lambda task: [click("tab", between(task, "Click on ", "."))],
    "choose-list": lambda task: [choose(between(task, "Select ", " from the list and click Submit.")), click("button", "Submit")],
    "enter-password": lambda task: [fill(texts(task)[0], nth=0), fill(texts(task)[0], nth=1), click("button", "Submit")],
    "enter-text": lambda task: [fill(texts(task)[0]), click("button", "Submit")],
    "focus-text": lambda task: [Move("click", "textbox")],
    "login-user": lambda task: [fill(texts(task)[0], nth=0), fill(texts(task)[1], nth=1), click("button", "Login")],
}


class MiniWoB(Web):
    #: Families that tasks are drawn from, in turn; empty: all that have a gold policy.
    families = []

    @classmethod
    def setup_worker(cls):
        super().setup_worker()
        for name in cls.families:
            if name not in FAMILIES:
                raise ValueError(f"options.families: {name!r} is unknown; allowed: {', '.join(FAMILIES)}")
        # The package itself is not imported: it drives another browser.
        found = importlib.util.find_spec("miniwob")
        if found is None or not found.submodule_search_locations:
            raise Missing(
                "miniwob, the pages of MiniWoB++, is missing: pip install --no-deps miniwob==1.1.0, and name its interpreter with env.python"
            )
        cls.files, cls.folder = {}, os.path.join(list(found.submodule_search_locations)[0], "html")

    def opened(self, task):
        self.raw, self.served, self.home = None, False, f"/miniwob/{task.family}.html"
        return self.home

    async def begun(self, task):
        self.words = await self.page.evaluate(BEGIN.replace("SEED", str(task.seed)))
        await self.page.settle(self.settle_ms)
        return self.words

    def answer(self, request):
        if request.document and self.served:
            # No content: the page stays as it is.
            return Response(204)
        self.served = True
        content = self.file(request.path) if request.method == "GET" else None
        if content is None:
            return Response(404)
        return Response(200, TYPES.get(os.path.splitext(request.path)[1], "application/octet-stream"), content)

    @classmethod
    def file(cls, path):
        """A file of the pages, which are read once; none: there is no such file."""
        full = os.path.realpath(os.path.join(cls.folder, path.lstrip("/")))
        if full not in cls.files:
            inside = full.startswith(os.path.realpath(cls.folder) + os.sep)
            if not inside or not os.path.isfile(full) or os.path.getsize(full) > LARGEST:
                return None
            with open(full, "rb") as file:
                cls.files[full] = file.read()
        return cls.files[full]

    async def over(self):
        # The first reward counts: a page that ended offers the next problem.
        done, raw = await self.page.evaluate(PROBE)
        if done is True:
            self.raw = float(raw)
        return done is True

    def reward(self):
        return {
            "reward": self.raw is not None and self.raw >= 1.0,
            "raw_reward": self.raw or 0.0,
            "requests_refused": self.page.refused if self.page else None,
        }

    @classmethod
    def tasks(cls, split, seed):
        families = cls.families or list(FAMILIES)
        for i in range(cls.train if split == "train" else cls.held_out):
            family = families[i % len(families)]
            # Numbers that JavaScript holds; the last bit says which split it is.
            number = random.Random(f"miniwob {split} {seed} {i}").getrandbits(50) * 2 + (split != "train")
            yield {"prompt": "Your task in the browser:", "kind": f"miniwob/{family}", "family": family, "seed": number}

    def moves(self, task):
        return FAMILIES[task.family](self.words)
