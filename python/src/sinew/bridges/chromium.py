"""Debian's Chromium in the sandbox of a worker, for environments that drive it with Playwright.

Chromium runs within the sandbox of the worker, without its own: that one needs namespaces, which a sandbox of level `process` does not
give out.
"""

import os
import shutil
import threading

#: Chromium's program. Debian's script `/usr/bin/chromium` reads `/etc`, which a sandbox does not show.
PROGRAM = "/usr/lib/chromium/chromium"
#: Free bytes in `/tmp` with which Chromium starts: its profile and the memory that its processes share are there.
SPACE = 64 << 20
#: Processes and threads that Chromium and Playwright have together with one page, at most. With fewer they hang or end, without a reason.
THREADS = 200
#: Chromium in a sandbox: no namespaces (also of its zygote), shared memory in `/tmp`, no crash handler (it traces), and nothing that
#: asks for a network.
FLAGS = [
    "--no-sandbox",
    "--no-zygote",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-crash-reporter",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--proxy-server=127.0.0.1:9",
]
#: `/etc/fonts` is not shown in a sandbox. Without fonts texts have no size, and lie elsewhere.
FONTS = '<?xml version="1.0"?><fontconfig><dir>/usr/share/fonts</dir><cachedir>/tmp/fonts</cachedir></fontconfig>'


def check_program(program):
    """Says which program is missing, and what to install."""
    if not os.access(program, os.X_OK):
        raise FileNotFoundError(
            f"options.browser is {program!r}, and there is no such program where the worker runs: apt-get install "
            "--no-install-recommends chromium, or name Chromium's own program below /usr"
        )


def prepare(threads=THREADS):
    """Makes the worker ready for its first browser, or says what it lacks. A worker that only reads tasks has no room for one."""
    free = shutil.disk_usage("/tmp").free
    if free < SPACE:
        raise RuntimeError(f"/tmp of the worker has {free >> 20} MiB, and Chromium needs {SPACE >> 20} or more: set sandbox.work_mb to 256 or more")
    able = room(threads)
    if able < threads:
        raise RuntimeError(f"the worker can start {able} threads more, and Chromium needs {threads}: set sandbox.processes to {threads + 56} or more")
    with open("/tmp/fonts.conf", "w") as file:
        file.write(FONTS)
    os.environ.update(FONTCONFIG_FILE="/tmp/fonts.conf", HOME="/tmp")


def room(most):
    """How many threads can be started, up to a number: the limit of a sandbox on processes counts them."""
    end, threads = threading.Event(), []
    try:
        for _ in range(most):
            thread = threading.Thread(target=end.wait)
            thread.start()
            threads.append(thread)
    except RuntimeError:
        pass
    end.set()
    for thread in threads:
        thread.join()
    return len(threads)
