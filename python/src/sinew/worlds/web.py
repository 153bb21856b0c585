"""Web pages as environments: Debian's Chromium over Playwright, its accessibility tree as observation, actions by numbers of elements.

A class of your own derives from `Web` and answers the requests of its pages: no port is opened, and a page reaches nothing else. Each
episode has a browser context of its own. The model sees pages only: it cannot run scripts, and what counts is kept by the class.
"""

import asyncio
import base64
import itertools
import json
import os
import signal
import urllib.parse
from typing import Annotated, Literal, NamedTuple

from sinew import Done, Env, ToolError, tool
from sinew.bridges import chromium, package

#: The origin of every site.
ORIGIN = "http://site.test"
#: Size of the window.
WINDOW = {"width": 800, "height": 600}
#: Characters of a form, and fields of it or of a query, at most.
LONGEST_FORM, MOST_FIELDS = 1 << 20, 100
#: Characters of a name or value, options of a list, and dialogs of an action that are shown.
LONGEST_NAME, MOST_OPTIONS, MOST_DIALOGS = 160, 40, 8
#: Depth of a tree, and steps from a text to the element that listens for its clicks.
DEEPEST, LISTENS = 100, 3
#: Tries to get a page of a healthy browser, and rounds of waiting for a page that navigates again and again.
TRIES, ROUNDS = 3, 8
#: Processes and threads of a page, in addition to those of a browser with one.
THREADS = 40
CONTROLS = set(
    "button link textbox searchbox checkbox radio combobox listbox menuitem menuitemcheckbox menuitemradio tab slider spinbutton "
    "switch treeitem DisclosureTriangle option".split()
)
FIELDS = ("textbox", "searchbox", "combobox", "spinbutton")
STATES = ("checked", "pressed", "selected", "expanded", "disabled", "required", "focused")
#: Chooses an option of a list, as a person does; false: the element has no such option.
CHOOSE = """function(name) {
    if (this.tagName !== 'SELECT') return false;
    const found = [...this.options].find(o => o.text.trim() === name);
    if (!found || found.disabled) return false;
    this.focus(); this.value = found.value; found.selected = true;
    this.dispatchEvent(new Event('input', { bubbles: true }));
    this.dispatchEvent(new Event('change', { bubbles: true }));
    return true;
}"""


class Request(NamedTuple):
    """A request of a page. `document`: it is for a whole page, not for a part of one."""

    method: str
    path: str
    query: dict
    form: dict
    document: bool


class Response(NamedTuple):
    status: int
    type: str = "text/plain"
    body: bytes = b""
    headers: tuple = ()


class Move(NamedTuple):
    """A step of a gold policy: a tool, and its element by role and name. An empty one is any."""

    tool: str
    role: str = ""
    name: str = ""
    nth: int = 0
    arguments: dict = {}


def click(role, name):
    return Move("click", role, name)


def fill(text, name="", nth=0):
    return Move("type", "textbox", name, nth, {"text": str(text)})


def choose(option, name=""):
    return Move("select", "combobox", name, 0, {"option": option})


# The page as text.


class Item:
    """A line of a page. `place`: -1 above the window, 0 inside, 1 below. Those inside that can be acted on have a number."""

    def __init__(self, role, name, node, place, clickable):
        self.role, self.name, self.node, self.place, self.clickable = role, name, node, place, clickable
        self.number, self.value, self.states, self.options = None, "", [], []

    def line(self):
        text = f"[{self.number}] {self.role}" if self.number else self.role
        if self.name:
            text += f" {quoted(self.name)}"
        if self.value:
            text += f" = {quoted(self.value)}"
        if self.states:
            text += f" ({', '.join(self.states)})"
        if self.options:
            text += f" of {' | '.join(self.options[:MOST_OPTIONS])}"
        return text


def quoted(text):
    return json.dumps(text, ensure_ascii=False)


def words(value):
    """A value of Chromium's tree as one line."""
    value = (value or {}).get("value")
    text = " ".join((value if isinstance(value, str) else "" if value is None else json.dumps(value)).split())
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}..."


