"""The gain of reinforcement learning, on held-out tasks, with intervals, and what it costs elsewhere.

For each domain and seed a small language model imitates gold runs (SFT), then learns from its own episodes (RL); in `mathematics` and
`reasoning` it only learns from its own. Held-out tasks are measured before, between and after, greedily and sampled. The difference that
RL makes is paired by task; the interval of all seeds is the widest of three, clustered by task, by type of task and by seed. A matrix
shows what a model of one domain does in the others. Needs Linux, Python 3.11, a `sinew` program and the model's package; `harbor` also
the tasks of scripts/harbor_tasks.py, and `reasoning` the Python with its package first in PATH (docs/tasks.md):

    python3 scripts/harbor_tasks.py --out .cache/harbor-two-steps --families two-steps
    python3 benches/gain.py target/release/sinew --out runs/gain
    python3 benches/gain.py target/release/sinew --out runs/gain --domains harbor --seeds 0 --rl train.steps=20 --no-matrix

What is measured stands in the folder; the same command continues after an interruption, and adds seeds and domains. Prints tables; with
--json one object. Exit code 1 if a domain misses the goal: RL adds --goal points or more, with the interval above 0, and no model loses
more than --loss points in another domain.
"""

import argparse
import collections
import json
import math
import pathlib
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: Recipes of a domain: a chain whose first stage imitates and whose last one learns, one recipe for each, or one without imitation.
DOMAINS = {
    "harbor": ["recipes/harbor-sft.toml", "recipes/harbor-rl.toml"],
    "mathematics": ["recipes/quickstart.toml"],
    "reasoning": ["recipes/reasoning.toml"],
    "tabletop": ["recipes/worlds/words/tabletop.toml"],
    "bargain": ["recipes/worlds/words/bargain.toml"],
}
#: Types of tasks from which on they are taken for a sample of all types, so that they are clusters.
FEWEST_TYPES = 8
#: Seconds of one command at most.
COMMAND_S = 24 * 3600
#: Episodes of one page of `sinew episodes`.
PAGE = 10_000
#: Ways in which held-out tasks are played, with their purposes: before and after a run, and of `sinew eval`.
WAYS = {
    "sampled": {"before": "eval-before", "after": "eval-after", "eval": "eval"},
    "greedy": {"before": "greedy-before", "after": "greedy-after", "eval": "greedy"},
}


# Statistics

def student(df):
    """The quantile 0.975 of Student's distribution, by integration and bisection."""
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)

    def below(t, steps=2000):
        width = t / steps
        heights = (scale * (1 + (i * width) ** 2 / df) ** (-(df + 1) / 2) for i in range(steps + 1))
        weights = (1 if i in (0, steps) else 4 if i % 2 else 2 for i in range(steps + 1))
        return 0.5 + width / 3 * sum(h * w for h, w in zip(heights, weights))

    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < 0.975 else (low, middle)
    return high


def interval(values):
    """Mean and 95 % interval of independent values; no interval for a single one, or if all are alike."""
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values)
    if len(values) < 2 or variance == 0:
        return {"clusters": len(values), "mean": mean, "low": None, "high": None}
    half = student(len(values) - 1) * math.sqrt(variance / (len(values) * (len(values) - 1)))
    return {"clusters": len(values), "mean": mean, "low": mean - half, "high": mean + half}


def clustered(differences, key):
    """The interval over clusters. Each cluster weighs as much as the tasks that it has, and its error is that of
    a ratio of sums (Cochran 1977, section 6.3)."""
    groups = collections.defaultdict(list)
    for difference in differences:
        groups[key(difference)].append(difference["value"])
    total = sum(map(len, groups.values()))
    mean, count = sum(map(sum, groups.values())) / total, len(groups)
    errors = [sum(values) - mean * len(values) for values in groups.values()]
    variance = sum(e * e for e in errors)
    if count < 2 or variance == 0:
        return {"clusters": count, "mean": mean, "low": None, "high": None}
    half = student(count - 1) * math.sqrt(variance * count / (count - 1)) / total
    return {"clusters": count, "mean": mean, "low": mean - half, "high": mean + half}


