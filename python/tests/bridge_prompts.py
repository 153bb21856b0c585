"""First observations of bridged packages: they say what is seen, once."""

from types import SimpleNamespace

from sinew.bridges import gym, spiel, textworld


def begun(base, **options):
    world = type("World", (base,), options)
    world.setup_worker()
    task = SimpleNamespace(seed=3, side=0)
    env = world()
    return env, env.start(task)


lake, seen = begun(gym.Gym, id="FrozenLake-v1")
assert "[S]FFF" in seen and seen.count("\n") >= 3, seen
assert "H is a hole" in lake.system, lake.system
lake.one("right")
assert "[" in lake.seen, lake.seen

cart, seen = begun(gym.Gym, id="CartPole-v1")
assert seen.startswith("cart position ") and "pole angle" in seen, seen
assert "upright" in cart.system

kuhn, seen = begun(spiel.Spiel, game="kuhn_poker")
assert "You hold " in seen and "the highest wins" in seen and "Legal moves" in seen, seen
leduc, seen = begun(spiel.Spiel, game="leduc_poker")
assert seen.startswith("What you know: "), seen


class Game:
    def __init__(self, feedback):
        self.feedback = feedback

    def reset(self):
        return SimpleNamespace(objective="Find the  key.", feedback=self.feedback)


for feedback, count in (("$$$ Welcome! Find the key. You are in a hall.", 1), ("You are in a hall.", 1)):
    world = type("World", (textworld.TextWorld,), {"opened": classmethod(lambda cls, seed, **more: Game(feedback))})
    seen = world().start(SimpleNamespace(seed=1))
    assert " ".join(seen.split()).count("Find the key.") == count and "hall" in seen, seen

print("ok")
