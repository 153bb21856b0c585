//! Attempts at some tasks, scored by the recipe's reward: whether it can be earned, and whether it
//! distinguishes a right answer from others.
//!
//! A reward is refused if right answers (`env.gold`) are not a success by it, or if it scores no attempt at
//! all. A reward that gives an empty answer as much as any other is reported with a warning: it may be right,
//! and nothing else shows it before a run has learned nothing.

use super::PATIENCE;
use serde_json::Value;
use sinew_assembly::Failure;
use sinew_env::EnvFactory;
use sinew_recipe::RunPlan;
use sinew_types::{Outcome, Task};
use std::collections::BTreeMap;
use std::time::Instant;

/// Columns of a row whose texts are tried as answers, and the bytes of the longest that is.
const COLUMNS: usize = 8;
const LONGEST: usize = 64 << 10;

/// Names of attempts that are not a column.
const EMPTY: &str = "an empty answer";
const ONE: &str = "the answer \"1\"";
const OTHER: &str = "the right answer of another task";
const ROW: &str = "the row as JSON";
const GOLD: &str = "the gold policy";

/// The rewards that one kind of attempt got.
#[derive(Debug, Default)]
struct Tally {
    tried: usize,
    successes: usize,
    /// The lowest and the highest, of those that were scored.
    rewards: Option<(f64, f64)>,
    unscored: usize,
    /// Reason of the first one without a score.
    reason: String,
}

impl Tally {
    /// Takes in one attempt.
    fn add(&mut self, outcome: &Outcome) {
        self.tried += 1;
        if outcome.unscored {
            if self.unscored == 0 {
                self.reason = outcome.unscored_reason.clone().unwrap_or_default();
            }
            self.unscored += 1;
            return;
        }
        let r = outcome.reward;
        let (low, high) = self.rewards.unwrap_or((r, r));
        self.rewards = Some((low.min(r), high.max(r)));
        self.successes += usize::from(outcome.success);
    }

    /// The highest reward; none where nothing was scored.
    fn highest(&self) -> Option<f64> {
        self.rewards.map(|(_, high)| high)
    }

    /// `NAME: 0 to 1, 2 without a score`.
    fn text(&self, name: &str) -> String {
        let rewards = match self.rewards {
            None => return format!("{name}: no score"),
            Some((low, high)) if low == high => format!("{low}"),
            Some((low, high)) => format!("{low} to {high}"),
        };
        match self.unscored {
            0 => format!("{name}: {rewards}"),
            n => format!("{name}: {rewards}, {n} without a score"),
        }
    }
}

/// All attempts so far, by name.
#[derive(Debug, Default)]
struct AttemptTallies(BTreeMap<String, Tally>);

impl AttemptTallies {
    /// Takes in one attempt of the kind `name`.
    fn add(&mut self, name: &str, outcome: &Outcome) {
        self.0.entry(name.to_owned()).or_default().add(outcome);
    }

    /// The kinds of attempts with what they got.
    fn all(&self) -> impl Iterator<Item = (&str, &Tally)> {
        self.0.iter().map(|(name, tally)| (name.as_str(), tally))
    }

    /// The highest reward of attempts that are not empty.
    fn best(&self) -> Option<f64> {
        let said = self.all().filter(|(name, _)| *name != EMPTY);
        said.filter_map(|(_, tally)| tally.highest())
            .reduce(f64::max)
    }

    /// A warning if the reward scores only some of the attempts.
    fn missing(&self) -> String {
        let (scored, none): (Vec<_>, Vec<_>) = self.all().partition(|(_, t)| t.unscored == 0);
        let Some((_, first)) = none.first() else {
            return String::new();
        };
        let tried: usize = scored.iter().chain(&none).map(|(_, t)| t.tried).sum();
        let unscored: usize = none.iter().map(|(_, t)| t.unscored).sum();
        format!(
            "; warning: {unscored} of {tried} attempts have no score, so that such episodes train nothing; the \
             first: {}",
            first.reason
        )
    }

