//! Floors of an environment: rewards of policies that do not solve the task.
//!
//! | floor | policy |
//! |---|---|
//! | `constant` | the best of some scripts that are the same for every task: gold runs of other tasks, single turns again and again |
//! | `other_gold` | the gold run of another task |
//! | `blind` | the gold run of another task, with the words of its first observation replaced by those of this one's: no later observation is read |
//! | `no_tool` | the best of some texts, without a call |
//! | `odd` | calls and texts with values that are huge, not finite, or of a wrong type |
//!
//! A floor above a third of the gold policy's reward is a warning: much of a training's gain may be that
//! floor. Silence and random calls are the policies `null` and `random` of the check itself.

use crate::findings::{Draw, EnvCheck, Finding, failed, line};
use serde_json::{Value, json};
use sinew_env::{Action, EnvError, EnvFactory};
use sinew_types::{Outcome, Task, ToolCall, ToolSpec};
use std::fmt::Display;
use std::time::{Duration, Instant};

/// The share of gold's reward above which a floor is a warning.
const FLOOR: f64 = 1.0 / 3.0;
/// Turns of a script, at most.
const TURNS: usize = 64;
/// Turns that are played again and again.
const REPEATS: usize = 8;
/// Scripts of one floor, at most; none begins later than [`BUDGET`] after the first.
const SCRIPTS: usize = 24;
const BUDGET: Duration = Duration::from_secs(4);
/// Texts that models write when they do nothing.
const TEXTS: [&str; 6] = ["Done.", "yes", "0", "1", "A", "I do not know."];
/// Texts in the place of a number or a word.
const ODD_TEXTS: [&str; 8] = [
    "inf",
    "-inf",
    "nan",
    "1e999",
    "1e308",
    "99999999999999999999999999",
    "-1",
    "\u{0}",
];

/// A policy that is known before its episode begins.
#[derive(Clone, Debug, PartialEq)]
struct Script {
    /// Description for display.
    name: String,
    turns: Vec<Action>,
    /// The task that it comes from, where it is not a policy but the solution.
    of: Option<usize>,
}

/// A task with its first observation and its gold run.
struct KnownTask<'a> {
    task: &'a Task,
    words: Vec<String>,
    tools: Vec<ToolSpec>,
    gold: Vec<Action>,
}

/// Lines of the report, in the order of the table. None if no task starts, which another check reports.
pub(crate) async fn floors(factory: &dyn EnvFactory, tasks: &[Task]) -> Vec<EnvCheck> {
    let mut known = Vec::new();
    for task in tasks {
        match learned(factory, task).await {
            Ok(one) => known.push(one),
            Err(_) => return Vec::new(),
        }
    }
    let (mut reward, mut count) = (0.0, 0);
    for one in known.iter().filter(|one| !one.gold.is_empty()) {
        if let Ok(Some(outcome)) = played(factory, one.task, &one.gold).await {
            (reward, count) = (reward + outcome.reward, count + 1);
        }
    }
    let gold = (count > 0).then(|| reward / f64::from(count));
    let mut lines = Vec::new();
    if known.len() > 1 {
        lines.push(best("constant", factory, &known, constants(&known), gold).await);
        lines.push(transferred("other_gold", factory, &known, gold).await);
        lines.push(transferred("blind", factory, &known, gold).await);
    }
    lines.push(best("no_tool", factory, &known, texts(&known), gold).await);
    lines.retain(|line| line.values.get("episodes").is_none_or(|n| *n != json!(0)));
    lines.push(odd(factory, &known).await);
    lines
}

/// Begins an episode of a task, and asks for its gold run.
async fn learned<'a>(factory: &dyn EnvFactory, task: &'a Task) -> Result<KnownTask<'a>, EnvError> {
    let mut env = factory.create(task)?;
    let reset = env.reset().await;
    env.close().await?;
    let reset = reset?;
    let seen: Vec<_> = reset.messages.iter().map(|m| m.content.text()).collect();
    let turns = (0..TURNS).map_while(|turn| factory.gold(task, turn).ok().flatten());
    Ok(KnownTask {
        task,
        words: words(&seen.join("\n")),
        tools: reset.tools,
        gold: turns.collect(),
    })
}

