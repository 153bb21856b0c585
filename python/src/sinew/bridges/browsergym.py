"""Tasks of BrowserGym in Chromium: the page as its accessibility tree, actions by the ids of its elements.

`browsergym-miniwob` is tried here. Other sets of tasks are named by their package (`imports`) and need their servers. Playwright allows one
thread only, so that the episodes of a worker take turns: more workers, not more sessions, are faster.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path

from sinew import Done, Env, ToolError, tool
from sinew.bridges import package, seeds

#: Of Chromium. Its own sandbox needs user namespaces, which a worker's sandbox does not allow; it has no `/dev/shm` and no network.
FLAGS = ["--no-sandbox", "--no-zygote", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-breakpad"]


class Messages:
    """What a task says, in the place of BrowserGym's chat window, which is a second browser."""

    recording_start_time = None

    def __init__(self, *_, **__):
        self.messages = []

    def add_message(self, role, msg):
        self.messages.append({"role": role, "timestamp": 0.0, "message": msg})

    def wait_for_user_message(self):
        pass

    def close(self):
        pass


class BrowserGym(Env):
    #: Tasks by their ids without `browsergym/`, each with seeds of its own.
    names = ["miniwob.click-test", "miniwob.click-button", "miniwob.enter-text"]
    #: Packages that register the ids.
    imports = ["browsergym.miniwob"]
    #: Groups of BrowserGym's actions: `bid`, `nav`, `tab`, `chat`, `infeas`, `coord`.
    actions = ["bid"]
    #: Actions until an episode ends.
    limit = 10
    #: Characters of a page.
    most = 8000
    #: The program of Chromium, and the folder of MiniWoB's pages. Empty: that of the package `miniwob`.
    chromium, pages = "/usr/lib/chromium/chromium", ""
    #: Milliseconds that Playwright waits before each operation, and seconds before a page is read.
    slow_mo, delay = 0, 0.1
    #: Seeds of each task.
    train, held_out = 500, 50

    @classmethod
    def setup_worker(cls):
        if not os.path.exists(cls.chromium):
            raise FileNotFoundError(f"chromium = {cls.chromium!r} is missing: install Debian's package chromium, or name the program with the option chromium")
        cls.thread = ThreadPoolExecutor(1)
        cls.on_thread(cls.prepare)

    @classmethod
    def on_thread(cls, function, *arguments):
        """Runs a function on the thread that Playwright belongs to."""
        return cls.thread.submit(function, *arguments).result()

    @classmethod
    def prepare(cls):
        launcher = package("playwright.sync_api", "browsergym-core==0.14.3").BrowserType
        launch = launcher.launch

        def with_flags(self, **options):
            # BrowserGym names no program, and replaces the options that it is given.
            return launch(self, **{**options, "executable_path": cls.chromium, "args": [*(options.get("args") or []), *FLAGS]})

        launcher.launch = with_flags
        package("browsergym.core.env", "browsergym-core==0.14.3").Chat = Messages
        if any(name.startswith("miniwob.") for name in cls.names):
            own = cls.pages or os.path.join(os.path.dirname(package("miniwob", "miniwob==1.1.0").__file__), "html", "miniwob")
            os.environ["MINIWOB_URL"] = Path(own).resolve().as_uri() + "/"
        for name in cls.imports:
            package(name, f"{name.replace('.', '-')}==0.14.3")
        cls.gymnasium = package("gymnasium", "gymnasium")
        for name in cls.names:
            if f"browsergym/{name}" not in cls.gymnasium.envs.registry:
                raise ValueError(f"names has {name!r}, which no package of imports = {cls.imports} registers; allowed: {cls.known(name)}")
        cls.action_set = package("browsergym.core.action.highlevel", "browsergym-core==0.14.3").HighLevelActionSet(cls.actions, multiaction=False)
        cls.tree = staticmethod(package("browsergym.utils.obs", "browsergym-core==0.14.3").flatten_axtree_to_str)

    @classmethod
    def known(cls, name):
        """The ids that are nearest to a name, and the number of all."""
        ids = [i.partition("/")[2] for i in cls.gymnasium.envs.registry if i.startswith("browsergym/")]
        return f"{', '.join(get_close_matches(name, ids, 3, 0.0))}, ... ({len(ids)} ids)"

    @classmethod
    def opened(cls, name, seed):
        """An environment at the beginning of a task, and what it shows."""
        env = cls.gymnasium.make(
            f"browsergym/{name}",
            disable_env_checker=True,
            slow_mo=cls.slow_mo,
            pre_observation_delay=cls.delay,
            action_mapping=cls.action_set.to_python_code,
        )
        try:
            return env, env.reset(seed=seed)[0]
        except BaseException:
            env.close()
            raise

    @property
    def system(self):
        described = self.action_set.describe(with_long_description=False, with_examples=False)
        return f"You do a task in a browser, one action a turn. The numbers in brackets are the ids (bid) of elements.\n{described}"

    def start(self, task):
        self.taken, self.over, self.gained = [], False, 0.0
        self.env, seen = self.on_thread(self.opened, task.name, task.seed)
        return f"{seen['goal']}\n\n{self.shown(seen)}"

    def shown(self, seen):
        """A page as text, with the error of the last action."""
        page = self.tree(seen["axtree_object"])
        if len(page) > self.most:
            page = f"{page[: self.most]}\n[{len(page) - self.most} more characters]"
        focused = seen.get("focused_element_bid")
        lines = [f"The action failed: {seen['last_action_error'][:500]}"] if seen["last_action_error"] else []
        return "\n".join([*lines, page, *([f"Focus: {focused}"] if focused else [])])

    def one(self, action):
        if self.over:
            raise ToolError("the episode is over")
        action = action.strip()
        try:
            self.action_set.to_python_code(action)
        except (ValueError, SyntaxError, NameError) as error:
            raise ToolError(f"{action[:80]!r} is no action ({str(error)[:200]}); allowed: {', '.join(self.action_set.action_set)}") from None
        seen, gained, ended, cut, _ = self.on_thread(self.env.step, action)
        self.taken.append(action)
        self.gained += float(gained)
        self.over = bool(ended or cut) or len(self.taken) >= self.limit
        said = self.shown(seen)
        return Done(said) if self.over else said

    @tool
    def act(self, action: str):
        "Do one action, such as: click('13')"
        return self.one(action)

    def step(self, text):
        blocks = re.findall(r"```(?:\w*\n)?(.*?)```", text, re.DOTALL)
        lines = (blocks[-1] if blocks else text).strip().splitlines() or [""]
        return self.one(lines[-1])

    def reward(self):
        return {"reward": max(0.0, self.gained), "success": self.gained > 0, "actions": len(self.taken)}

    def state(self):
        return self.taken

    def close(self):
        env, self.env = getattr(self, "env", None), None
        if env is not None:
            self.on_thread(env.close)

    @classmethod
    def tasks(cls, split, seed):
        for at in seeds(split, seed, cls.train, cls.held_out):
            for name in cls.names:
                yield {"prompt": "Your task:", "kind": name, "name": name, "seed": at % (1 << 31)}

    @classmethod
    def gold(cls, task):
        """Actions of tasks to click the one button, or the named one, and to enter a text; of others none."""
        env, seen = cls.on_thread(cls.opened, task.name, task.seed)
        cls.on_thread(env.close)
        page, goal = cls.tree(seen["axtree_object"]), seen["goal"]
        quoted = re.findall(r'"([^"]*)"', goal)
        buttons = re.findall(r"\[(\w+)\] button '([^']*)'", page)
        fields = re.findall(r"\[(\w+)\] textbox", page)
        if task.name.endswith(".enter-text"):
            texts = [f"fill('{fields[0]}', {quoted[0]!r})", f"click('{buttons[0][0]}')"]
        else:
            named = [bid for bid, text in buttons if not quoted or text == quoted[0]]
            texts = [f"click('{bid}')" for bid in named[:1]]
        return [("act", {"action": text}) for text in texts]
