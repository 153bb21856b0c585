"""The recipes of tinker_cookbook 0.5.8 that run without the internet: their command lines, and what of their metrics must move.

Sizes are chosen for two processor cores and SmolLM2-135M: a step has at most six thousand tokens. Names of arguments are the
recipes' own. `{sampler:NAME}` and `{state:NAME}` are the checkpoints that recipe NAME left.
"""

import re
from dataclasses import dataclass, field

# The name that recipes with an argument for the renderer get.
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Recipes without one look the model up in the cookbook's own table of models. The table ignores what stands after the colon; this
# entry's renderer writes SmolLM2's chat format.
ALIAS = "Qwen/Qwen3-4B-Instruct-2507:smollm2"
# The names that the server has to serve, each with the same weights.
MODELS = [MODEL, ALIAS]

CHAT = "qwen3_instruct"


@dataclass(frozen=True)
class Curve:
    """A number that a recipe writes at each step, and where it has to go."""

    key: str
    # `down` and `up`: the mean of the last third of the steps is below or above that of the first third. `below`: every value is
    # at most `bound`. `none`: the number is shown, and only the end of the recipe counts.
    goal: str
    bound: float = 0.0
    # The folder of metrics.jsonl below the recipe's folder.
    folder: str = ""


@dataclass(frozen=True)
class Recipe:
    name: str
    # The module below `tinker_cookbook`.
    module: str
    arguments: list[str]
    # Steps that metrics.jsonl must have; 0 for programs that write none.
    steps: int
    curves: list[Curve]
    about: str
    # Name of the argument that takes the folder for logs; empty: the recipe takes TINKER_COOKBOOK_RUNS_DIR.
    log_argument: str = "log_path"
    # Commands before it, as the recipe's own README asks for them: module and arguments.
    before: list[list[str]] = field(default_factory=list)
    stdin: str = ""
    # The recipe whose last state this one resumes from, where it has no argument for it: its folder gets a checkpoints.jsonl.
    resume: str = ""
    limit_s: int = 900

    def needs(self) -> list[str]:
        """Recipes whose checkpoints this one reads."""
        named = [name for text in self.arguments for name in re.findall(r"\{(?:sampler|state):(\w+)\}", text)]
        return [*named, *([self.resume] if self.resume else [])]


LOSS = [Curve("train_mean_nll", "down")]
REWARD = [Curve("env/all/reward/total", "up")]
# Arguments of supervised recipes and of recipes with rollouts.
SMALL = ["lora_rank=8", "learning_rate=5e-4"]
NAMED = [f"model_name={MODEL}", f"renderer_name={CHAT}"]
# Recipes whose environments render in threads (`EnvFromMessageEnv`) cannot use the renderers of Qwen3 for several episodes at once:
# those switch an option of the tokenizer for each message, and it ends with "Already borrowed". Where such a recipe needs tools, it
# plays one episode at a time.
COLON = [f"model_name={MODEL}", "renderer_name=role_colon"]
QUIET = ["eval_every=0", "save_every=0"]


def arguments(*parts) -> list[str]:
    return [item for part in parts for item in ([part] if isinstance(part, str) else part)]


