"""Makes data/tiny-demonstrations.jsonl and data/tiny-pairs.jsonl: the perfect policy of the tiny
world in the tasks it trains on, and each of its first moves against the wrong one."""

import json
import pathlib

WIDTH, MASK = 10, (1 << 64) - 1


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def hash64(text):
    h = 0xCBF29CE484222325
    for b in text.encode():
        h = ((h ^ b) * 0x100000001B3) & MASK
    return mix(h)


def picture(at, goal):
    arrow = "<" if goal < at else ">"
    return "".join("A" if c == at else arrow if c == goal else "." for c in range(WIDTH))


def say(role, content):
    return {"role": role, "content": content}


demonstrations, pairs = [], []
for start in range(WIDTH):
    for goal in range(WIDTH):
        # Every fourth task, by its picture, is held out.
        if not 1 <= abs(start - goal) <= 2 or hash64(picture(start, goal)) % 4 == 0:
            continue
        step = -1 if goal < start else 1
        right, wrong = ("l", "r") if step < 0 else ("r", "l")
        messages, at = [say("user", picture(start, goal))], start
        while at != goal:
            messages.append(say("assistant", right))
            at += step
            if at != goal:
                messages.append(say("tool", picture(at, goal)))
        demonstrations.append({"messages": messages})
        pairs.append({"prompt": messages[:1], "chosen": right, "rejected": wrong})

root = pathlib.Path(__file__).parent.parent / "data"
for name, rows in [("demonstrations", demonstrations), ("pairs", pairs)]:
    lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
    (root / f"tiny-{name}.jsonl").write_text("".join(lines))