def pooled(differences):
    """The gain over all seeds, with the widest of its intervals."""
    found = {
        "task": clustered(differences, lambda d: d["task"]),
        "type": clustered(differences, lambda d: d["kind"]),
        "seed": clustered(differences, lambda d: d["seed"]),
    }
    enough = {"task": 2, "type": FEWEST_TYPES, "seed": 2}
    usable = {name: one for name, one in found.items() if one["low"] is not None and one["clusters"] >= enough[name]}
    if not usable:
        return {"difference": found["task"]["mean"], "low": None, "high": None, "by": None, "intervals": found}
    name, widest = max(usable.items(), key=lambda item: item[1]["high"] - item[1]["low"])
    return {"difference": widest["mean"], "low": widest["low"], "high": widest["high"], "by": name, "intervals": found}


def paired(seed, first, second):
    """Differences of success, second minus first, for each task that both have."""
    return [
        {"seed": seed, "task": task, "kind": kind, "value": mean(second[task, kind]) - mean(values)}
        for (task, kind), values in first.items() if (task, kind) in second
    ]


def mean(values):
    return sum(values) / len(values)


# Recipes

def toml(value):
    """A value as TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def recipe_text(recipe):
    """A recipe as TOML: tables on one line, stages below."""
    stages = recipe.get("stage", [])
    lines = [f"{json.dumps(k)} = {toml(v)}" for k, v in recipe.items() if k != "stage"]
    for stage in stages:
        lines += ["", "[[stage]]", *(f"{json.dumps(k)} = {toml(v)}" for k, v in stage.items())]
    return "\n".join(lines) + "\n"


def put(table, key, value):
    """Sets a key such as `train.steps`; a table that is a text, such as a model, is replaced."""
    *path, last = key.split(".")
    for name in path:
        if not isinstance(table.get(name), dict):
            table[name] = {}
        table = table[name]
    table[last] = value


def setting(text):
    """`key=value` with a value of TOML."""
    key, sign, value = text.partition("=")
    try:
        if not sign:
            raise tomllib.TOMLDecodeError
        return key, tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        raise argparse.ArgumentTypeError(f"{text!r}: KEY=VALUE with a value of TOML, such as train.steps=20") from None


class Domain:
    """One domain: its recipes with the settings of this measurement, and its folders."""

    def __init__(self, name, args):
        self.name, self.args, self.folder = name, args, args.out / name
        self.recipes = [tomllib.loads((ROOT / path).read_text(encoding="utf-8")) for path in DOMAINS[name]]
        self.chain = "stage" in self.recipes[0]
        stages = self.recipes[0]["stage"] if self.chain else self.recipes
        #: False: the model learns from its own episodes only.
        self.imitates = len(stages) > 1
        for where, changes in (("all", args.all), ("sft", args.sft), ("rl", args.rl)):
            for key, value in changes:
                for part in {"all": self.recipes, "sft": stages[:-1], "rl": stages[-1:]}[where]:
                    put(part, key, value)
        self.base = self.recipes[0]["model"]
        self.names = [stages[0]["name"], stages[-1]["name"]] if self.chain else ["sft", "rl"][-len(stages) :]

    def place(self, seed, stage=None):
        """The folder of a seed, or of one of its stages: 0 the first, -1 the last."""
        folder = self.folder / f"seed-{seed}"
        return folder if stage is None else folder / self.names[stage]

    def written(self, recipe, name):
        """The path of a recipe that is run."""
        path = self.folder / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recipe_text(recipe), encoding="utf-8")
        return path

    def train(self, seed):
        """All stages of a seed, or what is left of them."""
        if self.chain:
            self.run("train", self.written(self.recipes[0], "chain"), self.place(seed), seed)
            return
        recipe = self.recipes[-1]
        if self.imitates:
            self.run("train", self.written(self.recipes[0], "sft"), self.place(seed, 0), seed)
            recipe = {**recipe, "model": f"run:{self.place(seed, 0)}"}
        self.run("train", self.written(recipe, f"rl-{seed}"), self.place(seed, -1), seed)

    def evaluate(self, seed, model, folder):
        """Measures a model on the held-out tasks of this domain."""
        # The matrix shows sampled success only.
        measure = {**self.recipes[-1].get("eval", {}), "greedy": False}
        recipe = {**self.recipes[-1], "model": self.base, "eval": measure}
        self.run("eval", self.written(recipe, "eval"), folder, seed, ["--model", model])

    def run(self, command, recipe, folder, seed, more=()):
        """A command with a folder, unless it has ended there already."""
        done = folder / "gain-done"
        if done.is_file():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        words = [self.args.sinew, command, recipe, "--run-dir", folder, "--seed", seed, "--json", "--resume", *more]
        # A run that collapsed ends with 1 and is measured all the same.
        said(words, allowed=(0, 1) if command == "train" else (0,))
        if command == "train":
            for stage in self.names if self.chain else [""]:
                measured(folder / stage, "after")
        done.write_text("")


def said(command, allowed=(0,)):
    """What a command prints, line by line. It is shown if it fails."""
    words = [str(word) for word in command]
    print(f"gain: {' '.join(words)}", file=sys.stderr)
    ran = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, timeout=COMMAND_S, text=True)
    if ran.returncode not in allowed:
        raise SystemExit(f"{' '.join(words)} ended with {ran.returncode}\n{ran.stdout[-2000:]}")
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


# Measurements

def successes(args, folder, way, when="after"):
    """Success of held-out episodes by task and type. The last attempt of a draw counts; an episode without a score does not."""
    purpose = WAYS[way][when]
    draws, after = {}, []
    while True:
        command = [args.sinew, "episodes", folder, "--purpose", purpose, "--json", "--limit", PAGE]
        page = said([*command, *after])
        draws.update({row["draw"]: row for row in page})
        if len(page) < PAGE:
            break
        after = ["--after", page[-1]["cursor"]]
    found = collections.defaultdict(list)
    for row in draws.values():
        if not row["unscored"] and row["end"].lower() != "failed":
            found[row["task"], row["task_kind"]].append(float(row["success"]))
    return dict(found)


def measured(folder, when):
    """Sampled and greedy success of a run's measurement."""
    file = folder / "evals.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    found = [line["stats"] for line in lines if line["when"] == when]
    if not found:
        raise SystemExit(f"{file} has no measurement {when!r}: the run did not come to its end")
    stats = found[-1]
    return {"sampled": stats["success"], "greedy": stats.get("greedy_success")}