SUPERVISED = [
    Recipe(
        "sl_loop",
        "recipes.sl_loop",
        arguments(f"model_name={ALIAS}", SMALL, "batch_size=16", "save_every=6", "max_steps=12"),
        12,
        LOSS,
        "the loop without abstractions: cross_entropy, two checkpoints",
    ),
    Recipe(
        "sl_basic",
        "recipes.sl_basic",
        arguments(
            f"model_name={ALIAS}",
            SMALL,
            "max_steps=12",
            "dataset_builder=NoRobotsBuilder",
            f"dataset_builder.common_config.model_name_for_tokenizer={ALIAS}",
            f"dataset_builder.common_config.renderer_name={CHAT}",
            "dataset_builder.common_config.max_length=512",
            "dataset_builder.common_config.batch_size=16",
        ),
        12,
        LOSS,
        "the same through `supervised.train`; held-out loss by prompt log-probabilities",
    ),
    Recipe(
        "chat_sl",
        "recipes.chat_sl.train",
        arguments(
            NAMED, SMALL, "dataset=tulu3", "batch_size=16", "max_length=512", "eval_every=0",
            "save_every=8", "rolling_save_every=3", "max_steps=16",
        ),
        16,
        LOSS,
        "rolling checkpoints, which are deleted again",
    ),
    Recipe(
        "prompt_distillation",
        "recipes.prompt_distillation.train",
        arguments(
            NAMED, SMALL, "file_path=data/prompt_distillation.jsonl", "batch_size=16", "num_epochs=1", "max_length=512", "max_steps=12",
        ),
        12,
        LOSS,
        "rows of a file; the part that makes the rows with a teacher of 35B is replaced by the file",
    ),
    Recipe(
        "off_policy_reasoning",
        "recipes.distillation.off_policy_reasoning",
        arguments(NAMED, SMALL, "batch_size=16", "max_length=512", "buffer_size=512", "max_prompts=512", "max_steps=16"),
        16,
        LOSS,
        "a streamed data set; its checkpoint teaches two later recipes",
    ),
    Recipe(
        "math_sft",
        "recipes.chat_sl.train",
        arguments(NAMED, SMALL, "dataset=data/boxed.jsonl", "batch_size=16", "max_length=512", "eval_every=0", "max_steps=12"),
        12,
        LOSS,
        "chat_sl on a file: answers in a box, from which the recipes on word problems start",
    ),
    Recipe(
        "forecasting_sft",
        "recipes.chat_sl.train",
        arguments(COLON, SMALL, "dataset=data/forecasts.jsonl", "batch_size=8", "max_length=512", "eval_every=0", "max_steps=12"),
        12,
        LOSS,
        "chat_sl on a file: probabilities drawn by chance, so that forecasting starts from their form",
    ),
    Recipe(
        "sweep",
        "recipes.chat_sl.sweep",
        arguments(
            "recipe=sft", f"base.model_name={MODEL}", f"base.renderer_name={CHAT}", "base.dataset=no_robots", "base.batch_size=8",
            "base.max_length=512", "base.eval_every=0", "base.save_every=0", "learning_rates=[3e-4]", "lora_ranks=[4,8]",
            "training_budget_examples=64",
        ),
        8,
        [Curve("train_mean_nll", "down", folder="learning_rate=0.0003_lora_rank=4"), Curve("train_mean_nll", "down", folder="learning_rate=0.0003_lora_rank=8")],
        "two runs of chat_sl with other ranks, one after the other",
        log_argument="sweep_dir",
    ),
]

PREFERENCE = [
    Recipe(
        "dpo",
        "recipes.preference.dpo.train",
        arguments(NAMED, "dataset=hhh", "batch_size=8", "learning_rate=2e-4", "max_length=512", "max_steps=12"),
        12,
        [Curve("dpo_loss", "down")],
        "a custom loss (`forward_backward_custom`) against log-probabilities of a frozen sampler",
    ),
    Recipe(
        "shorter",
        "recipes.preference.shorter.train",
        arguments(NAMED, "batch_size=2", "group_size=8", "learning_rate=5e-4", "max_tokens=48", "eval_every=0", "max_steps=12"),
        12,
        [Curve("env/all/ac_tokens_per_turn", "down")],
        "pairs of answers, the shorter wins; log-probabilities after each update",
    ),
    Recipe(
        "rlhf",
        "recipes.preference.rlhf.rlhf_pipeline",
        arguments(
            f"base_model={ALIAS}", "short_name=smollm2", "lora_rank=8", "max_length=512", "batch_size=8", "sft_learning_rate=5e-4",
            "rm_learning_rate=5e-4", "rl_learning_rate=1e-4", "rl_max_tokens=24", "eval_every=0", "max_steps=10",
        ),
        10,
        [
            Curve("train_mean_nll", "down", folder="rlhf-smollm2/sft"),
            Curve("train_mean_nll", "down", folder="rlhf-smollm2/rm"),
            Curve("env/all/reward/total", "none", folder="rlhf-smollm2/rl"),
        ],
        "supervised, reward model, reinforcement learning; the reward model is a sampler of another session",
        log_argument="",
        limit_s=1500,
    ),
]

