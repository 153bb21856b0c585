//! `sinew env check`: runs an environment with simple policies and reports errors before a model is trained
//! on it.
//!
//! Policies that do not use the task must fail: a model can get their reward without learning the task, and
//! it is the floor that a gain is measured from. The gold policy must succeed: a task without a solution
//! teaches nothing. Equal actions must lead to equal results: a group of episodes is compared on the same
//! task, and noise of the environment looks like a difference of actions.

use crate::env::PythonEnvFactory;
use crate::findings::{Draw, failed, line};
pub use crate::findings::{EnvCheck, Finding};
use crate::floors::{above, floors};
use futures::future::try_join_all;
use serde::Serialize;
use serde_json::{Value, json};
use sinew_env::{Action, Env, EnvError, EnvFactory};
use sinew_types::{Content, Message, Outcome, Task, ToolCall, ToolSpec};
use std::time::{Duration, Instant};

/// Turns of one episode of a policy.
const TURNS: usize = 8;
/// Names of columns that hold the solution.
const ANSWERS: [&str; 8] = [
    "answer", "answers", "solution", "target", "expected", "gold", "label", "want",
];
/// Minimum length of an answer that is searched in prompts. Shorter ones occur in most texts by chance.
const SHORTEST_ANSWER: usize = 3;

/// Report on an environment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckReport {
    /// `file:line` of the class, or the recipe.
    pub place: String,
    /// Tools as the model sees them.
    pub tools: Vec<ToolSpec>,
    /// One entry for each check, in the order in which they ran.
    pub checks: Vec<EnvCheck>,
}

impl CheckReport {
    /// True if training would not fail.
    pub fn passed(&self) -> bool {
        self.checks.iter().all(|c| c.finding != Finding::Error)
    }

    /// Runs all checks that any environment can pass on `tasks`, one episode at a time. An episode has at
    /// most 8 turns. Checks that fail do not end the report. `place` names the checked thing; the speed is
    /// that of `sessions` episodes at once.
    pub async fn any(
        factory: &dyn EnvFactory,
        tasks: &[Task],
        place: String,
        sessions: usize,
    ) -> Self {
        let mut checks = common(factory, tasks).await;
        checks.push(speed(factory, tasks, sessions).await);
        Self {
            place,
            tools: tools(factory, tasks).await,
            checks,
        }
    }

    /// Checks a class: all of [`CheckReport::any`], and its snapshots. The speed is that of one episode.
    pub async fn of(factory: &PythonEnvFactory, tasks: &[Task]) -> Self {
        Self::at_once(factory, tasks, 1).await
    }

    /// Checks like [`CheckReport::of`], but with the speed of `sessions` episodes at once.
    pub async fn at_once(factory: &PythonEnvFactory, tasks: &[Task], sessions: usize) -> Self {
        let mut checks = common(factory, tasks).await;
        if factory.info().snapshots {
            checks.push(snapshots(factory, tasks).await);
        }
        checks.push(speed(factory, tasks, sessions).await);
        Self {
            place: factory.info().place.clone(),
            tools: factory.info().tools.clone(),
            checks,
        }
    }
}

/// Checks of every environment, except for its speed.
async fn common(factory: &dyn EnvFactory, tasks: &[Task]) -> Vec<EnvCheck> {
    let mut checks = vec![
        leaks(factory, tasks).await,
        gold(factory, tasks).await,
        simple(factory, tasks, Policy::Null).await,
        simple(factory, tasks, Policy::Random).await,
    ];
    checks.extend(floors(factory, tasks).await);
    checks.push(determinism(factory, tasks).await);
    checks
}

/// Tools of the first task; none if it does not start, which another check reports.
async fn tools(factory: &dyn EnvFactory, tasks: &[Task]) -> Vec<ToolSpec> {
    let Some(Ok(mut env)) = tasks.first().map(|task| factory.create(task)) else {
        return Vec::new();
    };
    let reset = env.reset().await;
    let closed = env.close().await;
    match (reset, closed) {
        (Ok(reset), Ok(())) => reset.tools,
        _ => Vec::new(),
    }
}

/// A policy that does not use the task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    /// Says nothing.
    Null,
    /// Calls random tools with random arguments that fit their schemas. Text without tools.
    Random,
}

