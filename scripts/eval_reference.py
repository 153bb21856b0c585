#!/usr/bin/env python3
"""Measures a model by `sinew eval` and by lm-eval, greedily and on the same rows, and prints both scores:

    scripts/bridges.sh harnesses
    python3 scripts/eval_reference.py --model DIR --benches gsm8k,math --tasks 200 --out runs/reference

lm-eval asks the same model through the gateway (`sinew serve --engine embedded`) with the prompt of the benchmark, and scores by its
own task: docs/evaluation.md names it. The scores should agree within a point; tasks on which they differ are listed. Rows come from
the hub, or from --data, as for `sinew eval`. The task `ifeval` of lm-eval wants NLTK's `punkt_tab`, which NLTK downloads.

Exit codes: 0 all agree within --within points, 1 one does not, 2 wrong use. Standard library only, but for lm-eval itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
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
#: Key of the gateway, which only this host reaches.
KEY = "0123456789-reference"
#: Most tokens of an answer and of an episode: those of `sinew eval`, which says them with its result.
LIMITS = ("rollout.max_turn_tokens", "rollout.max_context_tokens")


def ours(args, bench):
    """The result of `sinew eval` for one benchmark, and the rows that it asked."""
    command = [args.sinew, "eval", "--bench", bench, "--model", args.model, "--samples", "0", "--run-dir", args.out / "sinew"]
    command += ["--json", "--resume"]
    for name, value in (("--tasks", args.tasks), ("--data", args.data), ("--context", args.context), ("--python", args.scorer)):
        if value is not None and (name != "--python" or bench in ("math", "ifeval")):
            command += [name, value]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE)
    found = args.out / "sinew" / bench / "result.json"
    if not found.is_file():
        raise SystemExit(done.returncode or 1)
    result = json.loads(found.read_text())
    rows = [json.loads(line) for line in (args.out / "sinew/rows" / f"{bench}.jsonl").read_text().splitlines()]
    # The tasks of `--tasks` are spread over all rows.
    count = result["tasks"]
    return result, [rows[i * len(rows) // count] for i in range(count)]


@contextmanager
def served(args, context):
    """The address of the model behind the gateway, for as long as it is asked."""
    key = args.out / "key"
    key.write_text(f"{KEY}\n")
    command = [args.sinew, "serve", "--engine", "embedded", "--model", args.model, "--listen", "127.0.0.1:0", "--api-key", f"@{key}"]
    command += ["--context", context, "--kv-tokens", max(32768, 2 * context), "--json"]
    server = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        if not line:
            raise SystemExit(server.wait() or 1)
        yield json.loads(line)["url"]
    finally:
        server.terminate()
        server.wait()


def task(args, bench, rows, limit):
    """Writes lm-eval's task with the prompt and the rows of the benchmark. Returns its name and its folder."""
    file, changes, _ = TASKS[bench]
    folder = args.out / "lm-eval" / bench
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = f"sinew_{bench}"
    fields = {
        "task": name,
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
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(json.dumps(fields, indent=1))
    return name, folder


def theirs(args, bench, rows, limit, url):
    """lm-eval's score, and whether each row counts as right."""
    name, folder = task(args, bench, rows, limit)
    arguments = f"model=sinew,base_url={url}/v1/chat/completions,num_concurrent={args.concurrent},max_retries=3,tokenizer_backend=None"
    command = [args.python, "-m", "lm_eval", "--model", "local-chat-completions", "--model_args", arguments, "--tasks", name]
    command += ["--include_path", folder, "--apply_chat_template", "--output_path", folder / "out", "--log_samples", "--seed", "0"]
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL, env=environment)
    newest = max((folder / "out").rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    score = json.loads(newest.read_text())["results"][name][TASKS[bench][2]]
    metric, _, chosen = TASKS[bench][2].partition(",")
    right = {}
    for line in newest.with_name(newest.name.replace("results_", f"samples_{name}_") + "l").read_text().splitlines():
        sample = json.loads(line)
        if sample.get("filter", "none") == chosen:
            right[sample["doc_id"]] = bool(sample[metric])
    return score, right


def compared(args, bench, result, rows):
    """Prints the row of a benchmark. Returns whether both agree."""
    limit, context = (result["settings"][name] for name in LIMITS)
    with served(args, context) as url:
        score, right = theirs(args, bench, rows, limit, url)
    # lm-eval counts what it cannot read as wrong.
    own = result["greedy"]["as_zero"]
    points = 100 * (own - score)
    tasks = result["per_task"]
    differ = [t["task"] for i, t in enumerate(tasks) if bool(t["greedy"] and t["greedy"][0]) != right.get(i)]
    print(f"{bench:8} {len(rows):6} {100 * own:8.2f} {100 * score:8.2f} {points:+8.2f}  {TASKS[bench][2]}")
    if differ:
        print(f"{'':8} differ on {len(differ)}: {', '.join(differ[:5])}")
    return abs(points) <= args.within


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as for `sinew eval` and `sinew serve`")
    parser.add_argument("--benches", default="gsm8k,math,mmlu,ifeval", help="names with commas between them")
    parser.add_argument("--tasks", type=int, help="at most so many of each, spread over its rows")
    parser.add_argument("--data", help="local rows, as for `sinew eval`")
    parser.add_argument("--context", type=int, help="as for `sinew eval`")
    parser.add_argument("--scorer", help="interpreter with math-verify and the checkers of IFEval, as --python of `sinew eval`")
    parser.add_argument("--out", type=Path, default=Path("runs/reference"))
    parser.add_argument("--sinew", default="target/release/sinew")
    parser.add_argument("--python", default=".cache/venv-harnesses/bin/python3", help="interpreter with lm-eval")
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--within", type=float, default=1.0, help="points that the scores may differ")
    args = parser.parse_args()
    benches = args.benches.split(",")
    for bench in benches:
        if bench not in TASKS:
            parser.error(f"--benches {bench}: allowed: {', '.join(TASKS)}")
    found = subprocess.run([args.python, "-c", "import lm_eval; print(lm_eval.__path__[0])"], stdout=subprocess.PIPE, text=True)
    if found.returncode:
        parser.error(f"--python {args.python}: it has no lm-eval; scripts/bridges.sh harnesses installs it")
    args.packaged = Path(found.stdout.strip())
    args.out.mkdir(parents=True, exist_ok=True)
    measured = [(bench, *ours(args, bench)) for bench in benches]
    print(f"{'bench':8} {'rows':>6} {'sinew':>8} {'lm-eval':>8} {'points':>8}  metric of lm-eval")
    agree = [compared(args, bench, result, rows) for bench, result, rows in measured]
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
