"""A client that never answers."""

import time

time.sleep(1e6)