impl Policy {
    /// Name in the report.
    fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Random => "random",
        }
    }

    /// A turn of the policy.
    fn action(self, tools: &[ToolSpec], draw: &mut Draw) -> Action {
        if self == Self::Null {
            return Action::say("");
        }
        if tools.is_empty() {
            return Action::say(draw.word());
        }
        let tool = &tools[draw.below(tools.len())];
        let call = ToolCall {
            id: "call-0".into(),
            name: tool.name.clone(),
            arguments: draw.value(&tool.parameters, 0),
        };
        Action {
            tool_calls: vec![call],
            ..Action::say("")
        }
    }
}

/// Record of an episode, for comparisons.
#[derive(Clone, Debug, PartialEq)]
struct PolicyRun {
    /// Score at the end.
    outcome: Outcome,
    /// Observations and rewards of turns, in order.
    seen: Vec<(Content, f64)>,
}

/// Plays one episode. Each turn that the environment answers adds its wall time to `times`.
async fn play(
    factory: &dyn EnvFactory,
    task: &Task,
    policy: Policy,
    seed: u64,
    times: &mut Vec<Duration>,
) -> Result<PolicyRun, EnvError> {
    let mut env = factory.create(task)?;
    let played = turns(env.as_mut(), policy, seed, times).await;
    env.close().await?;
    played
}

/// Begins an episode and plays it to its end.
async fn turns(
    env: &mut dyn Env,
    policy: Policy,
    seed: u64,
    times: &mut Vec<Duration>,
) -> Result<PolicyRun, EnvError> {
    let tools = env.reset().await?.tools;
    rest(env, &tools, policy, seed, times).await
}

/// Plays an episode that has begun to its end.
async fn rest(
    env: &mut dyn Env,
    tools: &[ToolSpec],
    policy: Policy,
    seed: u64,
    times: &mut Vec<Duration>,
) -> Result<PolicyRun, EnvError> {
    let (mut draw, mut seen) = (Draw(seed), Vec::new());
    for _ in 0..TURNS {
        let started = Instant::now();
        let step = env.step(policy.action(tools, &mut draw)).await?;
        times.push(started.elapsed());
        let content = step.observation.map(|o| o.content).unwrap_or_default();
        seen.push((content, step.process_reward));
        if let Some(outcome) = step.outcome {
            return Ok(PolicyRun { outcome, seen });
        }
    }
    let outcome = env.score().await?;
    Ok(PolicyRun { outcome, seen })
}

/// Success and reward of a policy that does not use the task: both must be low.
async fn simple(factory: &dyn EnvFactory, tasks: &[Task], policy: Policy) -> EnvCheck {
    let (mut rewards, mut successes, mut unscored) = (Vec::new(), 0, None);
    for (i, task) in tasks.iter().enumerate() {
        match play(factory, task, policy, i as u64, &mut Vec::new()).await {
            Err(e) => return failed(policy.name(), format!("task {}: {e}", task.id)),
            Ok(played) if played.outcome.unscored => {
                unscored = unscored.or(played.outcome.unscored_reason);
            }
            Ok(played) => {
                let turns: f64 = played.seen.iter().map(|(_, reward)| reward).sum();
                rewards.push(played.outcome.reward + turns);
                successes += usize::from(played.outcome.success);
            }
        }
    }
    let count = rewards.len();
    let mean = rewards.iter().sum::<f64>() / count.max(1) as f64;
    let values =
        json!({"episodes": tasks.len(), "scored": count, "reward": mean, "successes": successes});
    if count == 0 {
        let why = unscored.unwrap_or_else(|| "there is no task".into());
        return line(
            policy.name(),
            Finding::Error,
            format!("no episode has a score: {why}"),
            values,
        );
    }
    let detail = format!("reward {mean:.3}, {successes} of {count} succeed");
    let finding = if above(mean, successes, count, None) {
        Finding::Warning
    } else {
        Finding::Ok
    };
    let detail = match (finding, unscored) {
        (Finding::Warning, _) => format!("{detail}: a model could learn to do nothing useful"),
        (_, Some(why)) => format!("{detail}; {} unscored: {why}", tasks.len() - count),
        _ => detail,
    };
    line(policy.name(), finding, detail, values)
}