    /// Formats all attempts, one after the other.
    fn text(&self) -> String {
        let each: Vec<String> = self.all().map(|(name, tally)| tally.text(name)).collect();
        each.join(", ")
    }
}

/// Scores attempts at `tasks` by the reward of the recipe.
///
/// # Errors
/// If a right answer is not a success, if no attempt gets a score, or the environment fails.
pub(super) async fn attempts(
    recipe: &RunPlan,
    envs: &dyn EnvFactory,
    tasks: &[Task],
) -> Result<String, Failure> {
    let name = envs.name();
    let outside = recipe
        .worlds()
        .iter()
        .any(|w| w.reward.is_some_and(|r| r.is_outside()));
    let chat = !recipe.env.is_mixture() && recipe.env.name() == "chat";
    let answers = if chat { answers(envs, tasks)? } else { None };
    if let Some(answers) = answers {
        right(envs, tasks, &answers).await?;
        let tried = if outside {
            // Each attempt is a request to somebody's server.
            AttemptTallies::default()
        } else {
            wrong(envs, tasks, &answers).await?
        };
        let text = format!("{name}: the right answers of {} tasks succeed", tasks.len());
        return Ok(format!("{text}{}", not_told_apart(&tried)));
    }
    let tried = unknown(envs, tasks, outside, chat).await?;
    let scored = tried.all().any(|(_, tally)| tally.rewards.is_some());
    if !scored && let Some((_, first)) = tried.all().next() {
        return Err(Failure::input(format!(
            "reward: none of {} tasks gets a score for any attempt ({}); the first: {}",
            first.tried,
            tried
                .all()
                .map(|(name, _)| name)
                .collect::<Vec<_>>()
                .join(", "),
            first.reason
        )));
    }
    let empty = tried.0.get(EMPTY).and_then(Tally::highest);
    let warning = match (empty, tried.best()) {
        (Some(empty), best) if !outside && best.is_none_or(|best| best <= empty) => {
            match (chat, tried.0.contains_key(GOLD)) {
                (true, _) => {
                    "; warning: no attempt earned more than an empty answer: name a column with right answers \
                     (env.gold) to see whether the reward can be earned"
                }
                (false, false) => {
                    "; warning: no attempt earned more than an empty answer: give the environment a gold policy \
                     to see whether the recipe's reward can be earned"
                }
                (false, true) => {
                    "; warning: the gold policy earns no more than an empty answer by the recipe's reward, which \
                     takes the place of the environment's own score"
                }
            }
        }
        _ => "",
    };
    Ok(format!(
        "{name}: rewards of attempts: {}{}{warning}",
        tried.text(),
        tried.missing()
    ))
}

/// The right answers that rows of the recipe have for these tasks; `None` without `env.gold`.
fn answers(envs: &dyn EnvFactory, tasks: &[Task]) -> Result<Option<Vec<String>>, Failure> {
    let answer = |task| match envs.gold(task, 0) {
        Ok(action) => Ok(action.map(|a| a.text)),
        Err(e) => Err(Failure::input(format!("env: {e}"))),
    };
    tasks.iter().map(answer).collect()
}

/// One attempt at a task.
///
/// # Errors
/// If the environment fails.
async fn trial(envs: &dyn EnvFactory, task: &Task, said: &str) -> Result<Outcome, Failure> {
    let failed = |e| Failure::input(format!("env: task {}: {e}", task.id));
    sinew_env::trial(envs, task, said).await.map_err(failed)
}

/// Right answers must succeed by the recipe's reward: else the column or the reward is the wrong one.
async fn right(envs: &dyn EnvFactory, tasks: &[Task], answers: &[String]) -> Result<(), Failure> {
    for (task, answer) in tasks.iter().zip(answers) {
        let outcome = trial(envs, task, answer).await?;
        if outcome.success {
            continue;
        }
        let said: String = answer.chars().take(60).collect();
        let why = match &outcome.unscored_reason {
            Some(reason) => format!("gets no score: {reason}"),
            None => format!("is no success by the reward, which is {}", outcome.reward),
        };
        return Err(Failure::input(format!(
            "env.gold: the right answer {said:?} of task {} {why}",
            task.id
        )));
    }
    Ok(())
}

