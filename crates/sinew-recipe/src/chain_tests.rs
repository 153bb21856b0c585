//! Recipes with stages: the overlay of defaults, and the refusals with their places.

use crate::ALL;
use crate::*;
use sinew_algo::AlgorithmKind;
use std::path::Path;

const BASE: &str = "name = \"c\"\nmodel = \"x\"\nenv = { type = \"tool_math\" }\n\
    [rollout]\ngroup_size = 4\n[train]\nlearning_rate = 1e-4\n";

fn chain(text: &str) -> Result<ChainPlan, String> {
    match Recipe::parse(Path::new("c.toml"), text, ALL) {
        Ok(Recipe::Chain(chain)) => Ok(chain),
        Ok(Recipe::Run(_)) => panic!("no chain: {text}"),
        Err(e) => Err(e.to_string()),
    }
}

fn stages(stages: &str) -> Result<ChainPlan, String> {
    chain(&format!("{BASE}{stages}"))
}

const SFT: &str = "[[stage]]\nname = \"sft\"\nalgorithm = { type = \"sft\" }\ndata = { type = \"gold\" }\n\
    [stage.train]\nsteps = 3\n";
const GRPO: &str = "[[stage]]\nname = \"rl\"\nalgorithm = { type = \"grpo\", std_epsilon = 0.1 }\n";

#[test]
fn a_stage_is_laid_over_the_defaults() {
    let chain = stages(&format!("{SFT}{GRPO}[stage.rollout]\nmax_turns = 2\n")).unwrap();
    let [sft, rl] = &chain.stages[..] else {
        panic!("{chain:?}");
    };
    assert_eq!(
        (sft.name.as_str(), sft.plan.name.as_str()),
        ("sft", "c-sft")
    );
    assert_eq!((sft.plan.train.steps, rl.plan.train.steps), (3, 30));
    assert_eq!(sft.plan.train.learning_rate, 1e-4);
    assert_eq!(rl.plan.rollout.group_size, 4);
    assert_eq!(rl.plan.rollout.max_turns, 2);
    assert_eq!(rl.plan.algorithm.kind, AlgorithmKind::Grpo);
    assert!(matches!(sft.plan.data, Some(DataSection::Gold {})));
    assert!(rl.plan.data.is_none());
    let run = chain.run(1, Path::new("/runs/c"));
    assert_eq!(run.model_source(), "run:/runs/c/sft");
    assert_eq!(chain.run(0, Path::new("/runs/c")).model_source(), "x");
}

#[test]
fn a_table_with_a_type_replaces_the_default_and_others_are_laid_over_it() {
    let text = format!(
        "{}algorithm = {{ type = \"grpo\", std_epsilon = 0.1 }}\n{SFT}[[stage]]\nname = \"rl\"\n\
         algorithm = {{ entropy = 0.3 }}\n",
        BASE.replace(
            "[rollout]\ngroup_size = 4\n[train]\nlearning_rate = 1e-4\n",
            ""
        )
    );
    let chain = chain(&text).unwrap();
    assert_eq!(chain.stages[0].plan.algorithm.kind, AlgorithmKind::Sft);
    let rl = toml::to_string(&chain.stages[1].plan).unwrap();
    assert!(
        rl.contains("std_epsilon = 0.1") && rl.contains("entropy = 0.3"),
        "{rl}"
    );
}

#[test]
fn a_default_without_effect_in_one_stage_is_left_out_there_and_refused_where_none_uses_it() {
    let base = format!("{BASE}[critic]\nlearning_rate = 0.1\n");
    let ppo = "[[stage]]\nname = \"rl\"\nalgorithm = { type = \"ppo\" }\n";
    let with = chain(&format!("{base}{SFT}{ppo}")).unwrap();
    assert!(with.stages[0].plan.critic.is_none() && with.stages[1].plan.critic.is_some());
    let e = chain(&format!("{base}{SFT}{GRPO}")).unwrap_err();
    assert!(
        e.contains("no effect in any stage") && e.contains("line 9"),
        "{e}"
    );
    // Weights of types draw tasks, which a stage with data does not do.
    let tasks = "[tasks]\nsource = \"t.jsonl\"\nkind = \"k\"\nweights = { a = 1.0 }\n";
    let rows = BASE.replace("\"tool_math\"", "\"python\", module = \"a.py:A\"");
    let with = chain(&format!("{rows}{tasks}{SFT}{GRPO}")).unwrap();
    let weights = |at: usize| with.stages[at].plan.tasks.weights.is_some();
    assert!(!weights(0) && weights(1));
    // A key of the stage itself is refused, as in a recipe.
    let e = stages(&format!("{SFT}critic = {{ learning_rate = 0.1 }}\n")).unwrap_err();
    assert!(e.contains("critic"), "{e}");
    let e = stages(&format!("{GRPO}[stage.critic]\nlearning_rate = 0.1\n")).unwrap_err();
    assert!(
        e.contains("stage rl: critic") && e.contains("reads no values"),
        "{e}"
    );
    // A key that every stage types anew does not count as a default.
    let e =
        stages(&GRPO.replace("0.1 }", "0.1 }\n[stage.train]\nlearning_rate = 1e-5")).unwrap_err();
    assert!(
        e.contains("train.learning_rate = 1e-4") && e.contains("line 7"),
        "{e}"
    );
}

