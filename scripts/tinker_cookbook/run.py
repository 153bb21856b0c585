"""Runs recipes of the tinker cookbook, unmodified, against a server of the Tinker API, and says of each whether it learned.

    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-...
    .cache/venv-tinker/bin/python scripts/tinker_cookbook/run.py WORK --recipes sl_loop,math_rl

WORK is what prepare.py made. Each recipe is a process of its own with the command line that a user would type; what is
judged is the metrics.jsonl that it writes itself. WORK/results.json and WORK/results.md keep the newest result of each recipe,
WORK/logs the output. With `--docs PAGE` the table of that page is written, too.

`--kill-every S` needs `--server-command`: the server is killed with SIGKILL S seconds after it answers, and started again, as
long as the recipe runs. The recipe must still end with the right number of steps.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import recipes

BEGIN, END = "<!-- cookbook: begin -->", "<!-- cookbook: end -->"
HEADER = [
    "| recipe | what of it | number | steps | first -> last | s | verdict | with kill -9 |",
    "|---|---|---|---|---|---|---|---|",
]


class Server:
    """The server, when its command was given: started, killed, started again."""

    def __init__(self, url: str, command: str | None, pid_file: Path | None, log: Path):
        self.url, self.command, self.pid_file, self.log = url, command, pid_file, log
        self.process = None
        self.kills = 0
        if command:
            self.start()
        elif not self.answers():
            raise SystemExit(f"TINKER_BASE_URL={url}: no answer at {url}/api/v1/healthz; start the server, or give --server-command")

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def start(self, limit_s: float = 300) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(shlex.split(self.command), stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + limit_s
        while not self.answers():
            # A command that goes into the background ends by itself; its pid file names the server.
            ended = self.process.poll()
            if ended is not None and not (self.pid_file and ended == 0):
                raise SystemExit(f"--server-command ended with {ended} before it answered; see {self.log}")
            if time.monotonic() > deadline:
                raise SystemExit(f"--server-command: no answer at {self.url} within {limit_s:.0f} s; see {self.log}")
            time.sleep(0.2)
        self.since = time.monotonic()

    def pid(self) -> int:
        return int(self.pid_file.read_text()) if self.pid_file else self.process.pid

    def kill(self) -> None:
        os.kill(self.pid(), signal.SIGKILL)
        if not self.pid_file:
            self.process.wait()
        self.kills += 1

    def stop(self) -> None:
        if self.command and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        elif self.command and self.pid_file:
            os.kill(self.pid(), signal.SIGTERM)


def environment(work: Path, url: str) -> dict:
    """What the recipe's process sees: the server's address, and folders below WORK instead of the hub and the home."""
    return os.environ | {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": os.environ.get("TINKER_API_KEY", "tml-local"),
        "TINKER_COOKBOOK_RUNS_DIR": str(work / "runs"),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / ".hf"),
        "TOKENIZERS_PARALLELISM": "false",
        # Folders of WORK such as openai/ are data sets, not Python packages.
        "PYTHONSAFEPATH": "1",
    }


def folder_of(recipe: recipes.Recipe, work: Path) -> Path:
    return work / "runs" / recipe.name if recipe.log_argument else work / "runs"


def checkpoint_of(name: str, kind: str, work: Path) -> str | None:
    """The newest checkpoint of a kind, `sampler` or `state`, that a recipe wrote down."""
    path = folder_of(recipes.BY_NAME[name], work) / "checkpoints.jsonl"
    if not path.exists():
        return None
    records = [json.loads(line) for line in path.read_text().splitlines()]
    paths = [record[f"{kind}_path"] for record in records if record.get(f"{kind}_path")]
    return paths[-1] if paths else None


def command_of(recipe: recipes.Recipe, work: Path) -> list[str]:
    given = list(recipe.arguments)
    for name in recipe.needs():
        for kind in ("sampler", "state"):
            given = [text.replace("{%s:%s}" % (kind, name), checkpoint_of(name, kind, work) or "?") for text in given]
    if recipe.log_argument:
        given.append(f"{recipe.log_argument}=runs/{recipe.name}")
    return [sys.executable, "-m", f"tinker_cookbook.{recipe.module}", *given]


def clear(recipe: recipes.Recipe, work: Path) -> None:
    """Removes what an earlier run left: recipes ask what to do with it."""
    if recipe.log_argument:
        shutil.rmtree(folder_of(recipe, work), ignore_errors=True)
    for curve in recipe.curves:
        shutil.rmtree(folder_of(recipe, work) / curve.folder, ignore_errors=True)
    if recipe.resume:
        record = {"name": "start", "batch": 0, "state_path": checkpoint_of(recipe.resume, "state", work)}
        folder_of(recipe, work).mkdir(parents=True)
        (folder_of(recipe, work) / "checkpoints.jsonl").write_text(json.dumps(record) + "\n")


def run_process(recipe: recipes.Recipe, command: list[str], options, server: Server, log: Path) -> tuple[int | None, float, int]:
    """Exit code (None: over the time limit), seconds, number of kills of the server."""
    env = environment(options.work, options.url)
    for module, *rest in recipe.before:
        with open(log, "ab") as out:
            subprocess.run(
                [sys.executable, "-m", f"tinker_cookbook.{module}", *rest], cwd=options.work, env=env, stdout=out, stderr=out, check=True
            )
    begin, kills = time.monotonic(), server.kills
    limit = recipe.limit_s * options.patience
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command, cwd=options.work, env=env, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True
        )
        try:
            process.stdin.write(recipe.stdin.encode())
            process.stdin.close()
            while (code := process.poll()) is None and time.monotonic() - begin < limit:
                if options.kill_every and time.monotonic() - server.since > options.kill_every:
                    server.kill()
                    server.start()
                time.sleep(0.2)
        finally:
            # Over its time, or this program was told to end.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, time.monotonic() - begin, server.kills - kills


def read_curve(recipe: recipes.Recipe, curve: recipes.Curve, work: Path) -> dict:
    """Values of one number in the order of steps, and what they amount to."""
    path = folder_of(recipe, work) / curve.folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if curve.key in row]
    steps = [row.get("step") for row in rows]
    values = [float(row[curve.key]) for row in rows]
    third = max(1, len(values) // 3)
    early, late = (sum(part) / third if values else None for part in (values[:third], values[-third:]))
    moved = bool(values) and {
        "down": lambda: late < early,
        "up": lambda: late > early,
        "below": lambda: all(abs(value) <= curve.bound for value in values),
        "none": lambda: True,
    }[curve.goal]()
    return {
        "key": curve.key, "folder": curve.folder, "goal": curve.goal, "bound": curve.bound, "values": values, "steps": len(set(steps)),
        "twice": len(steps) - len(set(steps)), "early": early, "late": late, "moved": moved,
    }  # fmt: skip


def judge(recipe: recipes.Recipe, code: int | None, curves: list[dict]) -> str:
    if code is None:
        return "over its time limit"
    if code != 0:
        return f"ended with {code}"
    for curve in curves:
        if curve["steps"] != recipe.steps:
            return f"{curve['steps']} of {recipe.steps} steps"
        if curve["twice"]:
            return f"{curve['twice']} steps twice"
    if not all(curve["moved"] for curve in curves):
        return "ends, did not learn" if all(curve["goal"] != "below" for curve in curves) else "ends, over the bound"
    goals = {curve["goal"] for curve in curves}
    if goals & {"up", "down"}:
        return "learns"
    return "holds" if "below" in goals else "ends"


def run_recipe(recipe: recipes.Recipe, options, server: Server) -> dict:
    log = options.work / "logs" / f"{recipe.name}.log"
    log.unlink(missing_ok=True)
    clear(recipe, options.work)
    command = command_of(recipe, options.work)
    code, seconds, kills = run_process(recipe, command, options, server, log)
    curves = [read_curve(recipe, curve, options.work) for curve in recipe.curves]
    typed = shlex.join(["python", *command[1:]])
    return {
        "name": recipe.name, "command": typed, "code": code, "seconds": round(seconds, 1), "kills": kills, "expected_steps": recipe.steps,
        "curves": curves, "verdict": judge(recipe, code, curves),
    }  # fmt: skip


def in_order(names: list[str], work: Path) -> list[recipes.Recipe]:
    """The recipes, and before each those whose checkpoints it reads and that are not there."""
    order = []

    def add(name: str) -> None:
        recipe = recipes.BY_NAME[name]
        for need in recipe.needs():
            if checkpoint_of(need, "state", work) is None:
                add(need)
        if recipe not in order:
            order.append(recipe)

    # Those that are asked for and teach others come first: their checkpoints are replaced.
    asked = sorted(names, key=lambda name: (bool(recipes.BY_NAME[name].needs()), names.index(name)))
    for name in asked:
        add(name)
    return order


def short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def table(results: dict) -> list[str]:
    """Rows of all recipes; those that were not run yet have no numbers."""
    lines = list(HEADER)
    for recipe in recipes.ALL:
        plain, killed = results.get(recipe.name, {}), results.get(f"{recipe.name} killed", {})
        after = f"{killed['kills']} kills: {killed['verdict']}" if killed.get("kills") else "-"
        curves = plain.get("curves") or [None]
        for i, curve in enumerate(curves):
            name = recipe.name if i == 0 else ""
            part = f", {Path(curve['folder']).name}" if curve and curve["folder"] else ""
            number = f"`{curve['key']}`{part}" if curve else "-"
            steps = f"{curve['steps']}" if curve else "-"
            move = f"{short(curve['values'][0])} -> {short(curve['values'][-1])}" if curve and curve["values"] else "-"
            first = i == 0
            seconds = f"{plain['seconds']:.0f}" if first and "seconds" in plain else ""
            cells = [
                name, recipe.about if first else "", number, steps, move, seconds, plain.get("verdict", "not run") if first else "",
                after if first else "",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def write_page(page: Path, lines: list[str]) -> None:
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(f"--docs {page}: the page has no lines {BEGIN} and {END}")
    head, rest = text.split(BEGIN, 1)
    page.write_text(head + "\n".join([BEGIN, *lines, END]) + rest.split(END, 1)[1], encoding="utf-8")


def store(options, result: dict) -> None:
    path = options.work / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results[result["name"] + (" killed" if options.kill_every else "")] = result
    path.write_text(json.dumps(results, indent=1) + "\n")
    lines = table(results)
    (options.work / "results.md").write_text("\n".join(lines) + "\n")
    if options.docs:
        write_page(options.docs, lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="the folder that prepare.py made")
    parser.add_argument("--recipes", default="all", help="names with commas between them, or all; --list prints them")
    parser.add_argument("--list", action="store_true", help="print each recipe with its command and end")
    parser.add_argument("--url", default=os.environ.get("TINKER_BASE_URL"), help="default: TINKER_BASE_URL")
    parser.add_argument("--server-command", help="starts the server in the foreground, or with --pid-file in the background")
    parser.add_argument("--pid-file", type=Path, help="where the server wrote its process id")
    parser.add_argument("--kill-every", type=float, metavar="S", help="kill -9 the server S seconds after it answers, again and again")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on the time limits, for slow machines")
    parser.add_argument("--docs", type=Path, help="a page whose table is written")
    options = parser.parse_args()
    options.work = options.work.resolve()
    options.url = (options.url or "").rstrip("/")
    names = [recipe.name for recipe in recipes.ALL]
    options.names = names if options.recipes == "all" else options.recipes.split(",")
    unknown = [name for name in options.names if name not in recipes.BY_NAME]
    if unknown:
        raise SystemExit(f"--recipes {unknown[0]}: unknown; allowed: all, {', '.join(names)}")
    if options.kill_every and not options.server_command:
        raise SystemExit("--kill-every needs --server-command, which starts the server again")
    if not options.list and not options.url:
        raise SystemExit("--url or TINKER_BASE_URL names the server, such as http://127.0.0.1:8000")
    if not options.list and not (options.work / "models.json").exists():
        raise SystemExit(f"{options.work} was not made by prepare.py: it has no models.json")
    return options


def main() -> None:
    options = parse()
    if options.list:
        for name in options.names:
            print(f"{name}: " + shlex.join(["python", *command_of(recipes.BY_NAME[name], options.work)[1:]]))
        return
    # A TERM ends the recipe and the server, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (options.work / "logs").mkdir(exist_ok=True)
    server = Server(options.url, options.server_command, options.pid_file, options.work / "logs" / "server.log")
    bad = []
    try:
        for recipe in in_order(options.names, options.work):
            result = run_recipe(recipe, options, server)
            store(options, result)
            print(f"{recipe.name}: {result['verdict']}, {result.get('seconds', 0):.0f} s", flush=True)
            if not result["verdict"].startswith(("learns", "holds", "ends")) or "," in result["verdict"]:
                bad.append(recipe.name)
    finally:
        server.stop()
    if bad:
        raise SystemExit(f"{len(bad)} recipes failed: {', '.join(bad)}; their output is in {options.work / 'logs'}")


if __name__ == "__main__":
    main()
