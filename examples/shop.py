"""A small shop with two tools: an environment for `[env] type = "python"`.

Try it: sinew env check examples/shop.py:Shop
"""

import random

from sinew import Env, ToolError, tool

PRICES = {"bread": 3, "cheese": 5, "jam": 4, "milk": 1, "tea": 6}


class Shop(Env):
    system = "You buy exactly what the customer asks for. Search for items, then put them in the cart."

    def start(self, task):
        self.cart = []

    @tool
    def search(self, query: str) -> list[dict]:
        "Find items by a part of their name."
        return [{"item": item, "price": price} for item, price in PRICES.items() if query in item]

    @tool
    def add(self, item: str, count: int = 1):
        """Put an item in the cart.

        Args:
            item: name of the item, as search shows it
            count: how many, 1 to 9
        """
        if item not in PRICES:
            raise ToolError(f"there is no {item}; search first")
        if not 1 <= count <= 9:
            raise ToolError(f"count is {count}; allowed: 1 to 9")
        self.cart += [item] * count
        return f"The cart has {len(self.cart)} items."

    def state(self):
        return sorted(self.cart)

    def reward(self, task):
        want = [item for item, count in task.want.items() for _ in range(count)]
        right = sorted(self.cart) == sorted(want)
        return {"reward": right, "price": sum(PRICES[item] for item in self.cart)}

    @staticmethod
    def tasks(split, seed):
        draw = random.Random(f"{split} {seed}")
        for _ in range(400 if split == "train" else 150):
            items = draw.sample(sorted(PRICES), draw.randint(1, 2))
            want = {item: draw.randint(1, 3) for item in items}
            asked = " and ".join(f"{count} {item}" for item, count in want.items())
            yield {"prompt": f"I need {asked}.", "want": want}

    @staticmethod
    def gold(task):
        return [[("add", {"item": item, "count": count}) for item, count in task.want.items()], "Done."]
