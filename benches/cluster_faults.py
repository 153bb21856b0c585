"""Faults on a run over several hosts; `benches/faults.py --faults N` starts it, and says how.

The hosts are network namespaces (`scripts/netns_hosts.py`): 0 has the owner, 1 and 2 a rollout worker each, 3 and 4
sandboxes, 5 PostgreSQL with the store, 6 an engine role. This program is the supervisor: it starts again whatever ended.
"""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "scripts"))

import faults  # noqa: E402
import netns_hosts  # noqa: E402

OWNER, WORKERS, SANDBOXES, STORE, ENGINE, COUNT = 0, (1, 2), (3, 4), 5, 6, 7
TOKEN = "a-token-of-the-fault-bench"
#: A column of the tasks: the program that judges what the model wrote, in a sandbox of another host.
CHECK = "import sys; sys.exit(sum(c.isalpha() for c in open('output.txt').read()) < 1)"
RECIPE = """
name = "faults"
seed = 0
reward = "program(check)"
model = {{ type = "scratch", d_model = 32, layers = 2, heads = 2, kv_heads = 1, d_ff = 64 }}

[tasks]
source = "rows.jsonl"
prompt = "{{{{ question }}}}"
held_out = 0.1

[rollout]
tasks_per_step = 4
group_size = 4
max_turns = 1
max_turn_tokens = 4
max_context_tokens = 256
ticket_lease_s = 2.0
ticket_attempts = 100
repair = [{{ type = "retry", times = 5 }}, {{ type = "mask", in_baseline = false }}]

[algorithm]
type = "grpo"

[train]
steps = {steps}
learning_rate = 3e-4
checkpoint_every = 5

[eval]
tasks = 4
{more}
"""
ELSEWHERE = """
[sandbox]
owner = "https://{owner}:9000"

[store]
type = "postgres"
url = "postgres://sinew@{store}/postgres?sslmode=disable"
name = "{name}"
"""


def programs_of_postgres():
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