#[test]
fn mistakes_are_shown_where_they_were_typed() {
    for (typed, needles) in [
        (
            "[stage.train]\nsteps = 0\n",
            ["line 12", "stage rl: train.steps = 0"],
        ),
        (
            "[stage.train]\nsteeps = 1\n",
            ["line 12", "did you mean `steps`"],
        ),
        ("[stage.train]\nlr = 1\n", ["line 12", "learning_rate"]),
        (
            "[stage.env]\ntype = \"tiny\"\nlevel = 1\n",
            ["line 13", "unknown field `level`"],
        ),
        (
            "[stage.engine]\ntype = \"vlm\"\n",
            ["line 12", "stage.engine.type"],
        ),
        ("steps = 1\n", ["line 11", "belongs to [train]"]),
    ] {
        let e = stages(&format!("{GRPO}{typed}")).unwrap_err();
        assert!(needles.iter().all(|n| e.contains(n)), "{typed}: {e}");
    }
}

#[test]
fn stages_have_names_of_their_own_and_an_effect() {
    let named = |name: &str| GRPO.replace("\"rl\"", name);
    for (typed, needle) in [
        (GRPO.replace("name = \"rl\"\n", ""), "has no `name`"),
        (named("\"a/b\""), "letters, digits"),
        (named("\"..\""), "letters, digits"),
        (named("\"\""), "letters, digits"),
        (named("\"lock\""), "not `lock`"),
        (named("3"), "allowed: a text"),
        (format!("{SFT}{}", named("\"SFT\"")), "another stage"),
        (
            format!("{GRPO}{}", named("\"more\"")),
            "equal to the one before",
        ),
        (
            String::from("[stage]\nname = \"rl\"\n"),
            "one table `[[stage]]`",
        ),
        (
            format!("{SFT}{GRPO}model = \"y\"\n"),
            "begins with the weights",
        ),
        (
            format!("{GRPO}reference = \"stage:sft\"\n")
                .replace("0.1 }", "0.1, kl = { coefficient = 0.1 } }"),
            "names no stage before this one",
        ),
        (
            format!("{SFT}{GRPO}reference = \"stage:rl\"\n")
                .replace("0.1 }", "0.1, kl = { coefficient = 0.1 } }"),
            "allowed: a stage before this one: sft",
        ),
    ] {
        let e = stages(&typed).unwrap_err();
        assert!(e.contains(needle), "{typed}: {e}");
    }
    let e = chain(&format!("stage = []\n{BASE}")).unwrap_err();
    assert!(e.contains("0 stages"), "{e}");
}

#[test]
fn stages_are_named_in_chains_alone() {
    let text = format!(
        "{BASE}[data]\ntype = \"episodes\"\npath = \"stage:sft\"\n[algorithm]\ntype = \"sft\"\n"
    );
    let e = parsed(&text).unwrap_err();
    assert!(
        e.contains("data.path") && e.contains("[[stage]] of a chain"),
        "{e}"
    );
    let e = RunPlan::parse(Path::new("r.toml"), &format!("{BASE}{SFT}"), ALL)
        .unwrap_err()
        .to_string();
    assert!(e.contains("line 8") && e.contains("sinew train"), "{e}");
}

#[test]
fn a_smaller_model_learns_from_the_stage_before() {
    let small = "[[stage]]\nname = \"small\"\nmodel = \"y\"\nalgorithm = { type = \"opd\" }\n";
    let more = "[[stage]]\nname = \"more\"\nalgorithm = { type = \"grpo\" }\n";
    let chain = stages(&format!("{SFT}{GRPO}{small}{more}")).unwrap();
    let folder = Path::new("/c");
    let run = chain.run(2, folder);
    assert_eq!(run.model_source(), "y");
    assert_eq!(run.teacher.unwrap().model, "run:/c/rl");
    assert_eq!(chain.run(3, folder).model_source(), "run:/c/small");
    assert_eq!(chain.stages[3].plan.model_source(), "y");
    let named = small.replace("\"opd\" }", "\"opd\" }\nteacher = \"stage:sft\"");
    let chain = stages(&format!("{SFT}{GRPO}{named}")).unwrap();
    assert_eq!(chain.run(2, folder).teacher.unwrap().model, "run:/c/sft");
    let effective = toml::to_string(&chain).unwrap();
    assert_eq!(
        super::chain_tests::chain(&effective).unwrap(),
        chain,
        "{effective}"
    );
}

#[test]
fn episodes_of_a_stage_become_data() {
    let best = "[[stage]]\nname = \"best\"\nalgorithm = { type = \"sft\" }\n\
        data = { type = \"episodes\", path = \"stage:rl\" }\n";
    let chain = stages(&format!("{GRPO}{best}")).unwrap();
    let Some(DataSection::Episodes { path, .. }) = chain.run(1, Path::new("/c")).data else {
        panic!("{chain:?}");
    };
    assert_eq!(path, "/c/rl");
}

#[test]
fn what_is_saved_of_a_stage_names_stages_and_no_folders() {
    let best = "[[stage]]\nname = \"best\"\nalgorithm = { type = \"sft\" }\n\
        data = { type = \"episodes\", path = \"stage:rl\" }\n";
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (dir.path().join("old"), dir.path().join("new"));
    for folder in ["rl", "best"] {
        std::fs::create_dir_all(new.join(folder)).unwrap();
    }
    std::fs::write(new.join("chain.toml"), "").unwrap();
    let chain = stages(&format!("{GRPO}{best}")).unwrap();
    let (run, moved) = (chain.run(1, &old), chain.run(1, &new));
    let saved = run.portable(&old);
    assert_eq!(saved.model_source(), "stage:rl");
    assert!(super::changes(&saved, &moved.portable(&new)).is_empty());
    let other = super::changes(&chain.run(0, &old), &saved);
    assert!(other.iter().any(|c| c.key == "model.source"), "{other:?}");
    let path = new.join("best/recipe.toml");
    std::fs::write(&path, toml::to_string(&saved).unwrap()).unwrap();
    std::fs::write(new.join("best/began.toml"), "").unwrap();
    assert_eq!(crate::RunPlan::load(&path, ALL).unwrap(), moved);
}
