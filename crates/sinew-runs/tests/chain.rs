//! Chains with stages that only count: the order of the stages, and the state that a dying process leaves.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use serde_json::{Value, json};
use sinew_env::{BUILT_IN, Registry};
use sinew_recipe::{ChainPlan, RunPlan};
use sinew_runs::chain::{
    ChainDir, ChainError, HandedWeights, StageStart, Stages, drive, last_line, last_stage,
    run_folder, table,
};
use std::fs;
use std::path::Path;

const THREE: &str = "name = \"c\"\nmodel = \"x\"\nenv = { type = \"tool_math\" }\n\
    [[stage]]\nname = \"a\"\nalgorithm = { type = \"sft\" }\ndata = { type = \"gold\" }\ntrain = { steps = 3 }\n\
    [[stage]]\nname = \"b\"\n[stage.train]\nsteps = 4\n\
    [[stage]]\nname = \"c\"\n[stage.train]\nsteps = 5\n";

fn chain(text: &str) -> ChainPlan {
    ChainPlan::parse(Path::new("c.toml"), text, Registry::new(&BUILT_IN)).unwrap()
}

/// Stages whose weights are the number of steps trained in all, in a file. The process dies when `left` calls
/// have been made.
struct Counting {
    left: usize,
    runs: Vec<String>,
}

#[derive(Debug)]
enum Died {
    Here,
    Chain(ChainError),
}

impl From<ChainError> for Died {
    fn from(e: ChainError) -> Self {
        Self::Chain(e)
    }
}

impl Counting {
    fn call(&mut self) -> Result<(), Died> {
        self.left = self.left.checked_sub(1).ok_or(Died::Here)?;
        Ok(())
    }
}

fn steps(folder: &Path) -> u64 {
    let text = fs::read_to_string(folder.join("weights")).unwrap_or_default();
    text.parse().unwrap_or_default()
}

impl Stages for Counting {
    type Error = Died;

    fn begin(&mut self, begin: &StageStart<'_>) -> Result<(), Died> {
        assert_eq!(begin.from.is_some(), begin.at > 0);
        self.call()
    }

    fn run(&mut self, plan: &RunPlan, folder: &Path) -> Result<Value, Died> {
        self.call()?;
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("recipe.toml"), "").unwrap();
        let before = plan
            .model_source()
            .strip_prefix("run:")
            .map_or(0, |dir| steps(Path::new(dir)));
        self.call()?;
        fs::write(
            folder.join("weights"),
            (before + plan.train.steps).to_string(),
        )
        .unwrap();
        self.call()?;
        self.runs.push(plan.name.clone());
        let eval = json!({ "before": { "success": before }, "after": { "success": before + plan.train.steps } });
        Ok(
            json!({ "eval": eval, "wall_s": 1.5, "samples": { "trained": 2, "lost": 0 }, "tokens": { "counts": { "sampled": 3 } } }),
        )
    }

    fn weights(&mut self, folder: &Path) -> Result<HandedWeights, Died> {
        self.call()?;
        Ok(HandedWeights {
            checkpoint: "step".into(),
            weights: steps(folder).to_string(),
        })
    }
}

fn go(folder: &Path, text: &str, left: usize) -> Result<Value, Died> {
    let chain = chain(text);
    let mut dir = ChainDir::open(folder, &chain, true)?;
    let mut stages = Counting {
        left,
        runs: Vec::new(),
    };
    drive(&chain, &mut dir, &mut stages)?;
    assert!(table(&dir).contains("whole chain"));
    Ok(last_line(dir.ended()))
}