class Part:
    """A process that the supervisor keeps alive. Its log has what all of its incarnations printed."""

    def __init__(self, cluster, name, host, args):
        self.cluster, self.name, self.host, self.args = cluster, name, host, args
        self.log, self.process, self.started = cluster.folder / f"{name}.log", None, 0.0
        #: Seconds by which its monotonic clock is ahead, and whether it may end by itself.
        self.ahead_s, self.ends = 0, False

    def start(self):
        args = [*map(str, self.args)]
        if self.ahead_s:
            ahead = [f"--{clock}={self.ahead_s}" for clock in ("monotonic", "boottime")]
            args = ["unshare", "--time", *ahead, *args]
        with open(self.log, "ab") as log:
            self.process = self.cluster.hosts.popen(self.host, args, cwd=self.cluster.folder, env=self.cluster.env,
                                                    stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.started = time.monotonic()

    def alive(self):
        return self.process is not None and self.process.poll() is None

    def signal(self, number):
        faults.signal_to(self.process.pid, number)

    def keep(self):
        """Starts it again if it ended."""
        done = self.ends and self.process is not None and self.process.poll() == 0
        if not done and not self.alive() and time.monotonic() - self.started > 0.3:
            self.start()

    def end(self):
        if self.alive():
            self.process.kill()
            self.process.wait()


class Cluster:
    """All hosts and their processes. A thread supervises the processes; `run` is the number of the run."""

    #: Number of hosts; folders that are file systems of their own, with their sizes; whether a run in one process must
    #: end with the same weights.
    count, file_systems, repeats = COUNT, {"owner": 96, "weights-0": 24, "weights-1": 24}, True

    def __init__(self, sinew, folder, steps):
        self.sinew, self.folder, self.steps, self.run = sinew, folder, steps, 0
        self.hosts = netns_hosts.Hosts(self.count, name=f"faults-{os.getpid()}")
        rows = [{"question": str(n), "check": CHECK} for n in range(200)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name, text in (("token", TOKEN), ("sandbox-token", f"faults:{TOKEN}")):
            (folder / name).write_text(text)
            (folder / name).chmod(0o600)
        self.env = {**os.environ, "SINEW_CONTROL_TOKEN": TOKEN, "SINEW_SANDBOX_TOKEN": TOKEN,
                    "SINEW_TLS_CA": str(folder / "tls/ca.pem"), "SINEW_LOG": "info", "SINEW_THREADS": "1"}
        for host in range(self.count):
            subprocess.run([sinew, "tls", folder / "tls", "--host", self.hosts.address(host)], check=True,
                           stdout=subprocess.DEVNULL)
        self.lock, self.ended = threading.RLock(), threading.Event()
        self.parts, self.owner, self.sessions = {}, None, []
        self.owner_codes, self.partition_s = [], (1.0, 6.0)
        for name, mib in self.file_systems.items():
            (folder / name).mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder / name], check=True)
        self.make_parts()

    def tls(self, host):
        stem = self.folder / f"tls/host-{self.hosts.address(host)}"
        return ["--tls-cert", f"{stem}.pem", "--tls-key", f"{stem}.key"]

    def make_parts(self):
        worker = [self.sinew, "worker", "--json", "--owner", f"https://{self.hosts.address(OWNER)}:9000",
                  "--token-file", self.folder / "token"]
        for n, host in enumerate(WORKERS):
            more = ["--role", "rollout", "--slots", "8", "--notice-s", "5", "--weights-dir",
                    self.folder / f"weights-{n}/w"]
            self.add(f"worker-{n}", host, [*worker, *more])
        for n, host in enumerate(SANDBOXES):
            listen = f"{self.hosts.address(host)}:8070"
            more = ["--role", "sandbox", "--listen", listen, "--sandbox-token-file", self.folder / "sandbox-token"]
            self.add(f"sandbox-{n}", host, [*worker, *more, *self.tls(host)])
        more = ["--role", "engine", "--listen", f"{self.hosts.address(ENGINE)}:8080", "--weights-dir",
                self.folder / "weights-engine"]
        self.add("engine", ENGINE, [*worker, *more, *self.tls(ENGINE)])
        self.add("store", STORE, self.postgres())

    def add(self, name, host, args):
        self.parts[name] = Part(self, name, host, args)

    def postgres(self):
        """Makes a cluster of databases that the whole network may use, and gives the command of its server."""
        data, programs = self.folder / "postgres", programs_of_postgres()
        data.mkdir()
        shutil.chown(data, "nobody", "nogroup")
        as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        make = [*as_user, programs / "initdb", "--username=sinew", "--auth=trust", "--encoding=UTF8", "--no-sync",
                "--pgdata", data]
        subprocess.run([*map(str, make)], check=True, stdout=subprocess.DEVNULL, cwd="/")
        with open(data / "pg_hba.conf", "a") as rules:
            rules.write(f"host all all {self.hosts.network}.0/24 trust\n")
        return [*as_user, programs / "postgres", "-D", data, f"-clisten_addresses={self.hosts.address(STORE)}",
                "-cunix_socket_directories=", "-cshared_buffers=16MB", "-crestart_after_crash=off"]

    def name(self):
        return f"run-{self.run}"

    def recipe(self, more):
        path = self.folder / f"{self.name()}.toml"
        path.write_text(RECIPE.format(steps=self.steps, more=more))
        return path

    def run_dir(self):
        return self.folder / "owner" / self.name()

    def start_owner(self):
        run = self.run_dir()
        address = self.hosts.address(OWNER)
        where = ELSEWHERE.format(owner=address, store=self.hosts.address(STORE), name=self.name())
        args = [self.sinew, "train", self.recipe(where), "--json", "--run-dir", run, "--control", f"{address}:9000",
                "--control-token-file", self.folder / "token", *self.tls(OWNER), "--resume"]
        self.owner = faults.Session(self.hosts.command(OWNER, args), self.folder, self.env)
        self.sessions.append(self.owner)

    def close(self, supervisor):
        """Ends all processes, and removes the hosts."""
        self.ended.set()
        if supervisor is not None:
            supervisor.join()
        for session in self.sessions:
            faults.signal_to(session.process.pid)
        for part in self.parts.values():
            part.end()
        self.hosts.close()
        for name in self.file_systems:
            subprocess.run(["umount", "--lazy", self.folder / name], stderr=subprocess.DEVNULL)

    def supervise(self):
        """Starts again what ended, until the bench ends. A run that came to its end is left."""
        while not self.ended.wait(0.1):
            with self.lock:
                for part in self.parts.values():
                    part.keep()
                if self.owner is not None and self.owner.process.poll() is not None and not self.over():
                    self.owner_codes.append(self.owner.process.returncode)
                    self.start_owner()

    def over(self):
        """Whether the run came to its end, and not to that of its session only. One that learned nothing ends with 1."""
        ended = self.owner.process.poll() in (0, 1)
        return ended and any(line.startswith('{"eval":') for line in self.owner.lines[-1:])

    def steps_done(self):
        """Steps of the run with the times at which they were reported, over all sessions of the owner."""
        return [step for session in self.sessions for step in list(session.steps)]

    def status(self):
        """What the owner says of its roles; empty while it does not answer."""
        asked = subprocess.run(self.hosts.command(OWNER, [self.sinew, "status", self.run_dir(), "--json"]),
                               capture_output=True, text=True, env=self.env, cwd=self.folder)
        return asked.stdout if asked.returncode == 0 else ""

    def renew(self):
        """Ends roles that do not end with a run: the next one is to have its own."""
        for name, part in self.parts.items():
            if name != "store":
                part.end()

    def stored(self):
        """Lines `STEP|EPISODES` of all committed steps in the store."""
        return self.sql(f'SELECT step, (record::json)->>\'episodes\' FROM "sinew_store_{self.name()}".batches ORDER BY step')

    def whole(self, last):
        """Whether every episode has one end, as far as the counts of a run that ended do not say it."""
        return True

    def sql(self, text):
        asked = subprocess.run(self.hosts.command(STORE, [programs_of_postgres() / "psql", "-At", "-U", "sinew", "-h",
                               self.hosts.address(STORE), "postgres", "-c", text]), capture_output=True, text=True)
        return asked.stdout.splitlines()

    def marks(self):
        """Ends of all logs now, to read what comes later."""
        ends = {name: part.log.stat().st_size for name, part in self.parts.items() if part.log.exists()}
        return ends, len(self.sessions), len(self.owner.errors)

    def said_since(self, marks):
        """What all processes printed since: by the name of the process."""
        ends, sessions, errors = marks
        said = {}
        for name, part in self.parts.items():
            if part.log.exists():
                with open(part.log, "rb") as log:
                    log.seek(ends.get(name, 0))
                    said[name] = log.read().decode(errors="replace")
        own = self.sessions[sessions - 1].errors[errors:] if sessions else []
        said["owner"] = "".join(own + [line for session in self.sessions[sessions:] for line in session.errors])
        return said