class Tree:
    """A page at one moment, from `Accessibility.getFullAXTree` and `DOMSnapshot.captureSnapshot`.

    Elements that are no controls but listen for clicks have the role `text`, and a number: pages that are not accessible exist.
    """

    def __init__(self, nodes, snapshot):
        document = snapshot["documents"][0]
        url = snapshot["strings"][document["documentURL"]]
        self.url = url[len(ORIGIN) :] if url.startswith(f"{ORIGIN}/") else url
        self.nodes, self.items = {node["nodeId"]: node for node in nodes}, []
        self.layout(document)
        self.title = words(nodes[0].get("name"))
        self.walk(nodes[0], 0)
        shown = [item for item in self.items if item.clickable and item.place == 0]
        for number, item in enumerate(shown, 1):
            item.number = number
        self.elements = {item.number: item for item in shown}

    def layout(self, document):
        """Reads where nodes are, and which element listens for their clicks."""
        nodes, boxes, scrolled = document["nodes"], document["layout"], document.get("scrollOffsetY", 0)
        ids, parents = nodes["backendNodeId"], nodes["parentIndex"]
        self.boxes = {ids[at]: (box[1] - scrolled, box[1] + box[3] - scrolled) for at, box in zip(boxes["nodeIndex"], boxes["bounds"])}
        # Document, html and body are the first elements of every page: a listener there says nothing.
        listening = {at for at in nodes["isClickable"]["index"] if at >= 4}
        self.listeners = {}
        for at, id in enumerate(ids):
            for _ in range(LISTENS):
                if at in listening:
                    self.listeners[id] = ids[at]
                    break
                at = parents[at]
                if at < 0:
                    break

    def place(self, node):
        top, bottom = self.boxes.get(node.get("backendDOMNodeId"), (0, 1))
        return -1 if bottom <= 0 else 1 if top >= WINDOW["height"] else 0

    def add(self, node, role, listener=None, clickable=False):
        id = node.get("backendDOMNodeId")
        item = Item(role, words(node.get("name")), listener or id, self.place(node), clickable or listener is not None)
        self.items.append(item)
        return item

    def children(self, node):
        return [self.nodes[id] for id in node.get("childIds", ()) if id in self.nodes]

    def below(self, node, depth=0):
        for child in self.children(node) if depth < DEEPEST else ():
            yield child
            yield from self.below(child, depth + 1)

    def walk(self, node, depth):
        if depth > DEEPEST:
            return
        role = role_of(node)
        if role in CONTROLS:
            return self.control(node, role)
        name, listener = words(node.get("name")), self.listeners.get(node.get("backendDOMNodeId"))
        if role == "StaticText":
            return self.text(node, name, listener)
        if role in ("image", "img") and name:
            return self.add(node, "image", listener)
        if role == "heading" and name and not any(role_of(inner) in CONTROLS for inner in self.below(node)):
            return self.add(node, "heading", listener)
        for child in self.children(node):
            self.walk(child, depth + 1)

    def control(self, node, role):
        """Adds a control with its value, states and options. What is inside of it is not shown again."""
        item = self.add(node, role, clickable=True)
        item.value = words(node.get("value"))
        item.options = [words(inner.get("name")) for inner in self.below(node) if role_of(inner) == "option"]
        said = {p["name"]: p["value"].get("value") for p in node.get("properties", ())}
        for name in STATES:
            value = said.get(name)
            if value is True or value == "true":
                item.states.append(name)
            elif value == "mixed":
                item.states.append(f"{name}: mixed")
            elif name == "expanded" and value is False:
                item.states.append("collapsed")

    def text(self, node, name, listener):
        """Adds a text: an element of its own if it listens for clicks, else a part of the text before it."""
        if not name:
            return
        last = self.items[-1] if self.items else None
        joins = last is not None and last.role == "text" and not last.clickable and last.place == self.place(node)
        if joins and listener is None:
            last.name += f" {name}"
        else:
            self.add(node, "text", listener)

    def element(self, number):
        if number in self.elements:
            return self.elements[number]
        has = f"the page has 1 to {len(self.elements)}" if self.elements else "the page has none"
        raise ToolError(f"there is no element {number}; {has}")

    def lines(self):
        return [f"page {quoted(self.title)} {self.url}", *(item.line() for item in self.items if item.place == 0)]

    def show(self, longest):
        """The page for the model, at most about `longest` characters."""
        text, left = "", 0
        for line in self.lines():
            if text and len(text) + len(line) >= longest:
                left += 1
            else:
                text += f"\n{line}" if text else line
        above, below = (sum(item.place == place for item in self.items) for place in (-1, 1))
        text += f"\n({left} more lines are not shown)" if left else ""
        return text + (f"\n({above} lines above, {below} below: scroll)" if above or below else "")

    def call(self, move):
        """The call of a gold step, and whether it is the step itself: an element out of sight is scrolled to first."""
        if not move.role:
            return move.tool, move.arguments, True
        fits = [i for i in self.items if i.clickable and i.role == move.role and move.name in ("", i.name)]
        if len(fits) <= move.nth:
            raise ValueError(f"there is no {move.role} {move.name!r} on this page:\n{self.show(1000)}")
        item = fits[move.nth]
        if item.place:
            return "scroll", {"direction": "up" if item.place < 0 else "down"}, False
        return move.tool, {"element": item.number, **move.arguments}, True