#[test]
fn a_chain_that_dies_at_any_call_ends_the_same() {
    let root = tempfile::tempdir().unwrap();
    let whole = go(&root.path().join("whole"), THREE, usize::MAX).unwrap();
    assert_eq!(
        whole["eval"],
        json!({ "before": { "success": 0 }, "after": { "success": 12 } })
    );
    assert_eq!(whole["samples"], json!({ "trained": 6, "lost": 0 }));
    assert_eq!(
        (
            whole["wall_s"].as_f64(),
            &whole["tokens"]["counts"]["sampled"]
        ),
        (Some(4.5), &json!(9))
    );
    let names: Vec<&Value> = whole["stages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| &s["name"])
        .collect();
    assert_eq!(names, ["a", "b", "c"]);
    let mut deaths = 0;
    for left in 0.. {
        let folder = root.path().join(left.to_string());
        let died = match go(&folder, THREE, left) {
            Ok(last) => {
                assert_eq!(last, whole);
                break;
            }
            Err(died) => died,
        };
        assert!(matches!(died, Died::Here), "{died:?}");
        deaths += 1;
        assert_eq!(
            go(&folder, THREE, usize::MAX).unwrap(),
            whole,
            "died after {left} calls"
        );
    }
    assert!(deaths > 12, "{deaths}");
}

#[test]
fn one_process_holds_a_folder_of_one_kind() {
    let root = tempfile::tempdir().unwrap();
    let (folder, plan) = (root.path().join("c"), chain(THREE));
    let held = ChainDir::open(&folder, &plan, false).unwrap();
    assert!(matches!(
        ChainDir::open(&folder, &plan, true),
        Err(ChainError::Locked { .. })
    ));
    drop(held);
    assert!(matches!(
        ChainDir::open(&folder, &plan, false),
        Err(ChainError::Exists { .. })
    ));
    assert!(
        last_stage(&folder)
            .unwrap_err()
            .to_string()
            .contains("no stage of this chain has ended")
    );
    fs::write(folder.join("chain.json"), "{").unwrap();
    assert!(matches!(
        ChainDir::open(&folder, &plan, true),
        Err(ChainError::Damaged { .. })
    ));
    let run = root.path().join("run");
    fs::create_dir(&run).unwrap();
    fs::write(run.join("recipe.toml"), "").unwrap();
    let refused = ChainDir::open(&run, &plan, true).unwrap_err();
    assert!(
        refused.to_string().contains("holds a run already"),
        "{refused}"
    );
    assert_eq!(run_folder(&run).unwrap(), run);
}

#[test]
fn what_ended_stays_and_what_did_not_begin_may_change() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("c");
    let two: &str = THREE.split("[[stage]]\nname = \"c\"").next().unwrap();
    go(&folder, two, usize::MAX).unwrap();
    assert_eq!(run_folder(&folder).unwrap(), folder.join("b"));
    let refused = |text: &str| match go(&folder, text, usize::MAX) {
        Err(Died::Chain(e)) => e.to_string(),
        other => panic!("{other:?}"),
    };
    let slower = THREE.replace("steps = 4", "steps = 4\nlearning_rate = 1e-7");
    assert!(refused(&slower).contains("stage b has ended, and its recipe is another one"));
    assert!(refused(&two.replace("steps = 3", "steps = 9")).contains("are 9 now, of 3"));
    assert!(refused(&two.replace("name = \"b\"", "name = \"bb\"")).contains("no such stage"));
    // The last one continues, as nothing was built on it.
    let longer = two.replace("steps = 4", "steps = 6");
    assert_eq!(
        go(&folder, &longer, usize::MAX).unwrap()["eval"]["after"]["success"],
        9
    );
    // More stages at the end.
    let last = go(
        &folder,
        &THREE.replace("steps = 4", "steps = 6"),
        usize::MAX,
    )
    .unwrap();
    assert_eq!(last["eval"]["after"]["success"], 14);
    assert!(refused(&THREE.replace("steps = 4", "steps = 7")).contains("are 7 now, of 6"));
    // Moved, it continues; with other weights in a folder, it does not.
    let moved = root.path().join("moved");
    fs::rename(&folder, &moved).unwrap();
    let more = format!(
        "{}[[stage]]\nname = \"d\"\n",
        THREE.replace("steps = 4", "steps = 6")
    );
    fs::write(moved.join("c/weights"), "13").unwrap();
    let died = go(&moved, &more, usize::MAX).unwrap_err();
    assert!(
        matches!(died, Died::Chain(ChainError::Weights { .. })),
        "{died:?}"
    );
    fs::write(moved.join("c/weights"), "14").unwrap();
    assert_eq!(
        go(&moved, &more, usize::MAX).unwrap()["eval"]["after"]["success"],
        44
    );
    let page = fs::read_to_string(moved.join("report.html")).unwrap();
    assert!(
        page.contains("4 of 4 stages") && page.contains("d/report.html"),
        "{page}"
    );
}
