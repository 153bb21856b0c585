"""The worlds in a browser: gold wins, silence does not, forged successes score nothing, and browsers leave no process.

Run by the tests of the `sinew` crate, with an interpreter that has Playwright and the pages of MiniWoB++.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
from typing import Any

from sinew import Step, ToolError
from sinew.worlds.miniwob import FAMILIES, MiniWoB
from sinew.worlds.shop import PRODUCTS, Shop
from sinew.worlds.web import Request, Response, Tree, Web, fields, quietly

DONE = ("done", {})


class Task(dict):
    __getattr__ = dict.__getitem__


class Player:
    """One episode, from its start to its close."""

    def __init__(self, world: type, row: dict[str, Any]) -> None:
        self.env, self.row, self.done = world(), Task(row), False

    async def __aenter__(self) -> "Player":
        self.seen = [await self.env.start(self.row)]
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.env.close()

    async def play(self, *turns: Any) -> "Player":
        for turn in turns:
            if self.done:
                break
            try:
                answer = self.env.step(turn) if isinstance(turn, str) else getattr(self.env, turn[0])(**turn[1])
                answer = await answer if inspect.isawaitable(answer) else answer
            except ToolError as error:
                answer = f"Error: {error}"
            self.done = isinstance(answer, Step) and answer.done
            self.seen.append(answer.observation if isinstance(answer, Step) else answer)
        return self

    def score(self) -> dict[str, Any]:
        return self.env.reward()


def made(world: type, **options: Any) -> type:
    """A world with options of its own, ready as in a worker."""
    kind = type(world.__name__, (world,), options)
    kind.setup_worker()
    return kind


def rows(world: type, split: str = "train", count: int = 20) -> list[dict[str, Any]]:
    return [row for _, row in zip(range(count), world.tasks(split, 5))]


def processes() -> list[int]:
    """Processes of Chromium that this test has started and that run."""
    found = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if name.isdigit() and f"--sinew-browser={os.getpid()}-".encode() in file.read():
                    found.append(int(name))
        except OSError:
            continue
    return found


def a_tree_is_read() -> None:
    def node(id: int, role: str, name: str, children: list[int], **more: Any) -> dict[str, Any]:
        said = {"role": {"value": role}, "name": {"value": name}, "nodeId": str(id), "childIds": [str(c) for c in children]}
        return {**said, "backendDOMNodeId": id, **more}

    nodes = [
        node(1, "RootWebArea", "Title", [2, 3, 4, 5, 6, 7]),
        node(2, "button", "Go\n now", [8], properties=[{"name": "expanded", "value": {"value": False}}]),
        node(3, "StaticText", "one", []),
        node(4, "StaticText", "two", []),
        node(5, "StaticText", "press", []),
        node(6, "combobox", "", [9, 10], value={"value": "b"}),
        node(7, "link", "far", []),
        node(8, "StaticText", "not shown again", []),
        node(9, "option", "a", []),
        node(10, "option", "b", [], ignored=True),
    ]
    elements = [100, 101, 102, 103, 104, 105, 2, 3, 4, 5, 6, 7]
    document = {
        "documentURL": 0,
        "scrollOffsetY": 50,
        "nodes": {"backendNodeId": elements, "parentIndex": [-1, 0, 1, 2, 3, 3, 3, 3, 3, 5, 3, 3], "isClickable": {"index": [1, 5]}},
        "layout": {"nodeIndex": [6, 9, 11], "bounds": [[0, 60, 9, 9], [0, 60, 9, 9], [0, 700, 9, 9]]},
    }
    tree = Tree(nodes, {"documents": [document], "strings": ["http://site.test/a?b=c"]})
    shown = 'page "Title" /a?b=c\n[1] button "Go now" (collapsed)\ntext "one two"\n[2] text "press"\n[3] combobox = "b" of a'
    assert tree.show(1000) == f"{shown}\n(0 lines above, 1 below: scroll)", tree.show(1000)
    # A click on the text goes to the element that listens.
    assert tree.element(2).node == 105 and tree.items[-1].place == 1
    assert "(2 more lines are not shown)" in tree.show(80), tree.show(80)
    assert fields("q=red+caf%C3%A9&max=%zz&empty&q=2") == {"q": "red café", "max": "%zz", "empty": ""}


def shops_differ_and_no_fixed_order_wins() -> None:
    worlds = {split: {row["world"] for row in rows(Shop, split, 100)} for split in ("train", "held-out")}
    assert not worlds["train"] & worlds["held-out"] and rows(Shop) == rows(Shop)
    for row in rows(Shop, count=40):
        shop = Shop()
        shop.opened(Task(row))
        shop.said_done, shop.page = True, None
        assert not shop.reward()["reward"], row
        # One piece of everything; and requests that only look like changes.
        for id in range(PRODUCTS):
            shop.answer(Request("POST", "/cart", {}, {"id": str(id), "quantity": "1", "size": "small"}, True))
        assert not shop.reward()["reward"], row
    seeds = {split: {row["seed"] for row in rows(MiniWoB, split, 100)} for split in ("train", "held-out")}
    assert not seeds["train"] & seeds["held-out"]


async def gold_wins_and_silence_does_not(world: type, kinds: list[str]) -> None:
    trained = rows(world, count=len(kinds))
    assert [row["kind"] for row in trained] == kinds
    for row in [*trained, *rows(world, "held-out", 1)]:
        async with Player(world, row) as player:
            for move in player.env.moves(player.row):
                last = False
                while not last:
                    name, arguments, last = player.env.tree.call(move)
                    await player.play((name, arguments))
            assert player.score()["reward"] and player.score()["requests_refused"] == 0, (row, player.seen)
    async with Player(world, trained[0]) as player:
        assert (await player.play(*await world.gold(player.row))).score()["reward"]
    for row in trained[:5]:
        async with Player(world, row) as player:
            await player.play("I am done.", DONE)
            assert not player.score()["reward"] and "call a tool" in player.seen[1], row


async def forged_orders_score_nothing(shop: type) -> None:
    for row in rows(shop, count=5):
        # Only forms change the shop; an address that looks like one is none.
        forged = ["/cart?id=1&quantity=1", "/cart/0?do=remove", "/checkout?name=a&street=b&city=c", "/thanks"]
        async with Player(shop, row) as player:
            await player.play(*[("open", {"path": path}) for path in forged], DONE)
            assert not player.score()["reward"] and player.score()["orders"] == 0, player.seen
    row = rows(shop)[0]
    way = (await shop.gold(Task(row)))[:-1]
    async with Player(shop, row) as player:
        # The right cart counts when the model says that it is done, and not after more was bought.
        await player.play(*way)
        assert player.score()["right_state"] and not player.score()["reward"]
        await player.play(*way, DONE)
        assert not player.score()["right_state"] and not player.score()["reward"]
    async with Player(shop, row) as player:
        script = "<img src=x onerror=\"fetch('/cart',{method:'POST',body:'id=1'})\"><script>document.title='x'</script>"
        await player.play(("type", {"element": 3, "text": script, "enter": True}))
        assert "0 found" in player.seen[-1] and 'page "Products"' in player.seen[-1], player.seen[-1]
        assert await player.env.page.evaluate("document.images.length") == 0
        # Not even a script of the page itself could run.
        await player.env.page.evaluate("void (document.body.innerHTML = '<p onclick=\"document.title=1\">a</p>')")
        await player.env.page.evaluate("document.querySelector('p').click()")
        assert await player.env.page.evaluate("document.title") == "Products"
        await player.play(DONE)
        assert not player.score()["reward"] and player.score()["in_cart"] == 0


async def forged_rewards_of_pages_score_nothing(pages: type) -> None:
    names = list(FAMILIES)
    row = rows(pages)[names.index("enter-text")]
    async with Player(pages, row) as player:
        before = player.seen[0].split("\n\n")[1]
        # Another page, or the same one again, would have another problem.
        for path in ("/miniwob/click-test.html", player.env.home, "/core/core.js", "//example.com/", "/../../../../etc/passwd"):
            await player.play(("open", {"path": path}))
            assert player.seen[-1].startswith("Error:"), player.seen[-1]
        for path in ("javascript:WOB_RAW_REWARD_GLOBAL=1", "file:///etc/passwd", "http://example.com/"):
            await player.play(("open", {"path": path}))
            assert "a path of this site" in player.seen[-1]
        await player.play(("back", {}), ("scroll", {"direction": "down"}))
        assert "no page to go back to" in player.seen[-2] and player.seen[-1] == before, player.seen
        script = "<img src=x onerror='WOB_DONE_GLOBAL=true;WOB_RAW_REWARD_GLOBAL=1'>javascript:WOB_RAW_REWARD_GLOBAL=1"
        await player.play(("type", {"element": 1, "text": script, "enter": True}), ("click", {"element": 2}), ("click", {"element": 2}))
        # The wrong text ends the episode: the page's next problem is not offered.
        assert player.done and player.score()["raw_reward"] < 0 and not player.score()["reward"], player.score()


class Odd(Web):
    """A page that asks, opens a window, asks other hosts, leaves, and is longer than the window."""

    BODY = """<title>Odd</title><button onclick="alert('hello')">ask</button><button onclick="if (!confirm('sure?')) this.textContent = 'no'">
        confirm</button><button onclick="window.open('/second')">open</button><button onclick="location = '/second'">leave</button>
        <button onclick="fetch('http://other.test/').catch(() => { this.textContent = 'refused' })">fetch</button>
        <button disabled>off</button><div id=d onclick="this.textContent = 'clicked'"><span>press</span></div>
        <img src="http://other.test/a.png" alt="picture"><p style="height: 900px">long</p><button>far</button>"""

    def opened(self, task: Any) -> str:
        self.asked: list[str] = []
        return "/"

    def answer(self, request: Request) -> Response:
        self.asked.append(request.path)
        return Response(200, "text/html", self.BODY.encode() if request.path == "/" else b"<title>Second</title>second")

    def reward(self) -> dict[str, Any]:
        return {"reward": False}


async def odd_pages_are_played(odd: type) -> None:
    async with Player(odd, {"prompt": "", "seed": 1}) as player:
        page = player.env.page

        async def click(name: str) -> str:
            found = next(item for item in player.env.tree.elements.values() if item.name == name)
            return (await player.play(("click", {"element": found.number}))).seen[-1]

        assert "[7] text \"press\"" in player.seen[0] and '[6] button "off" (disabled)' in player.seen[0], player.seen[0]
        assert player.seen[0].endswith("(0 lines above, 1 below: scroll)") and page.refused == 1, player.seen[0]
        assert '(the page showed a dialog: alert "hello")' in await click("ask")
        seen = await click("confirm")
        assert '[2] button "no"' in seen and 'confirm "sure?"' in seen, seen
        assert '"clicked"' in await click("press")
        await click("fetch")
        # The browser says so when it has come to it: no action waits for that.
        for _ in range(1200):
            if page.refused == 2:
                break
            await asyncio.sleep(0.05)
        assert page.refused == 2
        # A window that a page opens gets no answers, and the page stays.
        assert (await click("open")).startswith('page "Odd" /\n') and "/second" not in player.env.asked
        seen = (await player.play(("scroll", {"direction": "down"}))).seen[-1]
        assert '[1] button "far"' in seen and "lines above, 0 below" in seen, seen
        await player.play(("scroll", {"direction": "up"}))
        assert (await click("leave")).startswith('page "Second" /second\ntext "second"'), player.seen[-1]
        assert (await player.play(("back", {}))).seen[-1].startswith('page "Odd" /\n')
        await quietly(page.send("Page.crash"))
        try:
            await click("leave")
            raise AssertionError("a page that crashed answers")
        except RuntimeError as error:
            assert str(error) == "the page crashed", error
    async with Player(odd, {"prompt": "", "seed": 1}) as player:
        assert 'page "Odd" /' in player.seen[0]


async def wrong_calls_are_observations(shop: type) -> None:
    wrong = [
        (("click", {"element": 99}), "there is no element 99; the page has 1 to"),
        (("type", {"element": 1, "text": "x"}), "type needs a field; this is a link"),
        (("select", {"element": 1, "option": "x"}), "select needs a list; this is a link"),
        (("open", {"path": "http://other.test/"}), "a path of this site"),
        (("back", {}), "no page to go back to"),
        ("I am done.", "call a tool"),
    ]
    async with Player(shop, rows(shop)[0]) as player:
        for turn, said in wrong:
            await player.play(turn)
            assert said in player.seen[-1] and not player.done, player.seen[-1]
        # The seventh call, which is the limit.
        await player.play(("back", {}))
        assert player.done, "calls are limited"


async def browsers_are_replaced(shop: type) -> None:
    """One that crashes, one that has had its episodes, and one without a free place."""
    row = rows(shop)[0]
    flags = []
    async with Player(shop, row) as player, Player(shop, row) as other:
        flags.append(player.env.page.browser.flag)
        assert other.env.page.browser is player.env.page.browser and other.env.page.context is not player.env.page.context
        # What one episode keeps, the other does not see.
        await player.env.page.evaluate("void (document.cookie = 'a=1', localStorage.setItem('a', '1'))")
        assert await other.env.page.evaluate("document.cookie + localStorage.length") == "0"
        patience, shop.patience_s = shop.patience_s, 0.01
        try:
            await Player(shop, row).__aenter__()
            raise AssertionError("a third episode at once")
        except RuntimeError as error:
            assert "all 2 places" in str(error), error
        shop.patience_s = patience
        for process in processes():
            # One that the browser just forked may end with it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for player in (player, other):
            try:
                await player.play(("click", {"element": 1}))
                raise AssertionError("a browser that is gone answers")
            except RuntimeError as error:
                assert str(error) == "the browser ended", error
    for _ in range(3):
        async with Player(shop, row) as player:
            flags.append(player.env.page.browser.flag)
            assert (await player.play(("click", {"element": 1}))).seen[-1].startswith('page "Shop"')
    # Three episodes a browser: the first had two, its successor three.
    assert len(set(flags)) == 2 and flags[1] == flags[3], flags
    async with Player(shop, row) as player:
        assert player.env.page.browser.flag not in flags
        assert len({arguments for arguments in map(flag_of, processes())}) == 1, "a browser that was replaced still runs"


def flag_of(process: int) -> str:
    with open(f"/proc/{process}/cmdline", "rb") as file:
        return next(word.decode() for word in file.read().split(b"\0") if word.startswith(b"--sinew-browser="))


def wrong_options_are_named() -> None:
    for world, options, said in (
        (Shop, {"levels": [6]}, "options.levels is [6]; allowed: 1 to 5"),
        (MiniWoB, {"families": ["bisect-angle"]}, "options.families: 'bisect-angle' is unknown; allowed: click-button"),
        (Shop, {"places": 0}, "options.places is 0; allowed: 1 or more"),
        (Shop, {"patience_s": float("nan")}, "options.patience_s is nan; allowed: 1 to 600"),
        (Shop, {"browser": "/usr/bin/chrome"}, "options.browser is '/usr/bin/chrome'"),
    ):
        try:
            made(world, **options)
            raise AssertionError(said)
        except (ValueError, FileNotFoundError) as error:
            assert said in str(error), error


async def main() -> None:
    a_tree_is_read()
    wrong_options_are_named()
    shops_differ_and_no_fixed_order_wins()
    shop, pages = made(Shop, patience_s=100.0), made(MiniWoB, patience_s=100.0)
    await gold_wins_and_silence_does_not(shop, [f"shop/{level}" for level in range(1, 6)])
    await forged_orders_score_nothing(shop)
    await gold_wins_and_silence_does_not(pages, [f"miniwob/{family}" for family in FAMILIES])
    await forged_rewards_of_pages_score_nothing(pages)
    limited, small = made(Shop, patience_s=100.0, limit=7), made(Shop, patience_s=100.0, places=2, episodes_per_browser=3)
    await wrong_calls_are_observations(limited)
    for world in (shop, pages, limited):
        await world.pool.browser.process.close()
    assert not processes()
    await browsers_are_replaced(small)
    odd = made(Odd, patience_s=100.0)
    await odd_pages_are_played(odd)
    for world in (small, odd):
        await world.pool.browser.process.close()
    assert not processes()
    print("ok")


asyncio.run(main())