QUEUE_RECIPE = """
name = "queued"
seed = 1
reward = "regex(\\"[a-z]\\")"
model = {{ type = "scratch", d_model = 32, layers = 2, heads = 2, kv_heads = 1, d_ff = 64 }}
env = {{ type = "python", module = "world.py:World" }}

[rollout]
tasks_per_step = 4
group_size = 4
max_in_flight = 16
max_turns = 4
max_turn_tokens = 3
max_context_tokens = 256

[algorithm]
type = "grpo"
correction = {{ type = "truncate", low = 0.0, high = 2.0 }}

[data]
type = "queue"
queue = "https://{queue}:8090"
token_file = "token"
wait_s = 60
lease_s = 10

[train]
steps = {steps}
learning_rate = 3e-4
checkpoint_every = 5

[eval]
tasks = 4
"""


class QueueCluster(Cluster):
    """Hosts of a run that trains from a queue: 0 trains, 1 collects episodes, 2 scores them, 3 serves the queue."""

    count, file_systems, repeats = 4, {"owner": 96, "queue-store": 96}, False

    def make_parts(self):
        """They are made anew for each run, which has its own queue."""
        # Turns that take long keep the producer at work until the end of the run.
        (self.folder / "world.py").write_text(faults.WORLD.replace("0.02", "0.3"))
        self.parts = {}

    def queue(self):
        return f"https://{self.hosts.address(3)}:8090"

    def renew(self):
        for part in self.parts.values():
            part.end()
        recipe = self.folder / f"{self.name()}.toml"
        recipe.write_text(QUEUE_RECIPE.format(steps=self.steps, queue=self.hosts.address(3)))
        token = ["--token-file", self.folder / "token"]
        shutil.rmtree(self.folder / f"queue-store/run-{self.run - 1}", ignore_errors=True)
        self.add("queue", 3, [self.sinew, "queue", "serve", "--listen", f"{self.hosts.address(3)}:8090", *token, "--store",
                              self.folder / "queue-store" / self.name(), *self.tls(3)])
        self.add("collector", 1, [self.sinew, "collect", recipe, "--json", "--score-apart", "--episodes", self.episodes(),
                                  "--resume", "--run-dir", self.folder / f"collected-{self.run}"])
        self.parts["collector"].ends = True
        self.add("scorer", 2, [self.sinew, "queue", "score", recipe, "--json", "--rows", "8", "--lease-s", "2"])

    def episodes(self):
        # A few more than the steps take: groups that lost a member are left.
        return 16 * (self.steps + 6)

    def start_owner(self):
        args = [self.sinew, "train", self.folder / f"{self.name()}.toml", "--json", "--run-dir", self.run_dir(), "--resume"]
        self.owner = faults.Session(self.hosts.command(0, args), self.folder, self.env)
        self.sessions.append(self.owner)

    def status(self):
        return ""

    def stored(self):
        return []

    def whole(self, last):
        """Every row was trained, was dropped, or is still in the queue."""
        asked = subprocess.run(self.hosts.command(0, [self.sinew, "queue", "stats", self.queue(), "--json", "--token-file",
                               self.folder / "token"]), capture_output=True, text=True, env=self.env)
        stats = json.loads(asked.stdout)
        mine = next((c for c in stats["consumers"] if c["name"] == "trainer"), {})
        open_rows = sum(mine.get(state, 0) for state in ("ready", "leased", "waiting", "dead"))
        known = last["samples"]["trained"] + last["samples"]["dropped"] + open_rows
        print(json.dumps({"rows": stats["rows"], "trainer": mine, "samples": last["samples"]}), file=sys.stderr)
        return known == stats["rows"] + stats.get("done", 0) or mine.get("acked", 0) + open_rows == self.episodes()