/// The outcome of a script; `None`: the episode has no score.
async fn played(
    factory: &dyn EnvFactory,
    task: &Task,
    turns: &[Action],
) -> Result<Option<Outcome>, EnvError> {
    let mut env = factory.create(task)?;
    let play = async {
        env.reset().await?;
        // Rewards of turns are a part of what an episode earns.
        let mut earned = 0.0;
        for turn in turns {
            let step = env.step(turn.clone()).await?;
            earned += step.process_reward;
            if let Some(outcome) = step.outcome {
                return Ok((outcome, earned));
            }
        }
        Ok((env.score().await?, earned))
    };
    let played: Result<(Outcome, f64), EnvError> = play.await;
    env.close().await?;
    let outcome = played.map(|(outcome, earned)| Outcome {
        reward: outcome.reward + earned,
        ..outcome
    });
    outcome.map(|o| (!o.unscored).then_some(o))
}

/// Scripts that are the same for every task.
fn constants(known: &[KnownTask<'_>]) -> Vec<Script> {
    let mut scripts: Vec<Script> = Vec::new();
    let mut add = |name: String, turns: Vec<Action>, of| {
        if !turns.is_empty() && scripts.iter().all(|s| s.turns != turns) {
            scripts.push(Script { name, turns, of });
        }
    };
    for (i, one) in known.iter().enumerate() {
        let name = format!("the gold run of task {}", one.task.id);
        add(name, one.gold.clone(), Some(i));
    }
    for tool in known.first().map_or(&[][..], |one| &one.tools) {
        for seed in 0..2 {
            let arguments = Draw(seed).value(&tool.parameters, 0);
            let name = format!("{}({arguments}) again and again", tool.name);
            add(name, vec![called(&tool.name, arguments); REPEATS], None);
        }
    }
    for (i, one) in known.iter().enumerate() {
        for turn in &one.gold {
            let name = format!("one turn of task {} again and again", one.task.id);
            add(name, vec![turn.clone(); REPEATS], Some(i));
        }
    }
    scripts
}

/// Texts without a call.
fn texts(known: &[KnownTask<'_>]) -> Vec<Script> {
    let mut scripts: Vec<Script> = Vec::new();
    let mut add = |text: &str, of| {
        let turns = vec![Action::say(text); REPEATS];
        if !text.is_empty() && scripts.iter().all(|s| s.turns != turns) {
            let name = format!("{text:.60?}");
            scripts.push(Script { name, turns, of });
        }
    };
    TEXTS.into_iter().for_each(|text| add(text, None));
    for (i, one) in known.iter().enumerate() {
        for turn in one.gold.iter().filter(|t| t.tool_calls.is_empty()) {
            add(&turn.text, Some(i));
        }
    }
    scripts
}

/// The script that earns most, on tasks that it does not come from.
async fn best(
    name: &'static str,
    factory: &dyn EnvFactory,
    known: &[KnownTask<'_>],
    scripts: Vec<Script>,
    gold: Option<f64>,
) -> EnvCheck {
    let (started, mut found, mut tried) = (Instant::now(), None::<(f64, ScriptRun)>, 0);
    for script in scripts.iter().take(SCRIPTS) {
        if tried > 0 && started.elapsed() > BUDGET {
            break;
        }
        tried += 1;
        let mut sum = ScriptRun::new(script.name.clone());
        for (i, one) in known.iter().enumerate() {
            if script.of == Some(i) {
                continue;
            }
            if let Err(e) = sum.play(factory, one.task, &script.turns).await {
                return failed(name, e);
            }
        }
        if sum.episodes > 0 && found.as_ref().is_none_or(|(most, _)| sum.mean() > *most) {
            found = Some((sum.mean(), sum));
        }
    }
    let sum = found.map_or_else(|| ScriptRun::new("nothing".into()), |(_, sum)| sum);
    let of = format!("{} ({tried} of {} tried)", sum.name, scripts.len());
    sum.into_line(name, of, gold)
}

/// Gold runs of the next task as they are, or of the most similar one with the words of the first observation
/// replaced.
async fn transferred(
    name: &'static str,
    factory: &dyn EnvFactory,
    known: &[KnownTask<'_>],
    gold: Option<f64>,
) -> EnvCheck {
    let (started, mut sum) = (Instant::now(), ScriptRun::new(name.into()));
    for (i, one) in known.iter().enumerate() {
        // Replaced words come from the task whose first observation has most in common: types may be hidden.
        let blind = name == "blind";
        let others = known.iter().cycle().skip(i + 1).take(known.len() - 1);
        let common = |o: &&KnownTask<'_>| o.words.iter().filter(|w| one.words.contains(w)).count();
        let mut found: Option<(usize, &KnownTask<'_>)> = None;
        for other in others {
            let shared = common(&other);
            if found.is_none_or(|(most, _)| blind && shared > most) {
                found = Some((shared, other));
            }
        }
        let Some((_, other)) = found else {
            continue;
        };
        // A task of one turn has no observation but the first.
        if other.gold.is_empty() || (blind && other.gold.len() < 2) {
            continue;
        }
        if started.elapsed() > BUDGET {
            break;
        }
        let turns = if blind {
            replaced(other, &one.words)
        } else {
            other.gold.clone()
        };
        if let Err(e) = sum.play(factory, one.task, &turns).await {
            return failed(name, e);
        }
    }
    let what = match name {
        "blind" => "another task's gold run with the words of this one",
        _ => "the gold run of another task",
    };
    sum.into_line(name, what.into(), gold)
}

/// The rewards that a policy earned.
struct ScriptRun {
    name: String,
    episodes: usize,
    reward: f64,
    successes: usize,
}

impl ScriptRun {
    fn new(name: String) -> Self {
        Self {
            name,
            episodes: 0,
            reward: 0.0,
            successes: 0,
        }
    }

    /// Plays one episode. One without a score is not counted.
    async fn play(
        &mut self,
        factory: &dyn EnvFactory,
        task: &Task,
        turns: &[Action],
    ) -> Result<(), String> {
        let outcome = played(factory, task, turns).await;
        if let Some(outcome) = outcome.map_err(|e| format!("task {}: {e}", task.id))? {
            self.episodes += 1;
            self.reward += outcome.reward;
            self.successes += usize::from(outcome.success);
        }
        Ok(())
    }

    fn mean(&self) -> f64 {
        self.reward / self.episodes.max(1) as f64
    }

    fn into_line(self, name: &'static str, what: String, gold: Option<f64>) -> EnvCheck {
        let (mean, count) = (self.mean(), self.episodes);
        let values =
            json!({"episodes": count, "reward": mean, "successes": self.successes, "gold": gold});
        let of = gold.map_or(String::new(), |gold| format!(" of gold's {gold:.3}"));
        let detail = format!(
            "reward {mean:.3}{of}, {} of {count} succeed: {what}",
            self.successes
        );
        if above(mean, self.successes, count, gold) {
            let detail = format!("{detail}; that is above a third");
            line(name, Finding::Warning, detail, values)
        } else {
            line(name, Finding::Ok, detail, values)
        }
    }
}

/// Whether a policy that does not use the task earns more than a third of gold, or succeeds in more than a
/// third. The scale of rewards is not known if there is no gold policy.
pub(crate) fn above(mean: f64, successes: usize, count: usize, gold: Option<f64>) -> bool {
    let share = successes as f64 / count.max(1) as f64;
    gold.is_some_and(|gold| gold > 0.0 && mean > FLOOR * gold) || share > FLOOR
}

/// A turn with one call.
fn called(name: &str, arguments: Value) -> Action {
    Action {
        tool_calls: vec![ToolCall {
            id: "call-0".into(),
            name: name.into(),
            arguments,
        }],
        ..Action::say("")
    }
}

/// Words and numbers of a text.
fn words(text: &str) -> Vec<String> {
    let inside = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | '@');
    let parts = text.split(|c| !inside(c));
    let trimmed = parts.map(|p| p.trim_matches(|c| c == '.' || c == '-' || c == '_'));
    trimmed
        .filter(|p| !p.is_empty())
        .map(str::to_owned)
        .collect()
}

/// The gold run of a task, as if the words of its first observation were other ones at the same places.
fn replaced(other: &KnownTask<'_>, now: &[String]) -> Vec<Action> {
    let word = |text: &str| {
        let asked = words(text);
        let known = &other.words;
        let windows = known.windows(asked.len().max(1));
        let at = (!asked.is_empty())
            .then(|| windows.into_iter().position(|w| w == asked.as_slice()))
            .flatten()?;
        // Counted from the nearer end: first observations differ in length.
        let from_end = known.len() - at;
        let at = if at <= from_end {
            at
        } else {
            now.len().checked_sub(from_end)?
        };
        now.get(at..at + asked.len()).map(|found| found.join(" "))
    };
    let turn = |action: &Action| {
        let mut action = action.clone();
        for call in &mut action.tool_calls {
            for value in call
                .arguments
                .as_object_mut()
                .into_iter()
                .flat_map(|o| o.values_mut())
            {
                if let Some(new) = word(&plain(value)) {
                    *value = if value.is_number() {
                        new.parse()
                            .map_or(value.clone(), |n: serde_json::Number| n.into())
                    } else {
                        new.into()
                    };
                }
            }
        }
        if action.tool_calls.is_empty() {
            action.text = by_parts(&action.text, |part| {
                let bare = part.trim_end_matches([',', '.', ';']);
                let end = &part[bare.len()..];
                word(bare).map_or(part.to_owned(), |new| format!("{new}{end}"))
            });
        }
        action
    };
    other.gold.iter().map(turn).collect()
}

/// A text in which `new` replaces each part between spaces, line by line.
fn by_parts(text: &str, new: impl Fn(&str) -> String) -> String {
    let line = |line: &str| line.split(' ').map(&new).collect::<Vec<_>>().join(" ");
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Formats a value as it would appear in a text.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(n) => n.to_string(),
        _ => String::new(),
    }
}

/// Values that no tool expects.
fn odd_values() -> Vec<Value> {
    let mut values = vec![
        json!(1e308),
        json!(-1e308),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(-1),
        json!(0.5),
        Value::Null,
        json!(true),
        json!([]),
        json!({}),
        json!("x".repeat(100_000)),
        json!(""),
    ];
    values.extend(ODD_TEXTS.map(Value::from));
    values
}

/// Turns with odd values: one argument of a call that fits otherwise, and numbers of a gold text.
fn odd_turns(one: &KnownTask<'_>) -> Vec<Action> {
    let mut turns = Vec::new();
    for tool in &one.tools {
        let gold = one.gold.iter().flat_map(|a| &a.tool_calls);
        let fits = gold.clone().find(|call| call.name == tool.name);
        let fits = fits.map_or_else(
            || Draw(0).value(&tool.parameters, 0),
            |call| call.arguments.clone(),
        );
        let names = tool.parameters["properties"].as_object();
        for name in names.into_iter().flat_map(|names| names.keys()) {
            for value in odd_values() {
                let mut arguments = fits.clone();
                arguments[name] = value;
                turns.push(called(&tool.name, arguments));
            }
        }
        turns.extend(
            odd_values()
                .into_iter()
                .map(|value| called(&tool.name, value)),
        );
    }
    let number = |part: &str| part.trim_matches(',').parse::<f64>().is_ok();
    for text in ODD_TEXTS {
        turns.push(Action::say(text));
        for gold in one.gold.iter().filter(|a| a.tool_calls.is_empty()) {
            let odd = by_parts(&gold.text, |part| {
                if number(part) {
                    part.replace(part.trim_matches(','), text)
                } else {
                    part.to_owned()
                }
            });
            // A solution without a number is unchanged, and left out.
            if odd != gold.text {
                turns.push(Action::say(odd));
            }
        }
    }
    turns
}

/// Plays odd turns: each must be answered, and none may win or leave the episode without a score.
async fn odd(factory: &dyn EnvFactory, known: &[KnownTask<'_>]) -> EnvCheck {
    let (started, mut played, mut all, mut won) = (Instant::now(), 0, 0, 0);
    for one in known.iter().take(2) {
        let turns = odd_turns(one);
        all += turns.len();
        let mut rest = turns.as_slice();
        while !rest.is_empty() && started.elapsed() < BUDGET {
            match odd_episode(factory, one.task, rest).await {
                Ok((count, success)) => {
                    played += count;
                    won += usize::from(success);
                    rest = &rest[count..];
                }
                Err(why) => return failed("odd", why),
            }
        }
    }
    let values = json!({"turns": played, "successes": won});
    let detail = format!("{played} of {all} turns with odd values were answered");
    match won {
        0 => line("odd", Finding::Ok, detail, values),
        _ => {
            let detail = format!("{detail}; {won} episodes of them succeed");
            line("odd", Finding::Warning, detail, values)
        }
    }
}

/// Plays turns until the episode ends, at most [`TURNS`]; gives how many there were, and whether they won.
async fn odd_episode(
    factory: &dyn EnvFactory,
    task: &Task,
    turns: &[Action],
) -> Result<(usize, bool), String> {
    let failed = |what: &str, e: &dyn Display| format!("task {}: {what}: {e}", task.id);
    let mut env = factory.create(task).map_err(|e| failed("start", &e))?;
    let mut last = String::new();
    let play = async {
        env.reset().await.map_err(|e| failed("start", &e))?;
        let mut count = 0;
        for turn in turns.iter().take(TURNS) {
            count += 1;
            last = told(turn);
            let step = env.step(turn.clone()).await;
            let step = step.map_err(|e| failed(&last, &e))?;
            if let Some(outcome) = step.outcome {
                return Ok((count, outcome));
            }
        }
        let outcome = env.score().await.map_err(|e| failed(&last, &e))?;
        Ok((count, outcome))
    };
    let ended: Result<_, String> = play.await;
    env.close().await.map_err(|e| failed("end", &e))?;
    let (count, outcome) = ended?;
    match outcome.unscored_reason.filter(|_| outcome.unscored) {
        Some(why) => Err(failed(&format!("no score after {last}"), &why)),
        None => Ok((count, outcome.success)),
    }
}

/// A turn in one line.
fn told(turn: &Action) -> String {
    let text = match turn.tool_calls.first() {
        Some(call) => format!("{}({})", call.name, call.arguments),
        None => format!("{:?}", turn.text),
    };
    crate::http::cut(&text, 120)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::TaskId;

    fn known<'a>(task: &'a Task, seen: &str, gold: Vec<Action>) -> KnownTask<'a> {
        KnownTask {
            task,
            words: words(seen),
            tools: Vec::new(),
            gold,
        }
    }

    #[test]
    fn a_blind_run_has_the_words_of_its_own_task() {
        let task = Task {
            id: TaskId::new("t"),
            kind: "k".into(),
            ..Task::default()
        };
        let gold = vec![
            called("bring", json!({"disc": "dark red", "x": 12.5, "n": 3})),
            Action::say("go red, 12.5"),
        ];
        let other = known(&task, "Bring the dark red disc to (12.5, 40).", gold);
        let now = words("Bring the light blue disc to (7, 88.5).");
        let turns = replaced(&other, &now);
        // A number that the first observation does not have stays.
        let expected = json!({"disc": "light blue", "x": 7, "n": 3});
        assert_eq!(turns[0].tool_calls[0].arguments, expected);
        assert_eq!(turns[1].text, "go blue, 7");
    }

    #[test]
    fn a_floor_is_a_share_of_gold() {
        assert!(above(0.4, 0, 10, Some(1.0)) && !above(0.3, 3, 10, Some(1.0)));
        assert!(above(0.2, 0, 10, Some(0.5)) && above(0.0, 4, 10, Some(1.0)));
        assert!(!above(20.0, 0, 10, None) && above(20.0, 4, 10, None));
    }
}
