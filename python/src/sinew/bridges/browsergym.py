"""Tasks of BrowserGym: a page in Chromium is seen as its accessibility tree, and acted on with the package's actions as text.

The network of a worker is a loopback interface on which nothing listens, so tasks are those whose pages are files: MiniWoB++.
"""

import concurrent.futures
import difflib
import fnmatch
import importlib.util
import inspect
import os
import re

from sinew import Done, Env, Step, ToolError, tool
from sinew.bridges import Missing, chromium, package, seeds

#: Arguments of `BrowserEnv` that a recipe may set. The others start browsers in other ways, or show windows.
ARGUMENTS = ("viewport", "slow_mo", "timeout", "locale", "timezone_id", "tags_to_mark", "pre_observation_delay")
#: Actions that are not offered. Without a network, `goto` would show files of the worker or run scripts in the page; the others
#: give files of the worker to the page.
WITHHELD = ("goto", "upload_file", "mouse_upload_file")
#: Roles that are not shown: lines of a text, which Chromium reports in addition to the text.
HIDDEN = ["InlineTextBox", "LineBreak"]
#: The longest text of an action, in characters, and of an error of one.
LONGEST_ACTION, LONGEST_ERROR = 2000, 500
#: The longest wait that an action asks for, in milliseconds: one beyond the deadline of a call would end the worker.
LONGEST_WAIT = 5000
#: Milliseconds that a page may take, unless `arguments` has `timeout`. The package's 5,000 pass on a busy machine.
PATIENCE = 30_000
CORE = "browsergym-core==0.14.3 browsergym-miniwob==0.14.3"


class Talk:
    """The chat of an episode: texts alone. The package's own draws them in a second browser, which nobody looks at here."""

    def __init__(self, **_):
        self.messages = []

    def add_message(self, role, msg):
        if role != "info":
            self.messages.append({"role": role, "timestamp": 0.0, "message": msg})

    def wait_for_user_message(self):
        raise ValueError("nobody answers in this chat")

    def close(self):
        pass