/// The gold policy, if there is one, must succeed on every task. A missing policy is not an error: many tasks
/// have no solution that can be written down.
async fn gold(factory: &dyn EnvFactory, tasks: &[Task]) -> EnvCheck {
    let mut turns = 0;
    for task in tasks {
        if let Ok(None) = factory.gold(task, 0) {
            let detail = "there is no gold policy: whether tasks can be solved is not known".into();
            return line("gold", Finding::Ok, detail, Value::Null);
        }
        match sinew_env::gold_run(factory, task).await {
            Ok((outcome, count)) if outcome.success && !outcome.unscored => turns += count,
            Ok((outcome, _)) => {
                let why = outcome
                    .unscored_reason
                    .unwrap_or_else(|| format!("reward {}", outcome.reward));
                let detail = format!("task {}: its solution fails: {why}", task.id);
                return failed("gold", detail);
            }
            Err(e) => return failed("gold", format!("task {}: {e}", task.id)),
        }
    }
    let detail = format!(
        "the solutions of {} tasks succeed in {turns} turns",
        tasks.len()
    );
    line("gold", Finding::Ok, detail, json!({"turns": turns}))
}

/// Equal actions must give equal observations, rewards and outcomes. Random actions from the same seed are
/// played twice in the same worker, so randomness of the process (its hash seed is fixed) is not seen here.
async fn determinism(factory: &dyn EnvFactory, tasks: &[Task]) -> EnvCheck {
    for (i, task) in tasks.iter().enumerate() {
        let run =
            || async move { play(factory, task, Policy::Random, i as u64, &mut Vec::new()).await };
        match (run().await, run().await) {
            (Ok(a), Ok(b)) if a == b => {}
            (Ok(a), Ok(b)) => {
                let turn = a.seen.iter().zip(&b.seen).position(|(a, b)| a != b);
                let place = turn.map_or("in the score".into(), |t| format!("in turn {}", t + 1));
                let detail = format!(
                    "task {}: the same actions led elsewhere {place}; draw from random.Random(task.seed)",
                    task.id
                );
                return line(
                    "determinism",
                    Finding::Warning,
                    detail,
                    json!({"deterministic": false}),
                );
            }
            (Err(e), _) | (_, Err(e)) => {
                return failed("determinism", format!("task {}: {e}", task.id));
            }
        }
    }
    let detail = format!(
        "the same actions gave the same results on {} tasks",
        tasks.len()
    );
    line(
        "determinism",
        Finding::Ok,
        detail,
        json!({"deterministic": true}),
    )
}

/// An episode that continues from a snapshot must give what the first one gives.
async fn snapshots(factory: &PythonEnvFactory, tasks: &[Task]) -> EnvCheck {
    let mut compared = 0;
    for (i, task) in tasks.iter().enumerate() {
        match resumed(factory, task, i as u64).await {
            Ok(Some((first, second))) if first == second => compared += 1,
            Ok(Some(_)) => {
                let detail = format!(
                    "task {}: after restore, the same actions led elsewhere; snapshot must return all of the state",
                    task.id
                );
                return failed("snapshots", detail);
            }
            Ok(None) => {}
            Err(e) => return failed("snapshots", format!("task {}: {e}", task.id)),
        }
    }
    let detail = format!(
        "{compared} of {} episodes went on from a snapshot as before",
        tasks.len()
    );
    line(
        "snapshots",
        Finding::Ok,
        detail,
        json!({"episodes": compared}),
    )
}

/// The rest of an episode after its first turn, played on and played from the snapshot. `None` if the first
/// turn ends it, or the snapshot is too long.
async fn resumed(
    factory: &PythonEnvFactory,
    task: &Task,
    seed: u64,
) -> Result<Option<(PolicyRun, PolicyRun)>, EnvError> {
    let (mut first, mut draw) = (factory.env(task), Draw(seed));
    let tools = first.reset().await?.tools;
    let step = first.step(Policy::Random.action(&tools, &mut draw)).await?;
    let twin = match step.outcome {
        Some(_) => None,
        None => first.twin().await?,
    };
    let Some(mut second) = twin else {
        first.close().await?;
        return Ok(None);
    };
    let mut played = Vec::new();
    for env in [&mut first, &mut second] {
        played.push(rest(env, &tools, Policy::Random, draw.0, &mut Vec::new()).await);
        env.close().await?;
    }
    let (second, first) = (played.pop(), played.pop());
    Ok(first.transpose()?.zip(second.transpose()?))
}

