from sinew import Env, tool
class Shop(Env):
    tasks = [{"prompt": f"Buy {n} tea.", "stock": ["tea", "salt"], "want": ["tea"] * n} for n in range(1, 100)]
    def start(self, task):
        self.stock, self.cart = task.stock, []
    @tool
    def search(self, query: str) -> list[str]:
        "Find items."
        return [item for item in self.stock if query in item]
    @tool
    def add(self, item: str, count: int = 1):
        "Put an item in the cart."
        self.cart += [item] * min(count, 1000)
    def reward(self, task):
        return self.cart == task.want