class BrowserGym(Env):
    #: Ids of tasks as in the package, without `browsergym/`; `*` stands for any text: `miniwob.click-*`.
    ids = ["miniwob.click-test", "miniwob.click-button", "miniwob.click-link", "miniwob.enter-text"]
    #: Modules that register the ids. `browsergym.miniwob` is known.
    imports = []
    #: Sets of the package's actions: `bid`, `coord`, `chat`, `infeas`, `nav`, `tab`, `miniwob_all`, ...
    subsets = ["bid"]
    #: Of the package's environment: `viewport`, `slow_mo`, `timeout`, `pre_observation_delay`, ...
    arguments = {}
    #: Of the package's `flatten_axtree_to_str`: what is shown of the tree.
    tree = {"with_clickable": True, "filter_visible_only": True}
    #: Characters of a page that are shown.
    longest = 8000
    #: Actions until an episode ends.
    limit = 10
    #: Sum of rewards from which on an episode is solved.
    solved_at = 1.0
    #: Chromium's program.
    browser = chromium.PROGRAM
    #: Tasks of each split: the ids in turn, each with a seed of its own.
    train, held_out = 1000, 100

    @classmethod
    def setup_worker(cls):
        for name in cls.arguments:
            if name not in ARGUMENTS:
                raise ValueError(f"options.arguments: {name!r} cannot be set; allowed: {', '.join(ARGUMENTS)}")
        for name in ("longest", "limit"):
            if getattr(cls, name) < 1:
                raise ValueError(f"options.{name} is {getattr(cls, name)}; allowed: 1 or more")
        # Objects of Playwright belong to the thread that made them.
        cls.thread = concurrent.futures.ThreadPoolExecutor(1)
        cls.inside(cls.load)

    @classmethod
    def inside(cls, function, *arguments, **named):
        """Calls a function in the thread of the browser."""
        return cls.thread.submit(function, *arguments, **named).result()

    @classmethod
    def load(cls):
        cls.core = package("browsergym.core.env", CORE)
        cls.playwright = package("playwright.sync_api", "playwright==1.44.0")
        cls.core.Chat = Talk
        # Nothing here looks at pictures.
        cls.core.extract_screenshot = lambda page: None
        package("browsergym.miniwob", CORE)
        for name in cls.imports:
            package(name, name.partition(".")[0])
        os.environ.setdefault("MINIWOB_URL", f"file://{pages()}/html/miniwob/")
        chromium.check_program(cls.browser)
        cls.kinds = known(cls.ids)
        cls.flatten = staticmethod(package("browsergym.utils.obs", CORE).flatten_axtree_to_str)
        parameters = list(inspect.signature(cls.flatten).parameters)[2:]
        for name in cls.tree:
            if name not in parameters:
                raise ValueError(f"options.tree: there is no {name!r}; allowed: {', '.join(parameters)}")
        cls.actions = offered(cls.subsets)
        if all(kind in SOLUTIONS for kind in cls.kinds):
            cls.gold = cls.solved
        cls.prepared = False

    @classmethod
    def prepare(cls):
        """Before the first episode: makes the package start this Chromium."""
        chromium.prepare()
        own, program = cls.playwright.BrowserType.launch, cls.browser

        def launch(self, args=(), **named):
            return own(self, args=[*args, *chromium.FLAGS], **dict(named, executable_path=program))

        cls.playwright.BrowserType.launch, cls.prepared = launch, True

    @property
    def system(self):
        actions = [f"{a.signature}: {a.description.partition('. ')[0].rstrip('.')}." for a in self.actions.action_set.values()]
        return "You do a task in a browser, one action a turn. Elements have their ids in brackets. Actions:\n" + "\n".join(actions)

    @classmethod
    def made(cls, kind):
        if not cls.prepared:
            cls.prepare()
        gymnasium = package("gymnasium", "gymnasium==1.4.0")
        # Checks of spaces would refuse the picture that is missing.
        env = gymnasium.make(f"browsergym/{kind}", disable_env_checker=True, **{"timeout": PATIENCE, **cls.arguments}).unwrapped
        env.action_mapping = cls.actions.to_python_code
        return env

    def start(self, task):
        self.total, self.over, self.used, self.errors, self.taken = 0.0, False, 0, 0, []
        self.env = self.inside(self.made, task.kind)
        seen, _ = self.inside(self.env.reset, seed=task.seed)
        self.shown = len(self.env.chat.messages)
        self.page = self.describe(seen)
        return f"{goal(seen)}\n\n{self.page}"

    def describe(self, seen):
        """A page as text. A class of your own can say more."""
        lines = []
        if len(seen["open_pages_titles"]) > 1:
            active = int(seen["active_page_index"][0])
            names = [f"{i}{' (active)' if i == active else ''}: {title}" for i, title in enumerate(seen["open_pages_titles"])]
            lines.append(f"Tabs: {'; '.join(names)}")
        for message in seen["chat_messages"][self.shown :]:
            if message["role"] == "user":
                lines.append(f"Message: {message['message']}")
        self.shown = len(seen["chat_messages"])
        tree = self.shown_tree(seen, **self.tree)
        if len(tree) > self.longest:
            tree = f"{tree[: self.longest]}\n({len(tree) - self.longest} more characters of this page are not shown)"
        return "\n".join([*lines, tree])

    @classmethod
    def shown_tree(cls, seen, **arguments):
        """The tree of a page by the package's function, which leaves out generic elements: those that can be clicked are shown."""
        properties, nodes = seen["extra_element_properties"], seen["axtree_object"]["nodes"]
        named = {node["nodeId"]: node for node in nodes}
        for node in nodes:
            role, name = node["role"], node.get("name", {})
            if role["value"] == "StaticText" and not name.get("value", "").strip():
                role["value"] = HIDDEN[0]
            elif role["value"] == "generic" and properties.get(node.get("browsergym_id"), {}).get("clickable"):
                texts = [named[i]["name"]["value"] for i in node["childIds"] if i in named and named[i]["role"]["value"] == "StaticText"]
                role["value"], node["name"] = "element", {"value": name.get("value") or " ".join(texts).strip()}
            # Where the pages of a package lie says nothing of a task.
            node["properties"] = [p for p in node.get("properties", []) if not str(p["value"].get("value")).startswith("file:")]
        return cls.flatten(seen["axtree_object"], properties, **{"ignored_roles": HIDDEN, **arguments})

    def parsed(self, text):
        """The action of a text, if it is one."""
        if len(text) > LONGEST_ACTION:
            raise ToolError(f"the action has {len(text)} characters; allowed: {LONGEST_ACTION}")
        try:
            # The package's parser learns how to call its functions, and fails where two threads teach it at once.
            self.inside(self.actions.to_python_code, text)
        except NameError as error:
            raise ToolError(f"{error} Allowed: {', '.join(self.actions.action_set)}") from None
        except (ValueError, SyntaxError, RecursionError) as error:
            raise ToolError(f"{text[:80]!r} is no action: {error or type(error).__name__}") from None
        wait = re.search(r"\bnoop\s*\(\s*(?:wait_ms\s*=\s*)?([^)]*)\)", text)
        if wait and wait[1].strip():
            try:
                fits = 0 <= float(wait[1]) <= LONGEST_WAIT
            except ValueError:
                fits = False
            if not fits:
                raise ToolError(f"noop waits 0 to {LONGEST_WAIT} milliseconds, not {wait[1][:80]}")
        return text

    def one(self, text):
        if self.over:
            raise ToolError("the episode is over")
        seen, reward, terminated, truncated, _ = self.inside(self.env.step, self.parsed(text))
        self.total += float(reward)
        self.used += 1
        self.taken.append(text)
        self.over = bool(terminated or truncated) or self.used >= self.limit
        self.page = self.describe(seen)
        error = seen["last_action_error"]
        self.errors += bool(error)
        if self.over:
            return Done(self.page)
        if error:
            raise ToolError(f"{short(error)}\n\n{self.page}")
        return Step(self.page)

    @tool
    def act(self, action: str):
        "Do one action, such as click('12')."
        return self.one(action)

    def step(self, text):
        return self.one(text)

    def reward(self):
        return {"reward": self.total, "success": self.total >= self.solved_at, "actions": self.used, "action_errors": self.errors}

    def state(self):
        # Pages do not show their whole state: what was done since the seed stands for it.
        return [self.page, self.taken]

    def close(self):
        env, self.env = getattr(self, "env", None), None
        if env is not None:
            self.inside(self.ended, env)

    @classmethod
    def ended(cls, env):
        try:
            env.close()
        except cls.playwright.Error:
            # A browser that crashed cannot be asked to close. The next episode starts one of its own.
            pass

    @classmethod
    def tasks(cls, split, seed):
        for i, number in enumerate(seeds(split, seed, cls.train, cls.held_out)):
            kind = cls.kinds[i % len(cls.kinds)]
            # NumPy takes seeds of 32 bits.
            yield {"prompt": "Your task in the browser:", "kind": kind, "seed": number % (1 << 32)}

    @classmethod
    def solved(cls, task):
        """Actions that solve a task, read from its page."""
        env = cls.inside(cls.made, task.kind)
        try:
            seen, _ = cls.inside(env.reset, seed=task.seed)
            return [("act", {"action": action}) for action in SOLUTIONS[task.kind](goal(seen), cls.shown_tree(seen))]
        finally:
            cls.inside(cls.ended, env)