def equal_share(folder):
    """Share of the training episodes that were in groups of equal rewards."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    episodes = sum(step["rollout"]["episodes"] for step in steps)
    return sum(step["samples"]["equal"]["count"] for step in steps) / episodes if episodes else None


def of_seed(domain, seed):
    """The numbers of one seed, and its differences by task."""
    args, (first, rl) = domain.args, (domain.place(seed, 0), domain.place(seed, -1))
    when = "after" if domain.imitates else "before"
    tasks = {way: paired(seed, successes(args, first, way, when), successes(args, rl, way)) for way in WAYS}
    tasks = {way: pairs for way, pairs in tasks.items() if pairs}
    found = {
        "seed": seed, "base": measured(first, "before"), "sft": measured(first, "after") if domain.imitates else None,
        "rl": measured(rl, "after"), "gain": {way: pooled(pairs) for way, pairs in tasks.items()}, "equal_share": equal_share(rl),
    }
    return found, tasks


def of_domain(domain, seeds):
    """All seeds of a domain."""
    rows, differences = [], collections.defaultdict(list)
    for seed in seeds:
        domain.train(seed)
        row, tasks = of_seed(domain, seed)
        rows.append(row)
        for way, values in tasks.items():
            differences[way] += values
    gain = {way: pooled(values) for way, values in differences.items() if values}
    first = gain.get("sampled")
    enough = first is not None and first["low"] is not None and first["low"] > 0
    enough = enough and first["difference"] >= domain.args.goal / 100
    return {"domain": domain.name, "seeds": rows, "gain": gain, "reached": enough}


def matrix(domains, seeds):
    """What the models of each domain do in every other one, sampled: against the untrained model, and against imitation."""
    rows = []
    for there in domains:
        for seed in seeds:
            base = there.args.out / "matrix" / f"base-on-{there.name}" / f"seed-{seed}"
            there.evaluate(seed, there.base, base)
            before = successes(there.args, base, "sampled", "eval")
            for here in domains:
                if here.name == there.name or here.base != there.base:
                    continue
                after = {}
                for stage, name in ((0, "sft"), (-1, "rl"))[not here.imitates :]:
                    folder = there.args.out / "matrix" / f"{here.name}-{name}-on-{there.name}" / f"seed-{seed}"
                    there.evaluate(seed, here.place(seed, stage), folder)
                    after[name] = successes(there.args, folder, "sampled", "eval")
                for against, first in (("base", before), ("sft", after.get("sft"))):
                    pairs = paired(seed, first, after["rl"]) if first else []
                    rows.append({"trained_on": here.name, "measured_on": there.name, "against": against, "pairs": pairs})
    joined = collections.defaultdict(list)
    for row in rows:
        joined[row["trained_on"], row["measured_on"], row["against"]] += row["pairs"]
    names = ("trained_on", "measured_on", "against")
    return [{**dict(zip(names, key)), **pooled(pairs)} for key, pairs in joined.items() if pairs]


# The end

def percent(value):
    return "-" if value is None else f"{100 * value:.1f}"


def points(found):
    """A difference with its interval, in points."""
    if found is None:
        return "-"
    if found.get("low") is None:
        return f"{100 * found['difference']:+.1f}"
    return f"{100 * found['difference']:+.1f} [{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"


def show(results, crossed):
    """Tables of all domains, and of the matrix."""
    print("| domain | seed | sampled: base, SFT, RL | greedy: base, SFT, RL | RL adds, sampled | RL adds, greedy | equal groups |")
    print("|---|---|---|---|---|---|---|")
    for result in results:
        for row in result["seeds"]:
            three = {way: ", ".join(percent((row[at] or {}).get(way)) for at in ("base", "sft", "rl")) for way in WAYS}
            gains = " | ".join(points(row["gain"].get(way)) for way in WAYS)
            print(f"| {result['domain']} | {row['seed']} | {three['sampled']} | {three['greedy']} | {gains} | {percent(row['equal_share'])} % |")
        gains = " | ".join(points(result["gain"].get(way)) for way in WAYS)
        print(f"| {result['domain']} | all | | | {gains} | {'reached' if result['reached'] else 'missed'} |")
    if crossed:
        print("\n| trained on | measured on | RL - base | RL - SFT |\n|---|---|---|---|")
        cells = {(c["trained_on"], c["measured_on"], c["against"]): c for c in crossed}
        for here, there in dict.fromkeys((c["trained_on"], c["measured_on"]) for c in crossed):
            columns = " | ".join(points(cells.get((here, there, against))) for against in ("base", "sft"))
            print(f"| {here} | {there} | {columns} |")


def parsed():
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sinew", type=pathlib.Path)
    parser.add_argument("--out", type=lambda text: pathlib.Path(text).resolve(), default=ROOT / "runs/gain")
    parser.add_argument("--domains", type=lambda text: text.split(","), default=list(DOMAINS), help=f"of {', '.join(DOMAINS)}")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[0, 1, 2, 3, 4])
    parser.add_argument("--matrix-seeds", type=int, default=1, help="seeds of the matrix, the first ones (1)")
    parser.add_argument("--no-matrix", action="store_true", help="leave out what models do in other domains")
    parser.add_argument("--goal", type=float, default=10.0, help="points that RL must add (10)")
    parser.add_argument("--loss", type=float, default=2.0, help="points that it may cost in another domain (2)")
    for name in ("all", "sft", "rl"):
        parser.add_argument(f"--{name}", type=setting, action="append", default=[], metavar="KEY=VALUE",
                            help=f"another setting of {'every recipe' if name == 'all' else 'the stage ' + name.upper()}")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.sinew = args.sinew.resolve()
    if unknown := sorted(set(args.domains) - set(DOMAINS)):
        parser.error(f"--domains {', '.join(unknown)}: allowed: {', '.join(DOMAINS)}")
    return args


def main():
    args = parsed()
    domains = [Domain(name, args) for name in args.domains]
    results = [of_domain(domain, args.seeds) for domain in domains]
    crossed = [] if args.no_matrix or len(domains) < 2 else matrix(domains, args.seeds[: args.matrix_seeds])
    lost = [c for c in crossed if c["against"] == "base" and c["difference"] < -args.loss / 100]
    found = {"domains": results, "matrix": crossed, "lost": [[c["trained_on"], c["measured_on"]] for c in lost]}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gain.json").write_text(json.dumps(found, indent=1) + "\n")
    if args.json:
        print(json.dumps(found))
    else:
        show(results, crossed)
    return 0 if not lost and all(result["reached"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
