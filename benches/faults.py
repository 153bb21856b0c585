"""Faults on the real system: what a training run loses, leaves behind and needs to recover.

Each round trains a tiny model in real processes (two that train, sandboxes with an environment and a reward in Python, a
reward server), does one thing to them at an instant that the seed draws, goes on with `--resume` where the run ended, and
compares the end with that of a run that was left alone. Needs Linux, Python 3.10 and a `sinew` program:

    python3 benches/faults.py target/release/sinew --rounds 200 --seed 1

With `--faults` it strikes runs over several hosts instead, which are network namespaces, as root with `ip` and PostgreSQL: the
owner, two workers, two sandbox hosts, an engine role and the store are killed, stopped, parted and starved while they work,
and a supervisor starts again what ended (`benches/cluster_faults.py`):

    python3 benches/faults.py target/release/sinew --faults 200 --seed 1

Prints a table; with `--json` a line for each round, and one for each kind. Exit code 1 if a round lost an episode, trained
one twice, left a process behind, ended with other weights, or did not say what happened. Rounds of a kind that this machine
does not allow are not run, and that is said.
"""

import argparse
import ctypes
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict

WORLD = """
import time
from sinew import Env, Step


class World(Env):
    def start(self, task):
        self.said = []

    def step(self, text):
        time.sleep(0.02)
        self.said.append(any(c.isdigit() for c in text))
        return Step("end", done=True) if len(self.said) == 3 else "go on"

    def reward(self, task):
        return sum(self.said) / 3

    def snapshot(self):
        return self.said

    def restore(self, snapshot):
        self.said = snapshot

    tasks = [{"prompt": str(n)} for n in range(200)]
"""
REWARDS = """
def letters(output):
    return sum(c.isalpha() for c in output) / max(1, len(output))
"""
SCORER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = [sum(c.isdigit() for c in s["output"]) / 4 for s in body["samples"]]
        data = json.dumps({"scores": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


ThreadingHTTPServer.request_queue_size = 256
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("listens", flush=True)
server.serve_forever()
"""
EATER = """
import os, sys

open(sys.argv[1], "w").write("0")
taken = []
while True:
    taken.append(os.urandom(1 << 20))
"""
RECIPE = """
name = "faults"
seed = 0
model = {{ type = "scratch", d_model = 32, layers = 2, heads = 2, kv_heads = 1, d_ff = 64 }}

[env]
type = "python"
module = "world.py:World"
workers = 2

[reward]
"rewards.py:letters" = 0.5
"http://127.0.0.1:{port}/score" = 1.0

[rollout]
tasks_per_step = 4
group_size = 4
max_turns = 4
max_turn_tokens = 4
max_context_tokens = 256
repair = [{{ type = "retry", times = 2 }}, {{ type = "mask", in_baseline = false }}]

[algorithm]
type = "grpo"
{correction}
[train]
{mode}steps = {steps}
learning_rate = 3e-3
checkpoint_every = 2
data_parallel = 2

[eval]
tasks = 4
"""
MODES = {"sync": "", "async": 'mode = "async"\nmax_staleness = 2\n'}
CORRECTION = 'correction = { type = "truncate", low = 0.0, high = 2.0 }\n'

#: What a run says of a fault that ends it; one of the words is enough. Without words, the process cannot speak any more,
#: and `sinew runs` says that it was killed.
SAYS = {
    "process": [],
    "trainer": ["training process"],
    "spawner": ["spawner", "sandbox"],
    "sandbox": ["worker", "sandbox"],
    "scorer": ["127.0.0.1"],
    "oom": ["training process", "sandbox", "worker"],
    "memory": ["memory", "cannot allocate", "thread"],
    "disk": ["no room", "no space left", "MiB free"],
    "clock": [],
    "torn": [],
}
#: Longest time that one session may take, and that processes may need to go after their run.
SESSION_S, GONE_S = 600.0, 60.0
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
LIBC = ctypes.CDLL(None, use_errno=True)
SUBREAPER, NEWTIME = 36, 0x80


def stat(pid):
    """Parent, state and start of a process; None if it is gone."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rsplit(") ", 1)[1].split()
    return int(fields[1]), fields[0], fields[19]


def words(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def below(root):
    """Processes below one, nearest first."""
    children = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit() and (seen := stat(name)):
            children[seen[0]].append(int(name))
    found, at = [], [root]
    while at:
        at = [child for parent in at for child in children[parent]]
        found += at
    return found


def left_behind(own):
    """Processes below this one that no session has any more; waits until they are gone."""
    until = time.monotonic() + GONE_S
    while True:
        there = []
        for pid in below(os.getpid()):
            seen = stat(pid)
            if seen is None or pid in own:
                continue
            if seen[1] == "Z" and seen[0] == os.getpid():
                os.waitpid(pid, os.WNOHANG)
            elif seen[1] != "Z":
                there.append(pid)
        if not there or time.monotonic() > until:
            return there
        time.sleep(0.05)


class Session:
    """One process of `sinew train`, with all that it prints and when."""

    def __init__(self, args, cwd, env=None, cgroup=None):
        def enter():
            if cgroup:
                # The kernel is to choose one of the run's processes, not the neighbour that takes the memory.
                pathlib.Path("/proc/self/oom_score_adj").write_text("500")
                (cgroup / "cgroup.procs").write_text("0")

        self.begun = time.monotonic()
        self.lines, self.errors, self.steps = [], [], []
        self.process = subprocess.Popen(args, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, **(env or {})}, preexec_fn=enter)
        self.readers = [threading.Thread(target=self.read_lines), threading.Thread(target=self.read_errors)]
        for reader in self.readers:
            reader.start()

    def read_lines(self):
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith('{"step":'):
                self.steps.append((json.loads(line)["step"]["step"], time.monotonic()))

    def read_errors(self):
        for line in self.process.stderr:
            self.errors.append(line)

    def wait(self):
        """The exit code; None if it hung and was ended."""
        try:
            code = self.process.wait(SESSION_S)
        except subprocess.TimeoutExpired:
            for pid in below(self.process.pid):
                signal_to(pid)
            self.process.kill()
            self.process.wait()
            code = None
        for reader in self.readers:
            reader.join(GONE_S)
        return code

    def said(self):
        return "".join(self.errors)


def signal_to(pid, number=signal.SIGKILL):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


class Scorer:
    """The reward server, which can be killed and started again at the same port."""

    def __init__(self, folder):
        # Held, so that nobody else gets the port while the server is killed.
        self.folder, self.held = folder, socket.socket()
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.held.bind(("127.0.0.1", 0))
        self.port = self.held.getsockname()[1]
        (folder / "scorer.py").write_text(SCORER)
        self.start()

    def start(self):
        args = [sys.executable, self.folder / "scorer.py", str(self.port)]
        self.process = subprocess.Popen(args, stdout=subprocess.PIPE)
        if not self.process.stdout.readline():
            raise SystemExit(f"the reward server does not listen on port {self.port}")

    def kill(self):
        self.process.kill()
        self.process.communicate()


class Faults:
    """What can be done to a session. Each returns after it is done, and gives what has to be undone before the next
    session."""

    def __init__(self, bench, dice):
        self.bench, self.dice = bench, dice

    def process(self, session, run):
        session.process.kill()

    def kill_below(self, session, wanted):
        """Kills a process below the session as soon as there is one."""
        until = time.monotonic() + 10
        while time.monotonic() < until and session.process.poll() is None:
            found = [pid for pid in below(session.process.pid) if wanted(pid)]
            if found:
                return signal_to(self.dice.choice(found))
            time.sleep(0.01)

    def trainer(self, session, run):
        program = session.process.args[0]
        self.kill_below(session, lambda pid: words(pid)[:1] == [str(program)])

    def spawner(self, session, run):
        near = lambda pid: (stat(pid) or [0])[0] == session.process.pid
        self.kill_below(session, lambda pid: near(pid) and words(pid)[1:2] == ["spawner"])

    def sandbox(self, session, run):
        self.kill_below(session, lambda pid: "spawner" not in words(pid)[1:2] and "python" in "".join(words(pid)[:1]))

    def scorer(self, session, run):
        self.bench.scorer.kill()
        time.sleep(self.dice.uniform(0.0, 1.5))
        self.bench.scorer.start()

    def oom(self, session, run):
        """A neighbour in the same group of memory takes what is left of it; the kernel chooses who is killed."""
        group = self.bench.cgroup
        limit = int((group / "memory.usage_in_bytes").read_text()) + (32 << 20)
        (group / "memory.limit_in_bytes").write_text(str(limit))
        before = (group / "memory.oom_control").read_text()
        eater = subprocess.Popen([sys.executable, "-c", EATER, group / "cgroup.procs"])
        until = time.monotonic() + 20
        while (group / "memory.oom_control").read_text() == before and time.monotonic() < until:
            time.sleep(0.01)
        eater.kill()
        eater.wait()
        (group / "memory.limit_in_bytes").write_text("-1")

    def memory(self, session, run):
        """No further page of address space for the main process."""
        import resource
        if session.process.poll() is not None:
            return
        size = int(pathlib.Path(f"/proc/{session.process.pid}/statm").read_text().split()[0]) * 4096
        resource.prlimit(session.process.pid, resource.RLIMIT_AS, (size, size))

    def disk(self, session, run):
        filler = run / "filler"
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 20))
            except OSError:
                pass
            at = file.tell()
        os.truncate(filler, max(0, at - self.dice.randrange(200_000)))
        return lambda: filler.unlink()

    def clock(self, session, run):
        """The wall clock jumps while the run works; the next session has another monotonic clock."""
        jump = self.dice.choice(["-2d", "+2d", "-7s", "+400d"])
        (self.bench.folder / "clock").write_text(jump)
        time.sleep(self.dice.uniform(0.1, 0.6))
        session.process.kill()
        return self.bench.move_monotonic

    def torn(self, session, run):
        session.process.kill()
        return lambda: tear(run, self.dice)


