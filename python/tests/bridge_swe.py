"""An interpreter without pytest ends an episode of SWE-bench with an error: its tests would count as failed."""

from types import SimpleNamespace

from sinew.bridges.swe import Swe


class Without(Swe):
    interpreter = "/bin/false"


episode = Without()
try:
    episode.start(SimpleNamespace(instance_id="none"))
except RuntimeError as error:
    assert "/bin/false cannot import pytest: pip install pytest there" in str(error), error
else:
    raise AssertionError("an episode without pytest began")
finally:
    episode.close()

print("ok")