/// Near misses: nothing, and the right answer of another task.
///
/// # Errors
/// Same as [`trial`].
async fn wrong(
    envs: &dyn EnvFactory,
    tasks: &[Task],
    answers: &[String],
) -> Result<AttemptTallies, Failure> {
    let (mut tried, begun) = (AttemptTallies::default(), Instant::now());
    for (task, own) in tasks.iter().zip(answers) {
        let empty = trial(envs, task, "").await?;
        tried.add(EMPTY, &empty);
        if let Some(other) = answers.iter().find(|other| *other != own) {
            let outcome = trial(envs, task, other).await?;
            tried.add(OTHER, &outcome);
        }
        if begun.elapsed() > PATIENCE {
            break;
        }
    }
    Ok(tried)
}

/// Rewards of wrong answers, and a warning about those that always succeed.
fn not_told_apart(tried: &AttemptTallies) -> String {
    let wrong = tried.text();
    let rewards = if wrong.is_empty() {
        wrong
    } else {
        format!("; {wrong}{}", tried.missing())
    };
    let same = tried
        .all()
        .find(|(_, t)| t.successes == t.tried && t.tried > 1);
    match same {
        Some((name, tally)) => format!(
            "{rewards}; warning: {name} succeeds in {} of {} tasks as well: the reward does not tell it from a \
             right one",
            tally.successes, tally.tried
        ),
        None => rewards,
    }
}

/// Tries a row's columns as answers, and the environment's gold policy, if there are no right answers. A
/// reward that asks a server is tried once a task.
///
/// # Errors
/// Same as [`trial`].
async fn unknown(
    envs: &dyn EnvFactory,
    tasks: &[Task],
    outside: bool,
    columns: bool,
) -> Result<AttemptTallies, Failure> {
    let (mut tried, begun) = (AttemptTallies::default(), Instant::now());
    for task in tasks {
        let solved = gold(envs, task).await?;
        let named: &[(&str, &str)] = match (outside, &solved) {
            (true, Some(_)) => &[],
            (true, None) => &[(ONE, "1")],
            (false, _) => &[(ONE, "1"), (EMPTY, "")],
        };
        if let Some(outcome) = &solved {
            tried.add(GOLD, outcome);
        }
        for &(name, said) in named {
            let outcome = trial(envs, task, said).await?;
            tried.add(name, &outcome);
        }
        if columns && !outside {
            for (column, said) in texts(task) {
                let outcome = trial(envs, task, &said).await?;
                tried.add(&format!("column {column}"), &outcome);
            }
            let row = trial(envs, task, &task.data.to_string()).await?;
            tried.add(ROW, &row);
        }
        if begun.elapsed() > PATIENCE {
            break;
        }
    }
    Ok(tried)
}

/// The score of the gold policy by the recipe's reward; `None` without one, and where a group is scored
/// together.
///
/// # Errors
/// If the environment fails.
async fn gold(envs: &dyn EnvFactory, task: &Task) -> Result<Option<Outcome>, Failure> {
    let failed = |e| Failure::input(format!("env: task {}: gold policy: {e}", task.id));
    let alone = envs.group_reward(task).is_none();
    if !alone || envs.gold(task, 0).map_err(failed)?.is_none() {
        return Ok(None);
    }
    let played = sinew_env::gold_run(envs, task).await.map_err(failed)?;
    Ok(Some(played.0))
}

/// The first columns of a row that can be an answer, as text.
fn texts(task: &Task) -> Vec<(String, String)> {
    let columns = task.data.as_object().into_iter().flatten();
    let text = |(name, value): (&String, &Value)| {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Number(_) | Value::Bool(_) => value.to_string(),
            Value::Null | Value::Array(_) | Value::Object(_) => return None,
        };
        (text.len() <= LONGEST).then(|| (name.clone(), text))
    };
    columns.filter_map(text).take(COLUMNS).collect()
}