def pages():
    """Folder of the package with the pages of MiniWoB++. It is not imported: it drives another browser."""
    found = importlib.util.find_spec("miniwob")
    if found is None or not found.submodule_search_locations:
        raise Missing("miniwob, the pages of MiniWoB++, is missing: pip install --no-deps miniwob==1.1.0, beside browsergym-miniwob")
    return list(found.submodule_search_locations)[0]


def known(ids):
    """The tasks that the option `ids` names, in its order."""
    registry = package("gymnasium", "gymnasium==1.4.0").registry
    names = [id.partition("/")[2] for id in registry if id.startswith("browsergym/")]
    kinds = []
    for id in ids:
        found = fnmatch.filter(names, id)
        if not found:
            near = difflib.get_close_matches(id, names, 3)
            hint = f"did you mean {', '.join(near)}?" if near else f"there are {len(names)}, such as {', '.join(sorted(names)[:3])}"
            raise ValueError(f"options.ids: {id!r} is no task of the package; {hint}")
        kinds += [name for name in found if name not in kinds]
    if not kinds:
        raise ValueError("options.ids is empty; name a task, such as miniwob.click-test")
    return kinds


def offered(subsets):
    """The package's set of actions, without those that are withheld."""
    highlevel = package("browsergym.core.action.highlevel", CORE)
    for name in subsets:
        if name not in highlevel.ACTION_SUBSETS:
            raise ValueError(f"options.subsets: there is no {name!r}; allowed: {', '.join(highlevel.ACTION_SUBSETS)}")
    if not subsets:
        raise ValueError(f"options.subsets is empty; allowed: {', '.join(highlevel.ACTION_SUBSETS)}")
    actions = highlevel.HighLevelActionSet(subsets=subsets, multiaction=False, demo_mode="off")
    for name in WITHHELD:
        actions.action_set.pop(name, None)
    return actions


def goal(seen):
    texts = [part["text"] for part in seen["goal_object"] if part["type"] == "text"]
    return "\n".join(texts) or "There is no goal."


def short(error):
    """An error of Playwright: its lines once each. How often it tried again depends on the machine."""
    lines = dict.fromkeys(line.strip() for line in str(error).splitlines())
    text = "\n".join(line for line in lines if line)
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]} ..."


def bid(tree, role, name=None):
    """The id of an element by its role and its name."""
    wanted = re.escape(repr(name)) if name is not None else ""
    found = re.search(rf"\[(\w+)\] {role} {wanted}", tree)
    if found is None:
        raise ValueError(f"there is no {role} {name or ''} in {tree}")
    return found[1]


def quoted(text):
    return re.search(r'"([^"]*)"', text)[1]


#: Solutions of some tasks, by the goal and the page.
SOLUTIONS = {
    "miniwob.click-test": lambda goal, tree: [f"click({bid(tree, 'button')!r})"],
    "miniwob.click-button": lambda goal, tree: [f"click({bid(tree, 'button', quoted(goal))!r})"],
    "miniwob.click-link": lambda goal, tree: [f"click({bid(tree, 'element', quoted(goal))!r})"],
    "miniwob.enter-text": lambda goal, tree: [
        f"fill({bid(tree, 'textbox')!r}, {quoted(goal)!r})",
        f"click({bid(tree, 'button')!r})",
    ],
}