MATH = arguments(NAMED, "lora_rank=8", "learning_rate=3e-4", QUIET)
# SmolLM2 seldom puts an answer into a box, so that rewards of word problems are 0 without a start.
START = "load_checkpoint_path={state:math_sft}"
REINFORCEMENT = [
    Recipe(
        "rl_loop",
        "recipes.rl_loop",
        arguments(
            f"model_name={ALIAS}", "lora_rank=8", "learning_rate=3e-4", "batch_size=4", "group_size=8", "max_tokens=32", "max_steps=10",
        ),
        10,
        [Curve("reward/total", "up")],
        "the loop without abstractions: groups by `num_samples`, importance_sampling; resumes from a state",
        resume="math_sft",
    ),
    Recipe(
        "rl_basic",
        "recipes.rl_basic",
        arguments(
            f"model_name={ALIAS}", START, "lora_rank=8", "learning_rate=3e-4", "max_tokens=32", "save_every=5", "max_steps=10",
            "dataset_builder=Gsm8kDatasetBuilder", "dataset_builder.batch_size=4", "dataset_builder.group_size=8",
            f"dataset_builder.renderer_name={CHAT}", f"dataset_builder.model_name_for_tokenizer={ALIAS}",
        ),
        10,
        REWARD,
        "the same through `rl.train`",
    ),
    Recipe(
        "math_rl",
        "recipes.math_rl.train",
        arguments(MATH, "env=arithmetic", "groups_per_batch=8", "group_size=8", "max_tokens=5", "max_steps=10"),
        10,
        REWARD,
        "sums of two numbers, importance_sampling",
    ),
    Recipe(
        "math_rl_ppo",
        "recipes.math_rl.train",
        arguments(
            MATH, START, "env=gsm8k", "groups_per_batch=4", "group_size=8", "max_tokens=32", "loss_fn=ppo", "num_substeps=2",
            "compute_post_kl=True", "max_steps=10",
        ),
        10,
        REWARD,
        "ppo, two optimizer steps for each batch",
    ),
    Recipe(
        "math_rl_cispo",
        "recipes.math_rl.train",
        arguments(
            MATH, START, "env=polaris", "groups_per_batch=8", "group_size=8", "max_tokens=24", "loss_fn=cispo", "max_steps_off_policy=4",
            "max_steps=10",
        ),
        10,
        REWARD,
        "cispo; samples are at most four steps old (asynchronous)",
    ),
    Recipe(
        "math_rl_stream",
        "recipes.math_rl.train",
        arguments(
            MATH, START, "env=deepmath", "groups_per_batch=8", "group_size=8", "max_tokens=24", "stream_minibatch_config.groups_per_batch=8",
            "stream_minibatch_config.num_minibatches=2", "max_steps=10",
        ),
        10,
        REWARD,
        "each half of a batch is trained when it is sampled",
    ),
    Recipe(
        "forecasting",
        "recipes.forecasting.train",
        arguments(
            COLON, "load_checkpoint_path={state:forecasting_sft}", "lora_rank=8", "learning_rate=3e-4", "data_path=data/forecasts.csv",
            "groups_per_batch=4", "group_size=8", "max_tokens=12", QUIET, "max_steps=12",
        ),
        12,
        REWARD,
        "a probability as text, scored by Brier's rule; a stop string",
    ),
    Recipe(
        "text_arena",
        "recipes.multiplayer_rl.text_arena.train",
        arguments(
            NAMED, "learning_rate=3e-4", "batch_size=16", "num_train_datapoints=256", "num_test_datapoints=2", "max_tokens=12", QUIET,
            "max_steps=8",
        ),
        8,
        [Curve("env/all/reward/total", "none")],
        "tic-tac-toe against itself; a stop string",
    ),
    Recipe(
        "guess_number",
        "recipes.multiplayer_rl.guess_number.train",
        arguments(NAMED, "learning_rate=3e-4", "batch_size=1", "group_size=4", "max_tokens=8", QUIET, "max_steps=2"),
        2,
        [Curve("env/all/reward/total", "none")],
        "ten turns, each its own sequence: too long to learn in minutes",
    ),
    Recipe(
        "rubric",
        "recipes.rubric.train",
        arguments(
            NAMED, "lora_rank=8", "learning_rate=3e-4", f"grader_llm_name={MODEL}", f"grader_renderer_name={CHAT}", "groups_per_batch=2",
            "train_group_size=4", "max_tokens=8", QUIET, "max_steps=2",
        ),
        2,
        [Curve("env/all/reward/total", "none")],
        "a model grades; one of 135M seldom writes a score",
        before=[["recipes.rubric.generate_data"]],
    ),
    Recipe(
        "rl_numerics_check",
        "recipes.rl_numerics_check.train",
        arguments(
            NAMED, "lora_rank=8", "groups_per_batch=1", "group_size=1", "max_tokens=48", "max_trajectory_tokens=3000",
            "task.num_pages_min=2", "task.num_pages_max=3", "task.page_chars=400", "save_every=0", "max_steps=3",
        ),
        3,
        [Curve("optim/kl_sample_train_v2", "below", bound=1e-3)],
        "log-probabilities of sampler and trainer, compared",
    ),
]