class Kind:
    """A kind of fault: what it does, and words of which one must be in a message of the run's processes."""

    def __init__(self, strike, *words, share=1.0):
        self.strike, self.words, self.share = strike, words, share


def kill_part(pattern, number=signal.SIGKILL):
    def strike(cluster, dice):
        name = dice.choice([name for name in cluster.parts if name.startswith(pattern)])
        cluster.parts[name].signal(number)
        return name
    return strike


def end_owner(number):
    def strike(cluster, dice):
        faults.signal_to(cluster.owner.process.pid, number)
        return "owner"
    return strike


def kill_inside(cluster, dice):
    """A process of a sandbox host other than its server: the spawner, or what it started."""
    name = dice.choice([name for name in cluster.parts if name.startswith("sandbox")])
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if inside := faults.below(cluster.parts[name].process.pid):
            faults.signal_to(dice.choice(inside))
            return name
        time.sleep(0.01)
    return "none was there"


def part_hosts(choose):
    def strike(cluster, dice):
        a, b = choose(dice)
        seconds = round(dice.uniform(*cluster.partition_s), 1)
        cluster.hosts.partition(a, b)
        time.sleep(seconds)
        cluster.hosts.heal(a, b)
        return f"hosts {a} and {b}, {seconds} s"
    return strike