def role_of(node):
    """The role of a node; nothing for those that people do not see either."""
    return "" if node.get("ignored") else (node.get("role") or {}).get("value", "")


# The browser.


class Page:
    """A page in a browser context of its own. `respond` answers its requests: a function of a `Request`."""

    def __init__(self, browser, patience):
        self.browser, self.patience, self.still = browser, patience, asyncio.Event()
        self.gone, self.lost_it = "", asyncio.get_running_loop().create_future()
        self.dialogs, self.refused, self.tasks = [], 0, set()
        self.still.set()

    async def made(self):
        """Makes the context and the empty page: no cookies, no storage, no history."""
        self.context = await self.limited(
            self.browser.process.new_context(viewport=WINDOW, accept_downloads=False, service_workers="block"), "a new context"
        )
        page = await self.limited(self.context.new_page(), "a new page")
        self.page, self.keyboard = page, page.keyboard
        page.on("dialog", lambda dialog: self.later(self.dialog(dialog)))
        page.on("crash", lambda _: self.lost("the page crashed"))
        page.on("close", lambda _: self.lost("the browser ended"))
        # Windows that a page opens are not shown to the model, and their requests are not answered.
        self.context.on("page", lambda other: self.later(other.close()))
        self.cdp = await self.limited(self.context.new_cdp_session(page), "a session of DevTools")
        self.frame = (await self.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]
        self.cdp.on("Fetch.requestPaused", lambda request: self.later(self.answer(request)))
        for event in ("Page.frameRequestedNavigation", "Page.frameScheduledNavigation", "Page.frameStartedLoading"):
            self.cdp.on(event, lambda said: said["frameId"] == self.frame and self.still.clear())
        for event in ("Page.frameStoppedLoading", "Page.navigatedWithinDocument"):
            self.cdp.on(event, lambda said: said["frameId"] == self.frame and self.still.set())
        await asyncio.gather(self.send("Page.enable"), self.send("Fetch.enable", patterns=[{"urlPattern": "*"}]))
        return self

    def later(self, awaitable):
        """Does something that nobody waits for. The loop itself keeps no reference to it."""
        task = asyncio.ensure_future(quietly(awaitable))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def lost(self, why):
        """Ends what waits for a page that is gone."""
        self.gone = self.gone or why
        self.still.set()
        if not self.lost_it.done():
            self.lost_it.set_result(None)

    async def limited(self, awaitable, what):
        """The value of a request to the browser, which has an end also where the page has none: a crash is not answered."""
        task = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait({task, self.lost_it}, timeout=self.patience, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not (task.exception() and self.gone):
                return task.result()
            raise RuntimeError(self.gone or f"the browser did not finish within {self.patience:g} s (options.patience_s): {what}")
        finally:
            task.cancel()

    def send(self, method, **params):
        return self.limited(self.cdp.send(method, params), method)

    async def dialog(self, dialog):
        """Notes a dialog and answers it: yes to those that only inform, else no."""
        if len(self.dialogs) < MOST_DIALOGS:
            self.dialogs.append(f"{dialog.type} {quoted(dialog.message[:200])}")
        await (dialog.accept() if dialog.type in ("alert", "beforeunload") else dialog.dismiss())

    async def answer(self, paused):
        """Answers a request by the site; those for other addresses are refused and counted."""
        request, id = paused["request"], paused["requestId"]
        if not request["url"].startswith(f"{ORIGIN}/"):
            self.refused += 1
            return await self.send("Fetch.failRequest", requestId=id, errorReason="BlockedByClient")
        url = urllib.parse.urlsplit(request["url"])
        form = request.get("postData") or ""
        form = fields(form if len(form) <= LONGEST_FORM else "")
        document = paused["resourceType"] == "Document"
        try:
            response = self.respond(Request(request["method"], urllib.parse.unquote(url.path), fields(url.query), form, document))
        except Exception as error:
            self.lost(f"the site failed: {type(error).__name__}: {error}")
            raise
        headers = [{"name": name, "value": value} for name, value in (("content-type", response.type), *response.headers)]
        body = base64.b64encode(response.body).decode()
        await self.send("Fetch.fulfillRequest", requestId=id, responseCode=response.status, responseHeaders=headers, body=body)

    async def open(self, path):
        if not path.startswith("/"):
            raise ToolError(f'open takes a path of this site, such as "/", not {quoted(path[:200])}')
        self.still.clear()
        loaded = await self.send("Page.navigate", url=ORIGIN + path)
        if loaded.get("errorText") or not loaded.get("loaderId"):
            # Nothing loads: an error, or a place within the page.
            self.still.set()
        if loaded.get("errorText"):
            raise ToolError(f"{path[:200]} cannot be loaded: {loaded['errorText']}")

    async def settle(self, milliseconds):
        """Waits until scripts that are due have run and no navigation is under way."""
        for _ in range(ROUNDS):
            await self.limited(self.still.wait(), "loading of the page")
            try:
                await self.evaluate(f"new Promise(done => setTimeout(done, {milliseconds}))")
            except self.browser.Error:
                # A navigation takes the page that waits away.
                continue
            if self.gone:
                raise RuntimeError(self.gone)
            if self.still.is_set():
                return
        raise RuntimeError("the page navigates again and again")

    async def evaluate(self, expression):
        said = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise RuntimeError(said["exceptionDetails"].get("exception", {}).get("description", "a script failed")[:300])
        return said["result"].get("value")

    async def look(self):
        """What the page shows now, and the dialogs that came up."""
        ax, snapshot = await asyncio.gather(
            self.send("Accessibility.getFullAXTree"), self.send("DOMSnapshot.captureSnapshot", computedStyles=[])
        )
        dialogs, self.dialogs = self.dialogs, []
        return Tree(ax["nodes"], snapshot), dialogs

    async def on_node(self, wrong, method, **params):
        """A call on an element, which may have gone since it was seen."""
        try:
            return await self.send(method, **params)
        except self.browser.Error:
            raise ToolError(wrong) from None

    async def click(self, item):
        """Clicks into the middle of an element, as a mouse does: what lies over it gets the click."""
        hidden = "the element is not visible"
        # Chromium carries them out in their order.
        _, shape = await asyncio.gather(
            self.on_node(hidden, "DOM.scrollIntoViewIfNeeded", backendNodeId=item.node),
            self.on_node(hidden, "DOM.getContentQuads", backendNodeId=item.node),
        )
        if not shape["quads"]:
            raise ToolError(hidden)
        x1, y1, _, _, x2, y2 = shape["quads"][0][:6]
        await self.limited(self.page.mouse.click((x1 + x2) / 2, (y1 + y2) / 2), "a click")

    async def write(self, item, text, enter):
        """Puts a text into a field in place of what it had."""
        if item.role not in FIELDS:
            raise ToolError(f"type needs a field; this is a {item.role}")
        await self.on_node("the field takes no text", "DOM.focus", backendNodeId=item.node)
        await self.limited(self.keyboard.press("ControlOrMeta+a"), "a key")
        await self.limited(self.keyboard.insert_text(text) if text else self.keyboard.press("Backspace"), "a text")
        if enter:
            await self.limited(self.keyboard.press("Enter"), "a key")

    async def choose(self, item, option):
        has = f"the list has no option {quoted(option)}; it has: {' | '.join(item.options)}"
        unknown = has if item.options else f"select needs a list; this is a {item.role}"
        node = await self.on_node(unknown, "DOM.resolveNode", backendNodeId=item.node)
        chosen = await self.send(
            "Runtime.callFunctionOn",
            functionDeclaration=CHOOSE,
            objectId=node["object"]["objectId"],
            arguments=[{"value": option}],
            returnByValue=True,
        )
        if chosen["result"].get("value") is not True:
            raise ToolError(unknown)

    async def back(self):
        history = await self.send("Page.getNavigationHistory")
        at = history["currentIndex"] - 1
        if at < 0 or not history["entries"][at]["url"].startswith(f"{ORIGIN}/"):
            raise ToolError("there is no page to go back to")
        self.still.clear()
        await self.send("Page.navigateToHistoryEntry", entryId=history["entries"][at]["id"])


async def quietly(awaitable):
    """Awaits what may fail because its page has gone meanwhile; a page that is there shows it."""
    try:
        await awaitable
    except Exception:
        pass


def fields(text):
    """The fields of a query or a form, the first of each name, without white space around them."""
    found = {}
    for name, value in urllib.parse.parse_qsl("&".join(text.split("&")[:MOST_FIELDS]), keep_blank_values=True):
        found.setdefault(name, value.strip())
    return found


class Browser:
    """A Chromium that runs. Its flag tells its process from others."""

    numbers = itertools.count(1)

    def __init__(self, Error):
        self.Error, self.flag = Error, f"--sinew-browser={os.getpid()}-{next(self.numbers)}"
        self.process, self.episodes, self.open, self.spare = None, 0, 0, None

    async def page(self, patience):
        """An empty page that no episode has used. The next one is made meanwhile."""
        ready = self.spare or asyncio.ensure_future(Page(self, patience).made())
        self.spare = None
        page = await ready
        self.spare = asyncio.ensure_future(Page(self, patience).made())
        # One that fails and is never used fails with its browser.
        self.spare.add_done_callback(lambda made: made.cancelled() or made.exception())
        return page

    def kill(self):
        """Kills its first process; the others end with it."""
        for name in os.listdir("/proc"):
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if name.isdigit() and self.flag.encode() in file.read().split(b"\0"):
                        os.kill(int(name), signal.SIGKILL)
            except OSError:
                # It is no process, or it has ended.
                continue


class Pool:
    """The browser of a worker. It starts with the first episode, is replaced after a number of them or when it does not answer, and ends
    with its last episode."""

    def __init__(self, world):
        self.world, self.driver, self.browser = world, None, None
        self.starting = asyncio.Lock()
        # A gold policy must not wait for the episode that asks for it.
        self.free, self.free_for_gold = asyncio.Semaphore(world.places), asyncio.Semaphore(1)

    async def page(self, respond, path, for_gold):
        """A page that no episode has used. Give it back with `end`."""
        free = self.free_for_gold if for_gold else self.free
        try:
            await asyncio.wait_for(free.acquire(), self.world.patience_s)
        except asyncio.TimeoutError:
            raise RuntimeError(
                f"all {self.world.places} places of this worker's browser are in use for {self.world.patience_s:g} s: set "
                "env.sessions_per_worker to options.places at most"
            ) from None
        try:
            page = await self.opened(respond, path)
        except BaseException:
            free.release()
            raise
        page.free = free
        return page

    async def opened(self, respond, path):
        for attempt in range(1, TRIES + 1):
            browser = await self.healthy()
            try:
                page = await browser.page(self.world.patience_s)
                page.respond = respond
                await page.open(path)
                return page
            except BaseException as error:
                browser.open -= 1
                self.drop(browser)
                if attempt == TRIES or not isinstance(error, Exception):
                    raise

    async def healthy(self):
        """The browser for one more episode. One that had enough of them ends with its last."""
        async with self.starting:
            now = self.browser
            if now is not None and not now.process.is_connected():
                self.drop(now)
            elif now is not None and now.episodes >= self.world.episodes_per_browser:
                self.browser = None
                await self.ended(now)
            if self.browser is None:
                self.browser = await self.started()
            self.browser.episodes += 1
            self.browser.open += 1
            return self.browser

    async def started(self):
        world = self.world
        if self.driver is None:
            chromium.prepare(chromium.THREADS + THREADS * (world.places - 1))
            self.driver = await asyncio.wait_for(world.playwright.async_playwright().start(), world.patience_s)
        browser = Browser(world.playwright.Error)
        try:
            browser.process = await self.driver.chromium.launch(
                executable_path=world.browser, args=[*chromium.FLAGS, browser.flag], timeout=1000 * world.patience_s
            )
        except world.playwright.Error:
            # The next try has a driver of its own: this one may be what fails.
            browser.kill()
            driver, self.driver = self.driver, None
            await quietly(asyncio.wait_for(driver.stop(), world.patience_s))
            raise
        return browser

    def drop(self, browser):
        """Kills a browser with all that runs in it."""
        browser.kill()
        if self.browser is browser:
            self.browser = None

    async def ended(self, browser):
        """Ends a browser that gets no further episodes, with the last of them."""
        if browser is self.browser or browser.open:
            return
        try:
            await asyncio.wait_for(browser.process.close(), self.world.patience_s)
        except Exception:
            browser.kill()

    async def end(self, page):
        """Ends a page with all that its context holds. A context that cannot be ended costs the browser."""
        browser = page.browser
        try:
            await asyncio.wait_for(page.context.close(), self.world.patience_s)
        except Exception:
            self.drop(browser)
        finally:
            browser.open -= 1
            page.free.release()
        await self.ended(browser)


# The environment.


Element = Annotated[int, "number of the element"]


class Web(Env):
    """The tools of the model and the life of an episode. A class of your own has `opened`, `answer`, `moves`, and `begun`, `over` or
    `kept` where it needs them."""

    #: Nothing that the model writes is run: it acts on pages by mouse and keys. The browser is the class's own.
    runs_code = False
    system = (
        "You use a web browser by calling tools. Elements have numbers, such as [3]; they are those of the page that you saw last. "
        "Call one tool at a time."
    )
    #: Calls of an episode; after the last one it is scored as it stands.
    limit = 40
    #: Characters of a page that the model sees.
    longest = 6000
    #: Milliseconds that a page's scripts get after an action, before it is looked at.
    settle_ms = 20
    #: Deadline of each request to the browser, of its start, and of waiting for a place, in seconds.
    patience_s = 25.0
    #: Episodes at once in the browser of a worker, and those after which it is replaced.
    places, episodes_per_browser = 8, 500
    #: Chromium's program.
    browser = chromium.PROGRAM
    #: Tasks of each split.
    train, held_out = 10_000, 200

    @classmethod
    def setup_worker(cls):
        cls.playwright = package("playwright.async_api", "playwright==1.65.2")
        chromium.check_program(cls.browser)
        for name, least in (("limit", 1), ("longest", 200), ("settle_ms", 0), ("places", 1), ("episodes_per_browser", 1), ("train", 1)):
            if getattr(cls, name) < least:
                raise ValueError(f"options.{name} is {getattr(cls, name)}; allowed: {least} or more")
        if not 1 <= cls.patience_s <= 600:
            raise ValueError(f"options.patience_s is {cls.patience_s}; allowed: 1 to 600")
        cls.pool = None

    def opened(self, task):
        """Begins the episode, and gives the path of its first page."""
        raise NotImplementedError

    async def begun(self, task):
        """The task in words, once the first page is there; none: the prompt has it."""

    def answer(self, request):
        """The `Response` to a `Request` of the page."""
        raise NotImplementedError

    def moves(self, task):
        """The gold policy: a list of `Move`."""
        raise NotImplementedError

    async def over(self):
        """Whether the page has ended the episode."""
        return False

    def kept(self):
        """All that the class keeps of the episode, as JSON, for `state`; none: pages keep what it does not know."""

    async def start(self, task):
        return await self.begin(task, for_gold=False)

    async def begin(self, task, for_gold):
        cls, self.said_done, self.taken, self.page = type(self), False, [], None
        if cls.pool is None:
            cls.pool = Pool(cls)
        self.page = await cls.pool.page(self.answer, self.opened(task), for_gold)
        await self.page.settle(self.settle_ms)
        said = await self.begun(task)
        shown = await self.look()
        return f"{said}\n\n{shown}" if said else shown

    async def look(self):
        self.tree, dialogs = await self.page.look()
        return self.tree.show(self.longest) + "".join(f"\n(the page showed a dialog: {dialog})" for dialog in dialogs)

    async def do(self, action, *call):
        """Carries the action of a call out, lets the page rest, and shows it."""
        self.taken.append(call)
        try:
            await action
            await self.page.settle(self.settle_ms)
            over = await self.over()
            text = "The task has ended." if over else await self.look()
        except ToolError as error:
            if len(self.taken) < self.limit:
                raise
            return Done(f"Error: {error}")
        return Done(text) if over or len(self.taken) >= self.limit else text

    @tool
    async def click(self, element: Element):
        "Click an element."
        return await self.do(self.on(element, lambda item: self.page.click(item)), "click", element)

    @tool
    async def type(self, element: Element, text: str, enter: Annotated[bool, "press Enter after it"] = False):
        "Put a text into a field, in place of what is there."
        return await self.do(self.on(element, lambda item: self.page.write(item, text, enter)), "type", element, text, enter)

    @tool
    async def select(self, element: Element, option: str):
        "Choose an option of a list."
        return await self.do(self.on(element, lambda item: self.page.choose(item, option)), "select", element, option)

    async def on(self, element, action):
        await action(self.tree.element(element))

    @tool
    async def scroll(self, direction: Literal["up", "down"]):
        "Scroll the page."
        by = 500 if direction == "down" else -500
        return await self.do(self.page.evaluate(f"window.scrollBy({{ top: {by}, behavior: 'instant' }})"), "scroll", direction)

    @tool
    async def back(self):
        "Go back to the page before."
        return await self.do(self.page.back(), "back")

    @tool
    async def open(self, path: str):
        "Open a path of this site."
        return await self.do(self.page.open(path), "open", path)

    @tool
    def done(self):
        "End the task."
        self.said_done = True
        return Done("The task has ended.")

    async def step(self, text):
        return await self.do(self.unsaid(), text)

    async def unsaid(self):
        raise ToolError("call a tool; done ends the task")

    def state(self):
        # Scripts keep what neither the page shows nor the class keeps: the calls since the start stand for it.
        kept = self.kept()
        return [self.taken if kept is None else kept, self.tree.url, [[item.place, item.line()] for item in self.tree.items]]

    async def close(self):
        page, self.page = getattr(self, "page", None), None
        if page is not None:
            await type(self).pool.end(page)

    @classmethod
    async def gold(cls, task):
        """Plays the task once, with the steps of `moves`."""
        env, way = cls(), []
        try:
            await env.begin(task, for_gold=True)
            for move in env.moves(task):
                last = False
                while not last:
                    name, arguments, last = env.tree.call(move)
                    answer = getattr(env, name)(**arguments)
                    answer = await answer if asyncio.iscoroutine(answer) else answer
                    way.append((name, arguments))
            return way
        finally:
            await env.close()