/// Checks that columns with the solution do not occur in the prompt.
async fn leaks(factory: &dyn EnvFactory, tasks: &[Task]) -> EnvCheck {
    for task in tasks {
        let prompt = match prompt(factory, task).await {
            Ok(messages) => messages,
            Err(e) => return failed("leaks", format!("task {}: {e}", task.id)),
        };
        let text: Vec<String> = prompt
            .iter()
            .map(|m| m.content.text().to_lowercase())
            .collect();
        let text = text.join("\n");
        for (column, value) in task.data.as_object().into_iter().flatten() {
            if ANSWERS.contains(&column.to_lowercase().as_str()) && holds(&text, value) {
                let detail = format!(
                    "task {}: the prompt contains the column {column}: {value}",
                    task.id
                );
                return line("leaks", Finding::Warning, detail, json!({"column": column}));
            }
        }
    }
    line(
        "leaks",
        Finding::Ok,
        "no prompt contains its answer".into(),
        Value::Null,
    )
}

/// The first messages of an episode, which is ended again.
async fn prompt(factory: &dyn EnvFactory, task: &Task) -> Result<Vec<Message>, EnvError> {
    let mut env = factory.create(task)?;
    let reset = env.reset().await;
    env.close().await?;
    Ok(reset?.messages)
}

/// True if a text contains a value as whole words.
fn holds(text: &str, value: &Value) -> bool {
    let value = match value {
        Value::String(s) => s.trim().to_lowercase(),
        Value::Number(n) => n.to_string(),
        _ => return false,
    };
    if value.chars().count() < SHORTEST_ANSWER {
        return false;
    }
    let word = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    text.match_indices(&value).any(|(at, found)| {
        !word(text[..at].chars().next_back()) && !word(text[at + found.len()..].chars().next())
    })
}

/// Measures steps per second with `sessions` concurrent episodes: 200 episodes, or one for each task if there
/// are more tasks. After 5 seconds no further one starts. For a Python class, a step includes the
/// communication with the worker, about 0.2 ms.
async fn speed(factory: &dyn EnvFactory, tasks: &[Task], sessions: usize) -> EnvCheck {
    let started = Instant::now();
    let each = 200usize.max(tasks.len()).div_ceil(sessions);
    let session = |own: usize| async move {
        let mut times = Vec::new();
        for (i, task) in tasks.iter().cycle().skip(own).take(each).enumerate() {
            let seed = (own * each + i) as u64;
            let played = play(factory, task, Policy::Random, seed, &mut times).await;
            played.map_err(|e| format!("task {}: {e}", task.id))?;
            if started.elapsed() > Duration::from_secs(5) {
                break;
            }
        }
        Ok(times)
    };
    let played: Result<Vec<Vec<Duration>>, String> = try_join_all((0..sessions).map(session)).await;
    let mut times = match played {
        Ok(times) => times.concat(),
        Err(why) => return failed("speed", why),
    };
    // Starts and ends of a single episode do not count; with several episodes, all of it takes time from the
    // others.
    let all: Duration = match sessions {
        1 => times.iter().sum(),
        _ => started.elapsed(),
    };
    times.sort_unstable();
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    let rate = times.len() as f64 / all.as_secs_f64().max(1e-9);
    let median_ms = median.as_secs_f64() * 1e3;
    let at_once = match sessions {
        1 => "one episode".to_owned(),
        _ => format!("{sessions} episodes at once"),
    };
    let detail = format!("{rate:.0} steps/s in {at_once}, {median_ms:.2} ms a step (median)");
    let finding = if median_ms > 1000.0 && sessions == 1 {
        Finding::Warning
    } else {
        Finding::Ok
    };
    line(
        "speed",
        finding,
        detail,
        json!({"steps_per_s": rate, "step_ms": median_ms, "sessions": sessions}),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_found_as_whole_words() {
        assert!(holds("the answer is 512.", &json!(512)));
        assert!(holds("say blue green", &json!("Blue green")));
        assert!(!holds("15123", &json!(512)));
        // Too short to mean anything.
        assert!(!holds("a 4 b", &json!(4)));
    }
}