def unplug(cluster, dice):
    host, seconds = dice.choice(WORKERS + SANDBOXES + (STORE,)), round(dice.uniform(*cluster.partition_s), 1)
    cluster.hosts.cut(host)
    time.sleep(seconds)
    cluster.hosts.join(host)
    return f"host {host}, {seconds} s"


def delay(cluster, dice):
    host, ms, seconds = dice.randrange(ENGINE), dice.choice([20, 100, 300]), round(dice.uniform(2, 6), 1)
    with cluster.hosts.delay(host, ms) as way:
        time.sleep(seconds)
    return f"host {host}, {ms} ms for {seconds} s by {way}"


def fill(folder, dice, seconds):
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    time.sleep(seconds)
    filler.unlink()


def fill_owner(cluster, dice):
    seconds = round(dice.uniform(0.5, 4), 1)
    fill(cluster.folder / "owner", dice, seconds)
    return f"folder of the run, {seconds} s"


def fill_worker(cluster, dice):
    n, seconds = dice.choice((0, 1)), round(dice.uniform(0.5, 4), 1)
    fill(cluster.folder / f"weights-{n}", dice, seconds)
    return f"folder of weights of worker {n}, {seconds} s"


def jump(cluster, dice):
    """A process starts again with a monotonic clock that is days ahead: in a time namespace."""
    name = dice.choice([name for name in cluster.parts if name.startswith(("worker", "sandbox", "store"))])
    part = cluster.parts[name]
    part.ahead_s = 86400 * dice.randrange(1, 100)
    part.signal(signal.SIGKILL)
    return f"{name}, {part.ahead_s // 86400} days"


def freeze(cluster, dice):
    """A worker stands still for longer than its leases, and continues as if nothing had been."""
    name = dice.choice([name for name in cluster.parts if name.startswith("worker")])
    part, seconds = cluster.parts[name], round(dice.uniform(2.5, 5), 1)
    part.signal(signal.SIGSTOP)
    time.sleep(seconds)
    part.signal(signal.SIGCONT)
    return f"{name}, {seconds} s"


SILENT = ("does not answer", "is silent", "not heard of", "was not renewed", "were not renewed")
DATABASE = ("database does not answer", "postgres", "PostgreSQL")
SANDBOX = ("sandbox server", "sandbox host", "sandbox:", "its sandbox")
KINDS = {
    "worker-kill": Kind(kill_part("worker"), *SILENT, share=2),
    "worker-term": Kind(kill_part("worker", signal.SIGTERM), "asked to end"),
    "worker-freeze": Kind(freeze, *SILENT),
    "owner-kill": Kind(end_owner(signal.SIGKILL), "another owner continues", "the run continues with a new owner", share=2),
    "owner-term": Kind(end_owner(signal.SIGTERM), "interrupted"),
    "sandbox-kill": Kind(kill_part("sandbox"), *SANDBOX, *SILENT),
    "sandbox-inside": Kind(kill_inside, *SANDBOX, "spawner"),
    "engine-kill": Kind(kill_part("engine"), *SILENT),
    "store-kill": Kind(kill_part("store"), *DATABASE),
    "store-restart": Kind(kill_part("store", signal.SIGINT), *DATABASE),
    "part-owner-worker": Kind(part_hosts(lambda dice: (OWNER, dice.choice(WORKERS))), *SILENT, share=2),
    "part-worker-sandbox": Kind(part_hosts(lambda dice: (dice.choice(WORKERS), dice.choice(SANDBOXES))), *SANDBOX),
    "part-owner-store": Kind(part_hosts(lambda dice: (OWNER, STORE)), *DATABASE),
    "unplug": Kind(unplug, *SILENT, *SANDBOX, *DATABASE),
    "delay": Kind(delay),
    "disk-owner": Kind(fill_owner, "no space left", "no room", "MiB free"),
    "disk-worker": Kind(fill_worker, "no space left", "no room", "MiB free"),
    "clock": Kind(jump, *SILENT, *SANDBOX, *DATABASE),
}
QUEUE = ("queue does not answer",)
QUEUE_KINDS = {
    "queue-kill": Kind(kill_part("queue"), *QUEUE, share=2),
    "queue-term": Kind(kill_part("queue", signal.SIGTERM), *QUEUE),
    "scorer-kill": Kind(kill_part("scorer")),
    "collector-kill": Kind(kill_part("collector")),
    "owner-kill": Kind(end_owner(signal.SIGKILL)),
    "owner-term": Kind(end_owner(signal.SIGTERM), "interrupted"),
    "part-owner-queue": Kind(part_hosts(lambda dice: (0, 3)), *QUEUE),
    "part-scorer-queue": Kind(part_hosts(lambda dice: (2, 3))),
    "part-collector-queue": Kind(part_hosts(lambda dice: (1, 3))),
}
#: Longest time from a fault to the next step; and from a fault to a message about it, since a registration ends after 30 s.
HANG_S, NAME_S = 180.0, 40.0