DISTILLATION = [
    Recipe(
        "on_policy_distillation",
        "recipes.distillation.on_policy_distillation",
        arguments(
            NAMED, f"teacher_model={MODEL}", "teacher_checkpoint={sampler:off_policy_reasoning}", "dataset=deepmath", "lora_rank=8",
            "learning_rate=3e-4", "groups_per_batch=8", "group_size=4", "max_tokens=24", QUIET, "max_steps=12",
        ),
        12,
        [Curve("teacher_kl", "down")],
        "the teacher is the checkpoint of off_policy_reasoning",
    ),
    Recipe(
        "on_policy_multi_teacher",
        "recipes.distillation.on_policy_multi_teacher",
        arguments(
            NAMED, f"deepmath_teacher_model={MODEL}", "deepmath_teacher_checkpoint={sampler:off_policy_reasoning}",
            f"tulu3_teacher_model={MODEL}", "tulu3_teacher_checkpoint={sampler:chat_sl}", "deepmath_groups_per_batch=4",
            "tulu3_groups_per_batch=4", "lora_rank=8", "learning_rate=3e-4", "group_size=4", "max_tokens=24", QUIET, "max_steps=12",
        ),
        12,
        [Curve("teacher_kl", "down")],
        "two teachers: three samplers and a trainer at once",
    ),
    Recipe(
        "sdft",
        "recipes.sdft.train",
        arguments(
            NAMED, "dataset=toolalpaca", "lora_rank=8", "learning_rate=3e-4", "groups_per_batch=8", "max_tokens=32", "topk=5", QUIET,
            "max_steps=6",
        ),
        6,
        [Curve("sdft/mean_teacher_entropy", "none")],
        "cross_entropy with five targets at each place (`topk_prompt_logprobs`); the recipe reports no loss",
    ),
    Recipe(
        "sdft_reverse",
        "recipes.sdft.train",
        arguments(
            NAMED, "dataset=sciknoweval", "lora_rank=8", "learning_rate=3e-4", "groups_per_batch=8", "max_tokens=32", "topk=5",
            "reverse=True", QUIET, "max_steps=10",
        ),
        10,
        [Curve("sdft/reverse_kl_mean", "down")],
        "a custom loss with five targets at each place",
    ),
    Recipe(
        "decisions",
        "recipes.decisions.forecasting",
        arguments(
            NAMED, "lora_rank=8", "learning_rate=3e-4", "data_path=data/forecasts.csv", "batch_size=8", "eval_every=6", "max_steps=12",
        ),
        12,
        [Curve("train/loss", "down")],
        "a custom loss over two choices; choices scored by `target_prompt_logprobs`",
    ),
]

PROGRAMS = [
    Recipe(
        "decisions_demo",
        "recipes.decisions.demo",
        [f"model_name={ALIAS}"],
        0,
        [],
        "a question from standard input, scored for four choices",
        log_argument="",
        stdin="How do I pay my bill?\n\n",
    ),
    Recipe(
        "true_thinking_score",
        "recipes.true_thinking_score.analyze",
        [f"model_name={MODEL}", f"renderer_name={CHAT}", "dataset=gsm8k", "n_problems=2", "max_tokens=96"],
        0,
        [],
        "measures, trains nothing: log-probabilities of answers after parts of the reasoning",
    ),
]

ALL = [*SUPERVISED, *PREFERENCE, *REINFORCEMENT, *DISTILLATION, *PROGRAMS]
BY_NAME = {recipe.name: recipe for recipe in ALL}