def tear(run, dice):
    """What a medium that lost power leaves: a frame behind the newest segment that is cut short or of which no sector was
    written, half lines in the records of steps, rubbish behind the log of the index, halves of new files."""
    segments = sorted((run / "store/segments").glob("*"))
    if segments and segments[-1].stat().st_size >= 16:
        body = dice.randbytes(dice.randrange(100, 3000))
        frame = b"FRAM" + struct.pack("<III", 1, len(body), dice.getrandbits(32)) + body
        cut = frame[: dice.randrange(1, len(frame))]
        with open(segments[-1], "ab") as file:
            file.write(dice.choice([cut, bytes(len(cut))]))
    for name in ("metrics.jsonl", "evals.jsonl"):
        path = run / name
        if path.exists() and path.stat().st_size:
            os.truncate(path, path.stat().st_size - dice.randrange(1, 60))
    wal = run / "store/index.sqlite-wal"
    if wal.exists():
        with open(wal, "ab") as file:
            file.write(dice.randbytes(dice.randrange(1, 5000)))
    for name in ("recipe.new", "pinned.new", "began.new", "checkpoints/.tmp-LATEST"):
        if (run / name).parent.is_dir():
            (run / name).write_text("half")


def weights(run):
    """Digests of the newest checkpoint's weights and optimizer."""
    folder = run / "checkpoints" / (run / "checkpoints/LATEST").read_text().strip()
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.safetensors"))}