def wait_for(wanted, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if wanted():
            return True
        time.sleep(0.02)
    return wanted()


def kinds_of(over):
    return QUEUE_KINDS if over == "queue" else KINDS


class Bench:
    """A run after the other on one cluster, and faults to them."""

    def __init__(self, cluster, args):
        self.cluster, self.args, self.rows, self.runs = cluster, args, [], []
        cluster.partition_s = tuple(args.partition_s)
        self.kinds = kinds_of(args.over)

    def alone(self):
        """The run in one process on one host: what all runs must end with."""
        if not self.cluster.repeats:
            return
        run = self.cluster.folder / "alone"
        args = [self.cluster.sinew, "train", self.cluster.recipe(""), "--json", "--run-dir", run]
        session = faults.Session(args, self.cluster.folder, self.cluster.env)
        if session.wait() != 0:
            raise SystemExit(f"the run without a fault failed: {session.said()}")
        self.expected, self.last = faults.weights(run), json.loads(session.lines[-1])

    def begin(self):
        with self.cluster.lock:
            self.cluster.run += 1
            self.cluster.renew()
            self.cluster.sessions, self.cluster.owner_codes = [], []
            self.cluster.start_owner()

    def strike(self, number):
        """One fault to the run that works, and what came of it."""
        cluster = self.cluster
        dice = random.Random(f"{self.args.seed} {number}")
        names = self.args.kinds.split(",")
        name = dice.choices(names, [self.kinds[name].share for name in names])[0]
        time.sleep(dice.uniform(0.0, 1.5))
        ids = self.ids(self.page())
        marks, begun, reached = cluster.marks(), time.monotonic(), self.reached()
        what = self.kinds[name].strike(cluster, dice)
        row = {"fault": number, "kind": name, "what": what, "run": cluster.run, "step": reached}
        later = lambda: [at for step, at in cluster.steps_done() if step > reached and at > begun]
        struck_s = round(time.monotonic() - begun, 2)
        hangs = not wait_for(lambda: later() or cluster.over(), HANG_S)
        # The first step after the fault began may have been done before it took effect: the next one is sure.
        sure = lambda: [at for at in later() if at > begun + struck_s] or cluster.over()
        hangs = hangs or not wait_for(sure, HANG_S)
        done = sure()
        row.update(hangs=hangs, fault_s=struck_s,
                   next_step_s=round((done[0] if isinstance(done, list) else time.monotonic()) - begun, 2))
        row["orphans"] = self.orphans()
        row["steps_ok"] = self.steps_ok()
        row["marks"], row["at"], row["ids"] = marks, begun, ids.get(what.split(",")[0], [])
        self.rows.append(row)
        return row

    def reached(self):
        return max((step for step, _ in self.cluster.steps_done()), default=0)

    def steps_ok(self):
        """Whether the records and the store have each step once, and the store no episode twice."""
        lines = (self.cluster.run_dir() / "metrics.jsonl").read_text().splitlines()
        steps = []
        for line in lines:
            try:
                steps.append(json.loads(line)["step"])
            except (ValueError, KeyError):
                # The last one may be at work.
                continue
        stored = [line.split("|", 1) for line in self.cluster.stored()]
        numbers = [int(step) for step, _ in stored]
        episodes = [e for _, several in stored for e in json.loads(several)]
        once = numbers == list(range(1, len(numbers) + 1)) and len(set(episodes)) == len(episodes)
        return once and steps == list(range(1, len(steps) + 1))

    def orphans(self):
        """Processes that lost their parent and stay; they are ended."""
        def left():
            with self.cluster.lock:
                own = {part.process.pid for part in self.cluster.parts.values()}
                own |= {session.process.pid for session in self.cluster.sessions}
                there = [(pid, faults.stat(pid)) for pid in faults.below(os.getpid()) if pid not in own]
                return [(pid, seen[1]) for pid, seen in there if seen and seen[0] == os.getpid()]

        def none_left():
            for pid, state in left():
                if state == "Z":
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
            return not left()

        wait_for(none_left, faults.GONE_S)
        found = [pid for pid, _ in left()]
        for pid in found:
            print(f"left behind: {faults.words(pid)}", file=sys.stderr)
            faults.signal_to(pid)
        return len(found)

    def page(self):
        """What the owner says of its roles."""
        return json.loads(self.cluster.status() or "{}") if self.cluster.owner.process.poll() is None else {}

    def ids(self, page):
        """Names that the owner gave to each part."""
        found = {}
        for name, part in self.cluster.parts.items():
            address = self.cluster.hosts.address(part.host)
            found[name] = [role["id"] for role in page.get("roles", []) if address in (role["registration"]["address"] or "")]
            if name.startswith("worker") and part.log.exists():
                found[name] += re.findall(r'"worker":.*?"name":"([^"]+)"', part.log.read_text(errors="replace"))[-1:]
        return found

    def name(self, row, events, last):
        """Looks for words about a fault. Events of the registry about the part that was struck count as well."""
        if row.get("named") or "marks" not in row:
            return
        events = [event["cause"] for event in events if event["cause"] and event["id"] in row["ids"]]
        said = self.cluster.said_since(row["marks"])
        said.pop("store", None)
        text = "\n".join([*said.values(), *events])
        words = self.kinds[row["kind"]].words
        found = [word for word in words if word.lower() in text.lower()]
        row["named"] = bool(found) or not words
        if row["named"] or last:
            brief = lambda text: "\n".join(line for line in text.splitlines() if not line.startswith('{"episodes"'))
            row["said"] = {who: brief(text)[-800:] for who, text in said.items() if brief(text)}
            row.pop("marks")

    def end(self):
        """Waits for the end of the run, and compares it with the one of one process."""
        cluster = self.cluster
        ended = wait_for(cluster.over, HANG_S)
        last = json.loads(cluster.owner.lines[-1]) if ended else {"samples": {}}
        told = [json.loads(line) for line in (cluster.run_dir() / "metrics.jsonl").read_text().splitlines()]
        again = sum(step["retried"] for step in told)
        out = sum(step["rollout"]["failed"] + step["samples"]["unscored"]["count"] for step in told)
        why = [step.get("failed_cause") or step["samples"]["unscored"].get("first") for step in told]
        same = not cluster.repeats or ended and faults.weights(cluster.run_dir()) == self.expected
        row = {"run": cluster.run, "ended": ended, "owner_codes": cluster.owner_codes, "run_again": again, "left_out": out,
               "lost": last["samples"].get("lost"), "trained_twice": last["samples"].get("trained_twice"),
               "equal": same, "why_left_out": [text for text in why if text], "steps_ok": self.steps_ok(), "steps": len(told)}
        row["whole"] = ended and cluster.whole(last)
        counts = (row["lost"], row["trained_twice"]) == (0, 0) and row["steps_ok"] and row["whole"]
        # What an episode says when it is run again is drawn anew, and what was left out trains nothing.
        row["ok"] = counts and (same or again + out > 0)
        self.runs.append(row)
        if row["ok"]:
            shutil.rmtree(cluster.run_dir())
        elif not ended:
            faults.signal_to(cluster.owner.process.pid)
        return row


def table_of(rows):
    found = []
    for kind in sorted({row["kind"] for row in rows}):
        own = [row for row in rows if row["kind"] == kind]
        seconds = sorted(row["next_step_s"] for row in own)
        found.append({"kind": kind, "faults": len(own), "steps lost or doubled": sum(not row["steps_ok"] for row in own),
                      "hung": sum(row["hangs"] for row in own), "orphans": sum(row["orphans"] for row in own),
                      "not named": sum(not row["named"] for row in own),
                      "next step, median s": round(seconds[len(seconds) // 2], 1), "longest s": round(seconds[-1], 1)})
    return found


def show(table):
    keys = list(table[0])
    print("| " + " | ".join(keys) + " |\n|" + "---|" * len(keys))
    for row in table:
        print("| " + " | ".join(str(row[key]) for key in keys) + " |")


def faults_to_runs(bench, say):
    """All faults, a run after the other; each run has some steps after its last fault."""
    args, number = bench.args, 0
    while number < args.faults:
        bench.begin()
        if not wait_for(lambda: bench.reached() > 0, HANG_S):
            say({"run": bench.cluster.run, "no step came": bench.cluster.owner.said()[-2000:]})
        while number < args.faults and not bench.cluster.over() and bench.reached() < args.steps - 6:
            row = bench.strike(number)
            number += 1
            events = bench.page().get("events", [])
            for earlier in bench.rows[-12:]:
                due = time.monotonic() - earlier["at"] > NAME_S
                bench.name(earlier, events, last=due)
            say({key: value for key, value in row.items() if key not in ("marks", "said", "at", "ids")})
            if row["hangs"]:
                break
        ended = bench.end()
        for row in bench.rows:
            if row["run"] == bench.cluster.run and "marks" in row:
                bench.name(row, [], last=True)
        say(ended)


def missing():
    """Why this machine cannot do it; None if it can."""
    if not programs_of_postgres():
        return "PostgreSQL is not installed (Debian: postgresql)"
    return netns_hosts.refusal()


def run(args, folder):
    """Runs the bench; whether all faults were borne."""
    if why := missing():
        print(f"cluster faults: {why}", file=sys.stderr)
        sys.exit(3)
    say = (lambda row: print(json.dumps(row), flush=True)) if args.json else (lambda row: print(row, file=sys.stderr))
    kind = QueueCluster if args.over == "queue" else Cluster
    cluster, supervisor = kind(args.sinew.resolve(), folder, args.steps), None
    try:
        bench = Bench(cluster, args)
        bench.alone()
        supervisor = threading.Thread(target=cluster.supervise)
        supervisor.start()
        faults_to_runs(bench, say)
    finally:
        cluster.close(supervisor)
    table = table_of(bench.rows)
    for row in bench.rows:
        if args.json or not row["named"]:
            say({key: value for key, value in row.items() if key != "marks"})
    if args.json:
        print("\n".join(json.dumps(row) for row in table))
    else:
        show(table)
    return all(row["ok"] for row in bench.runs) and all(
        row["steps_ok"] and row["named"] and not row["hangs"] and not row["orphans"] for row in bench.rows)
