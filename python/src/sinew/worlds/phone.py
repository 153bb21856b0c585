"""A phone: screens as an accessibility tree, and taps, texts and scrolls by element. Apps are contacts, messages, alarms and settings.

The tree is what a reader of the screen would say, one line an element. `apps` and `contacts` set the difficulty.
"""

import random
from typing import Literal

from sinew import Done, Env, ToolError, tool

NAMES = "Ada Ben Cora Dirk Ella Finn Gerd Hedi Ines Jan Kaja Lars Mia Nele Olaf Pina".split()
SWITCHES = ["wifi", "bluetooth", "flight mode", "dark mode", "location"]
TEXTS = ["on my way", "call me", "see you at nine", "thank you", "happy birthday"]
#: Elements that fit on a screen.
SHOWN = 6


class Phone(Env):
    system = "You operate a phone. Each line of the screen is an element with its number. Tap, type and scroll until the task is done, then end your turn without a call."
    contacts = 8
    limit = 30

    def start(self, task):
        self.goal = task.goal
        self.s = self.device(task.world)
        return self.seen()

    @classmethod
    def device(cls, world):
        draw = random.Random(world)
        people = sorted(draw.sample(NAMES, cls.contacts))
        return {
            "screen": "home",
            "person": None,
            "draft": "",
            "scroll": 0,
            "used": 0,
            "hour": 6,
            "people": people,
            "sent": [],
            "alarms": sorted(draw.sample(range(5, 12), 2)),
            "on": sorted(draw.sample(SWITCHES, 2)),
        }

    def elements(self):
        """All elements of the screen: what it says, and the action of a tap."""
        s = self.s
        if s["screen"] == "home":
            return [(f"icon {app}", ("open", app)) for app in ("messages", "alarms", "settings")]
        back = ("button back", ("open", "home"))
        if s["screen"] == "messages":
            return [back] + [(f"contact {name}", ("chat", name)) for name in s["people"]]
        if s["screen"] == "chat":
            return [
                back,
                (f"title {s['person']}", None),
                (f"field text {s['draft']!r}", None),
                ("button send", ("send", None)),
            ]
        if s["screen"] == "alarms":
            rows = [(f"alarm {hour}:00", ("drop", hour)) for hour in s["alarms"]]
            return [
                back,
                *rows,
                (f"picker hour {s['hour']}", None),
                ("button later", ("hour", 1)),
                ("button earlier", ("hour", -1)),
                ("button add", ("add", None)),
            ]
        return [back] + [
            (f"switch {name} {'on' if name in s['on'] else 'off'}", ("switch", name)) for name in SWITCHES
        ]

    def seen(self):
        every, at = self.elements(), self.s["scroll"]
        lines = [f"[{i}] {text}" for i, (text, _) in enumerate(every) if at <= i < at + SHOWN]
        more = "\n(scroll for more)" if at + SHOWN < len(every) else ""
        return f"Screen {self.s['screen']}:\n" + "\n".join(lines) + more

    def spend(self):
        self.s["used"] += 1
        if self.s["used"] > self.limit:
            raise ToolError("The battery is empty: end your turn without a call.")

    @tool
    def tap(self, element: int):
        "Tap the element with a number. A tap on an alarm removes it."
        self.spend()
        every, s = self.elements(), self.s
        if not s["scroll"] <= element < min(len(every), s["scroll"] + SHOWN):
            raise ToolError(f"element {element} is not on the screen")
        text, action = every[element]
        if action is None:
            raise ToolError(f"[{element}] {text} cannot be tapped")
        verb, value = action
        if verb == "open":
            s.update(screen=value, scroll=0, draft="")
        elif verb == "chat":
            s.update(screen="chat", person=value, scroll=0, draft="")
        elif verb == "send":
            if not s["draft"]:
                raise ToolError("the field is empty")
            s["sent"].append([s["person"], s["draft"]])
            s["draft"] = ""
        elif verb == "drop":
            s["alarms"].remove(value)
        elif verb == "hour":
            s["hour"] = (s["hour"] + value) % 24
        elif verb == "add":
            s["alarms"] = sorted({*s["alarms"], s["hour"]})
        else:
            s["on"] = sorted(set(s["on"]) ^ {value})
        return self.seen()

    @tool
    def type(self, text: str):
        "Type into the text field of the screen; it replaces what is there."
        self.spend()
        if self.s["screen"] != "chat":
            raise ToolError("there is no text field on this screen")
        self.s["draft"] = text[:200]
        return self.seen()

    @tool
    def scroll(self, direction: Literal["down", "up"]):
        "Scroll down or up."
        self.spend()
        last = max(0, len(self.elements()) - SHOWN)
        self.s["scroll"] = min(max(0, self.s["scroll"] + (4 if direction == "down" else -4)), last)
        return self.seen()

    def result(self):
        return {key: self.s[key] for key in ("sent", "alarms", "on")}

    def reward(self, task):
        # Everything else has to be as it was.
        expected = {
            key: value for key, value in self.device(task.world).items() if key in ("sent", "alarms", "on")
        }
        expected.update(task.goal)
        return {"reward": self.result() == expected, "calls_used": self.s["used"]}

    def state(self):
        return {key: value for key, value in self.s.items() if key != "used"}

    def snapshot(self):
        return {"s": self.s, "goal": self.goal}

    def restore(self, snapshot):
        self.s, self.goal = snapshot["s"], snapshot["goal"]

    @classmethod
    def tasks(cls, split, seed):
        for i in range(2000 if split == "train" else 200):
            world = f"phone {split} {seed} {i}"
            draw, device = random.Random(f"goal {world}"), cls.device(world)
            kind = ("message", "alarm", "switch")[i % 3]
            if kind == "message":
                name, text = draw.choice(device["people"]), draw.choice(TEXTS)
                prompt, goal = f"Send {name} the message: {text}", {"sent": [[name, text]]}
            elif kind == "alarm":
                hour = draw.choice([h for h in range(4, 10) if h not in device["alarms"]])
                prompt, goal = f"Add an alarm at {hour}:00.", {"alarms": sorted([*device["alarms"], hour])}
            else:
                name = draw.choice(SWITCHES)
                prompt, goal = (
                    f"Switch {name} {'off' if name in device['on'] else 'on'}.",
                    {"on": sorted(set(device["on"]) ^ {name})},
                )
            yield {"prompt": prompt, "kind": kind, "world": world, "goal": goal}

    @classmethod
    def gold(cls, task):
        phone = cls()
        phone.start(task)
        way = []

        def do(name, **arguments):
            getattr(phone, name)(**arguments)
            way.append((name, arguments))

        def tap(text):
            at = next(i for i, (shown, _) in enumerate(phone.elements()) if shown == text)
            while not phone.s["scroll"] <= at < phone.s["scroll"] + SHOWN:
                do("scroll", direction="down" if at >= phone.s["scroll"] + SHOWN else "up")
            do("tap", element=at)

        if "sent" in task.goal:
            [[name, text]] = task.goal["sent"]
            tap("icon messages")
            tap(f"contact {name}")
            do("type", text=text)
            tap("button send")
        elif "alarms" in task.goal:
            tap("icon alarms")
            (hour,) = set(task.goal["alarms"]) - set(phone.s["alarms"])
            while phone.s["hour"] != hour:
                tap("button later" if hour > phone.s["hour"] else "button earlier")
            tap("button add")
        else:
            tap("icon settings")
            (name,) = set(task.goal["on"]) ^ set(phone.s["on"])
            tap(f"switch {name} {'on' if name in phone.s['on'] else 'off'}")
        return [*way, "Done."]