class Bench:
    """The folder of all rounds, what they share, and the runs that were left alone."""

    def __init__(self, sinew, folder, steps):
        self.sinew, self.folder, self.steps, self.alone = sinew, folder, steps, {}
        (folder / "world.py").write_text(WORLD)
        (folder / "rewards.py").write_text(REWARDS)
        self.scorer = Scorer(folder)
        self.cgroup = pathlib.Path(f"/sys/fs/cgroup/memory/faults-{os.getpid()}")
        try:
            self.cgroup.mkdir()
        except OSError:
            self.cgroup = None
        for mode, keys in MODES.items():
            correction = CORRECTION if keys else ""
            text = RECIPE.format(port=self.scorer.port, mode=keys, correction=correction, steps=steps)
            (folder / f"{mode}.toml").write_text(text)

    def close(self):
        self.scorer.kill()
        if self.cgroup:
            self.cgroup.rmdir()

    def refusals(self):
        """Kinds that this machine does not allow, and why."""
        why = {}
        if not self.cgroup:
            why["oom"] = "no control group of memory (version 1) can be made"
        if not os.environ.get("FAULTS_MOUNTS"):
            why["disk"] = "no mount namespace of its own"
        return why

    def clocks(self):
        """What a jump of the clock moves here."""
        wall, mono = "the wall clock within a session (libfaketime)", "the monotonic clock between sessions (time namespace)"
        wall = wall if os.path.exists(FAKETIME) else "no wall clock (there is no libfaketime)"
        mono = mono if os.geteuid() == 0 else "no monotonic clock (not root)"
        return f"{wall}, {mono}"

    def move_monotonic(self, days=None):
        """The next processes are in a time namespace whose monotonic clock is days ahead."""
        if LIBC.unshare(NEWTIME) == 0:
            days = random.SystemRandom().randrange(1, 100) if days is None else days
            offsets = "".join(f"{clock} {days * 86400} 0\n" for clock in ("monotonic", "boottime"))
            pathlib.Path("/proc/self/timens_offsets").write_text(offsets)

    def session(self, mode, run, kind=""):
        args = [self.sinew, "train", self.folder / f"{mode}.toml", "--run-dir", run, "--json"]
        args += ["--resume"] if (run / "recipe.toml").exists() else []
        env = {}
        if kind == "clock" and os.path.exists(FAKETIME):
            (self.folder / "clock").write_text("+0")
            env = {"LD_PRELOAD": FAKETIME, "FAKETIME_TIMESTAMP_FILE": str(self.folder / "clock"),
                   "FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        return Session(args, self.folder, env, self.cgroup if kind == "oom" else None)

    def left_alone(self, mode):
        """Weights, last line and step times of a run that nothing happens to, once for each mode."""
        if mode not in self.alone:
            run = self.folder / f"alone-{mode}"
            session = self.session(mode, run)
            code = session.wait()
            if code != 0:
                raise SystemExit(f"the run without a fault failed: {session.said()}")
            times = [at - session.begun for _, at in session.steps]
            self.alone[mode] = weights(run), json.loads(session.lines[-1]), times
        return self.alone[mode]

    def state(self, run):
        """What `sinew runs` says of the run; `none` where it was killed before there was one."""
        told = subprocess.run([self.sinew, "runs", "--json", run.parent], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True)
        lines = [json.loads(line) for line in told.stdout.splitlines()]
        return lines[0].get("state") if lines else "none"

    def troubled(self, run):
        """Episodes that were run again after a failure, those that were left out, and why."""
        told = subprocess.run([self.sinew, "episodes", "--json", "--limit", "10000", "--run-dir", run],
                              stdout=subprocess.PIPE, text=True)
        again = sum("-r" in json.loads(line).get("episode", "") for line in told.stdout.splitlines())
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        out = sum(step["rollout"]["failed"] + step["samples"]["unscored"]["count"] for step in steps)
        why = [step.get("failed_cause") or step["samples"]["unscored"].get("first") for step in steps]
        return again, out, [text for text in why if text]

    def repeats(self, mode, run, expected):
        """Whether the commits of an asynchronous run give the same weights again."""
        again = run.with_name(run.name + "-again")
        shutil.copytree(run, again)
        shutil.rmtree(again / "checkpoints")
        session = self.session(mode, again)
        same = session.wait() == 0 and weights(again) == expected
        shutil.rmtree(again)
        return same


def instant(session, times, dice):
    """Waits for an instant of the run: before its first step, or between its first and its last one, evenly."""
    if dice.random() < 0.25:
        until = session.begun + dice.uniform(0.0, times[0])
    else:
        while not session.steps and session.process.poll() is None:
            time.sleep(0.005)
        until = time.monotonic() + dice.uniform(0.0, 0.9 * (times[-1] - times[0]))
    while time.monotonic() < until and session.process.poll() is None:
        time.sleep(0.002)


def one_round(bench, kind, mode, number, seed):
    """One fault to one run, and what came of it."""
    dice = random.Random(f"{seed} {number} {kind} {mode}")
    expected, alone, times = bench.left_alone(mode)
    run = bench.folder / f"round-{number}" / "run"
    run.mkdir(parents=True)
    if kind == "disk":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", run], check=True)
    session, faults = bench.session(mode, run, kind), Faults(bench, dice)
    instant(session, times, dice)
    row = {"round": number, "kind": kind, "mode": mode, "at_s": round(time.monotonic() - session.begun, 3),
           "at_step": len(session.steps)}
    before = (time.monotonic(), len(session.steps))
    undo = getattr(faults, kind)(session, run)
    after = time.monotonic()
    codes, orphans, said, steps = [], 0, [], []
    while True:
        code = session.wait()
        codes.append(code)
        said.append(session.said())
        steps += session.steps
        left = left_behind([bench.scorer.process.pid])
        orphans += len(left)
        for pid in left:
            signal_to(pid)
        if len(codes) == 1 and code != 0:
            row["state"] = bench.state(run)
            # Until it was killed, the run went on.
            before = (after if code == -signal.SIGKILL else before[0], len(session.steps))
        if code == 0 or code is None or len(codes) > 4:
            break
        if undo:
            undo()
            undo = None
        session = bench.session(mode, run, "")
    struck, reached = before
    later = [at for step, at in steps if at > struck and step > reached]
    row["recover_s"] = round((min(later) if later else time.monotonic()) - struck, 2)
    row.update(codes=codes, orphans=orphans, said=said[0].strip()[-600:])
    judge(bench, row, run, expected, alone, session)
    if kind == "disk":
        subprocess.run(["umount", run], check=True)
    if kind == "clock":
        bench.move_monotonic(0)
    if row["ok"]:
        shutil.rmtree(run.parent)
    return row


def judge(bench, row, run, expected, alone, session):
    """Fills in whether the round ended as it must."""
    last = json.loads(session.lines[-1]) if row["codes"][-1] == 0 else {"samples": {}}
    row.update(lost=last["samples"].get("lost"), trained_twice=last["samples"].get("trained_twice"))
    if row["codes"][-1] != 0:
        row.update(equal=False, named=False, again=0, left_out=0, ok=False, end=session.said()[-2000:])
        return
    found = weights(run)
    row["again"], row["left_out"], row["why"] = bench.troubled(run)
    if row["mode"] == "sync":
        pairs = {"weights": (found, expected), "eval": (last["eval"], alone["eval"]),
                 "samples": (last["samples"], alone["samples"])}
        row["differs"] = [name for name, (a, b) in pairs.items() if a != b]
        # What an episode says when it is run again is drawn anew.
        row["equal"] = not row["differs"] or row["again"] + row["left_out"] > 0
    else:
        row["equal"] = bench.repeats(row["mode"], run, found)
    needles = SAYS[row["kind"]]
    spoke = any(needle.lower() in row["said"].lower() for needle in needles)
    # A run that came to its end says what it left out; one that was killed cannot.
    killed = row["codes"][0] == -signal.SIGKILL and row["state"] in ("killed", "ended", "none")
    if row["codes"][0] == 0:
        row["named"] = row["left_out"] == 0 or bool(row["why"])
    else:
        row["named"] = spoke or killed
    counts = row["lost"] == 0 and row["trained_twice"] == 0 and row["orphans"] == 0
    row["ok"] = counts and row["equal"] and row["named"]


def summary(rows):
    """An object for each kind and mode."""
    table = []
    for kind, mode in sorted({(row["kind"], row["mode"]) for row in rows}):
        own = [row for row in rows if (row["kind"], row["mode"]) == (kind, mode)]
        seconds = [row["recover_s"] for row in own]
        ended = sum(row["codes"][0] != 0 for row in own)
        total = lambda key: sum(row[key] or 0 for row in own)
        table.append({"name": f"faults/{kind}/{mode}", "rounds": len(own), "ended": ended, "lost": total("lost"),
                      "doubled": total("trained_twice"), "orphans": total("orphans"), "run_again": total("again"),
                      "left_out": total("left_out"),
                      "other_weights": sum(not row["equal"] for row in own),
                      "unnamed": sum(not row["named"] for row in own),
                      "recover_s": round(statistics.median(seconds), 2), "recover_max_s": max(seconds),
                      "bad": sum(not row["ok"] for row in own)})
    return table


def show(table):
    keys = [key for key in table[0] if key != "bad"]
    print("| " + " | ".join(keys) + " |\n|" + "---|" * len(keys))
    for row in table:
        print("| " + " | ".join(str(row[key]) for key in keys) + " |")


def in_namespace():
    """Runs this program again with mounts of its own, where that is allowed."""
    own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if os.environ.get("FAULTS_MOUNTS") or subprocess.run([*own, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        return
    os.environ["FAULTS_MOUNTS"] = "1"
    os.execvp(own[0], [*own, sys.executable, *sys.argv])


def across_hosts(args, folder):
    """Faults to runs over several hosts."""
    import cluster_faults
    known = cluster_faults.kinds_of(args.over)
    args.kinds, args.steps = args.kinds or ",".join(known), args.steps or 80
    if unknown := set(args.kinds.split(",")) - set(known):
        sys.exit(f"--kinds {','.join(unknown)}: allowed: {', '.join(known)}")
    if not cluster_faults.run(args, folder):
        sys.exit(f"faults were not borne; logs are below {folder}")
    shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sinew", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="training steps of a run, at least 3; 8, and 80 with --faults")
    parser.add_argument("--kinds", help="kinds of faults, by commas; all")
    parser.add_argument("--faults", type=int, help="number of faults to runs over several hosts")
    parser.add_argument("--over", choices=["workers", "queue"], default="workers",
                        help="with --faults: hosts that run episodes for the run, or that fill and score a queue for it")
    parser.add_argument("--partition-s", type=float, nargs=2, default=(1.0, 6.0), help="with --faults: shortest and longest partition")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--json", action="store_true", help="a line for each round, and for each kind")
    args = parser.parse_args()
    in_namespace()
    LIBC.prctl(SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="faults-"))
    # Sandboxes have users of their own, and read the environment's code here.
    folder.chmod(0o755)
    if args.faults is not None:
        across_hosts(args, folder)
        return
    args.kinds = args.kinds or ",".join(SAYS)
    bench, rows = Bench(args.sinew.resolve(), folder, max(3, args.steps or 8)), []
    why = bench.refusals()
    kinds = [kind for kind in args.kinds.split(",") if kind not in why]
    for kind in set(args.kinds.split(",")) - set(kinds):
        print(f"{kind}: {why[kind]}", file=sys.stderr)
    if "clock" in kinds:
        print(f"clock: {bench.clocks()}", file=sys.stderr)
    try:
        modes = args.modes.split(",")
        for number in range(args.rounds):
            # Every kind once, then every kind in the next mode.
            at, turn = number % len(kinds), number // len(kinds)
            row = one_round(bench, kinds[at], modes[(at + turn) % len(modes)], number, args.seed)
            rows.append(row)
            if args.json or not row["ok"]:
                print(json.dumps(row), flush=True)
    finally:
        bench.close()
    table = summary(rows)
    if args.json:
        print("\n".join(json.dumps(row) for row in table))
    else:
        show(table)
    bad = sum(row["bad"] for row in table)
    if bad:
        sys.exit(f"{bad} rounds went wrong; their folders are below {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
