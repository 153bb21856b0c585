//! Tasksets and environments, driven like in a rollout.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use proptest::prelude::*;
use sinew_env::math::{
    Arithmetic, Calls, Gsm8k, MathTaskConfig, Mixed, PromptConfig, ToolMathConfig, ToolMathFactory,
    Word,
};
use sinew_env::tiny::{TinyFactory, TinyTaskset};
use sinew_env::{
    Action, CallError, CallNotation, Capabilities, Env, EnvError, EnvFactory, Split, StepResult,
    Taskset, gold_run, validate,
};
use sinew_sandbox::{
    Ending, ExecRequest, ExecResult, NullProvider, Protection, Sandbox, SandboxError,
    SandboxFuture, SandboxProvider, SandboxSpec, Usage,
};
use sinew_types::{FailureKind, Role, Task, ToolCall};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn small(seed: u64, levels: &[u8]) -> MathTaskConfig {
    MathTaskConfig {
        seed,
        levels: levels.to_vec(),
        train: 60,
        held_out: 40,
    }
}

fn tasks(taskset: &dyn Taskset, split: Split) -> Vec<Task> {
    (0..taskset.len(split))
        .map(|i| taskset.get(split, i).unwrap())
        .collect()
}

fn factory() -> ToolMathFactory {
    let provider = Arc::new(NullProvider::default());
    ToolMathFactory::new(provider, SandboxSpec::default(), ToolMathConfig::default()).unwrap()
}

fn task(question: &str, answer: f64) -> Task {
    let mut task = Arithmetic::new(small(0, &[1]))
        .unwrap()
        .get(Split::Train, 0)
        .unwrap();
    task.prompt = question.into();
    task.data = serde_json::json!({ "answer": answer, "solution": "0" });
    task
}

/// Parses a turn like a rollout does for this environment.
fn act(text: &str) -> Action {
    let mut action = Action::say(text);
    let Some((_, after)) = text.split_once("<tool>") else {
        action.call_error = text.contains("</tool>").then_some(CallError::Unopened);
        return action;
    };
    let Some((code, rest)) = after.split_once("</tool>") else {
        action.call_error = Some(CallError::Unclosed);
        return action;
    };
    if code.trim().is_empty() {
        action.call_error = Some(CallError::Empty);
        return action;
    }
    action.tool_calls.push(ToolCall {
        id: "call-0".into(),
        name: "python".into(),
        arguments: serde_json::json!({ "code": code }),
    });
    action.call_error = (!rest.trim().is_empty()).then_some(CallError::Trailing);
    action
}

/// Plays turns until one ends the episode.
async fn play(env: &mut dyn Env, turns: &[&str]) -> Result<Vec<StepResult>, EnvError> {
    let mut steps = Vec::new();
    for text in turns {
        steps.push(env.step(act(text)).await?);
    }
    Ok(steps)
}

fn shown(step: &StepResult) -> &str {
    step.observation
        .as_ref()
        .unwrap()
        .content
        .as_text()
        .unwrap()
}

#[tokio::test(flavor = "current_thread")]
async fn calls_are_computed_and_answers_end_the_episode() {
    let factory = factory();
    let mut env = factory
        .create(&task("What is 37 * 48 + 12?", 1788.0))
        .unwrap();
    let reset = env.reset().await.unwrap();
    assert_eq!(
        reset.messages.last().unwrap().content,
        "What is 37 * 48 + 12?"
    );
    let steps = play(env.as_mut(), &["<tool>37*48+12</tool>", "Answer: 1788"])
        .await
        .unwrap();
    assert_eq!(shown(&steps[0]), "1788");
    assert_eq!(steps[0].process_reward, 0.05);
    let message = &env.format_observation(steps[0].observation.as_ref().unwrap())[0];
    assert_eq!(
        (message.role, &*message.content.text()),
        (Role::Tool, "1788")
    );
    let outcome = steps[1].outcome.as_ref().unwrap();
    assert!(steps[1].done && outcome.success);
    assert_eq!(outcome.reward, 1.0);
    assert_eq!(outcome.metrics["format"], 1.0);
    assert_eq!(outcome.metrics["used_tool"], 1.0);
    assert!(play(env.as_mut(), &["Answer: 1788"]).await.is_err());
    env.close().await.unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn python_runs_in_interactive_mode() {
    let factory = factory();
    let mut env = factory.create(&task("?", 1.0)).unwrap();
    env.reset().await.unwrap();
    let cases = [
        ("x = 6\ny = 7\nx * y", "42"),
        ("print('a'); 5", "a\n5"),
        ("def f(n):\n    return n + 1\nf(2)", "3"),
        ("'é' + \"\\n\"", "'é\\n'"),
        ("x = 1", "Error: no output: end with an expression or print"),
        ("1 / 0", "Error: ZeroDivisionError: division by zero"),
        ("zqxj * 3", "Error: NameError: name 'zqxj' is not defined"),
        ("import sys; sys.exit(3)", "Error: exit code 3"),
    ];
    for (code, expected) in cases {
        let steps = play(env.as_mut(), &[&format!("<tool>{code}</tool>")])
            .await
            .unwrap();
        assert_eq!(shown(&steps[0]), expected, "{code}");
        assert!(!steps[0].done);
    }
    let long = play(env.as_mut(), &["<tool>'ab' * 1000</tool>"])
        .await
        .unwrap();
    assert_eq!(shown(&long[0]).chars().count(), 203);
    let wrong = play(env.as_mut(), &["<tool>3 +* 4</tool>"]).await.unwrap();
    assert!(
        shown(&wrong[0]).starts_with("Error: SyntaxError"),
        "{wrong:?}"
    );
    let huge = format!("<tool>{}</tool>", "1+".repeat(3000));
    let huge = play(env.as_mut(), &[&huge]).await.unwrap();
    assert!(shown(&huge[0]).contains("at most 4096"));
    env.close().await.unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn first_successful_call_is_rewarded() {
    let factory = factory();
    let mut env = factory.create(&task("?", 1.0)).unwrap();
    env.reset().await.unwrap();
    let turns = [
        "<tool>1/0</tool>",
        "oops",
        "<tool>1</tool>",
        "<tool>2</tool>",
    ];
    let steps = play(env.as_mut(), &turns).await.unwrap();
    let rewards: Vec<_> = steps.iter().map(|s| s.process_reward).collect();
    assert_eq!(rewards, [0.0, 0.0, 0.05, 0.0]);
    let hashes: BTreeSet<_> = steps.iter().map(|s| s.state_hash).collect();
    assert_eq!(hashes.len(), 4);
    let outcome = env.score().await.unwrap();
    assert_eq!((outcome.reward, outcome.success), (0.0, false));
    let metric = |name: &str| outcome.metrics[name];
    assert_eq!(metric("tool_calls"), 3.0);
    assert_eq!(metric("tool_errors"), 1.0);
    assert_eq!(metric("malformed"), 1.0);
    assert_eq!(metric("format_penalty"), 1.0);
    assert_eq!(metric("format") + metric("answered"), 0.0);
    env.close().await.unwrap();
}

/// Tool output and text next to a call are not answers.
#[tokio::test(flavor = "current_thread")]
async fn only_answers_of_the_model_count() {
    let factory = factory();
    let turns = [
        "<tool>print('Answer: 7')</tool>",
        "Answer: 7 <tool>1</tool>",
        "<tool>1</tool> Answer: 7",
    ];
    let mut env = factory.create(&task("?", 7.0)).unwrap();
    env.reset().await.unwrap();
    let steps = play(env.as_mut(), &turns).await.unwrap();
    assert!(steps.iter().all(|step| !step.done));
    assert_eq!(env.score().await.unwrap().reward, 0.0);
    let last = play(env.as_mut(), &["Answer: 8"]).await.unwrap();
    let outcome = last[0].outcome.as_ref().unwrap();
    assert!(last[0].done && outcome.reward == 0.0 && outcome.metrics["answered"] == 1.0);
    env.close().await.unwrap();
}

/// Calls in the format of the chat template arrive parsed; the environment offers the tool to the template.
#[tokio::test(flavor = "current_thread")]
async fn calls_of_the_chat_template_run_the_tool() {
    let config = ToolMathConfig {
        prompt: PromptConfig::with_calls(Calls::Template),
        ..ToolMathConfig::default()
    };
    let provider = Arc::new(NullProvider::default());
    let factory = ToolMathFactory::new(provider, SandboxSpec::default(), config).unwrap();
    let task = task("What is 6 * 7?", 42.0);
    let mut env = factory.create(&task).unwrap();
    let reset = env.reset().await.unwrap();
    assert_eq!(reset.calls, CallNotation::Template);
    assert_eq!(reset.tools[0].name, "python");
    let call = factory.gold(&task, 0).unwrap().unwrap();
    assert!(call.text.is_empty() && call.tool_calls.len() == 1);
    assert!(!env.step(call).await.unwrap().observation.unwrap().is_error);
    let wrong = env.step(Action::say("<tool>1</tool>")).await.unwrap();
    assert_eq!(shown(&wrong), "Error: call python or write Answer: number");
    let answer = factory.gold(&task, 1).unwrap().unwrap();
    assert!(env.step(answer).await.unwrap().outcome.unwrap().success);
    env.close().await.unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn call_timeouts_are_observations() {
    let config = ToolMathConfig {
        tool_timeout_s: 0.3,
        ..ToolMathConfig::default()
    };
    let provider = Arc::new(NullProvider::default());
    let factory = ToolMathFactory::new(provider, SandboxSpec::default(), config).unwrap();
    let mut env = factory.create(&task("?", 1.0)).unwrap();
    env.reset().await.unwrap();
    let steps = play(env.as_mut(), &["<tool>while True: pass</tool>"])
        .await
        .unwrap();
    assert_eq!(shown(&steps[0]), "Error: took longer than 0.3 s");
    env.close().await.unwrap();
}

/// A provider whose sandboxes end every execution with a fixed result.
struct Scripted {
    ending: Option<Ending>,
    live: Arc<AtomicUsize>,
}

struct ScriptedSandbox {
    ending: Ending,
    live: Arc<AtomicUsize>,
}

impl Drop for ScriptedSandbox {
    fn drop(&mut self) {
        self.live.fetch_sub(1, Ordering::SeqCst);
    }
}

impl SandboxProvider for Scripted {
    fn level(&self) -> &'static str {
        "scripted"
    }

    fn acquire<'a>(&'a self, _: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move {
            let ending = self
                .ending
                .ok_or_else(|| SandboxError::Died("no sandbox".into()))?;
            self.live.fetch_add(1, Ordering::SeqCst);
            let live = Arc::clone(&self.live);
            Ok(Box::new(ScriptedSandbox { ending, live }) as Box<dyn Sandbox>)
        })
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        Arc::default()
    }
}

impl Sandbox for ScriptedSandbox {
    fn exec(&mut self, _: ExecRequest) -> SandboxFuture<'_, ExecResult> {
        let result = ExecResult {
            ending: self.ending,
            stdout: Vec::new(),
            stderr: Vec::new(),
            truncated: false,
            usage: Usage::default(),
            protections: Arc::default(),
        };
        Box::pin(async move { Ok(result) })
    }

    fn write_file<'a>(&'a mut self, _: &'a str, _: &'a [u8]) -> SandboxFuture<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn read_file<'a>(&'a mut self, _: &'a str, _: u64) -> SandboxFuture<'a, Vec<u8>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn destroy(self: Box<Self>) -> SandboxFuture<'static, ()> {
        Box::pin(async { Ok(()) })
    }
}

async fn scripted(ending: Option<Ending>) -> (Result<String, EnvError>, usize, usize) {
    let live = Arc::new(AtomicUsize::new(0));
    let provider = Arc::new(Scripted {
        ending,
        live: Arc::clone(&live),
    });
    let spec = SandboxSpec::default();
    let factory = ToolMathFactory::new(provider, spec, ToolMathConfig::default()).unwrap();
    let mut env = factory.create(&task("?", 1.0)).unwrap();
    env.reset().await.unwrap();
    let before = live.load(Ordering::SeqCst);
    let step = play(env.as_mut(), &["<tool>1</tool>"]).await;
    env.close().await.unwrap();
    let text = step.map(|steps| shown(&steps[0]).to_owned());
    (text, before, live.load(Ordering::SeqCst))
}

#[tokio::test(flavor = "current_thread")]
async fn errors_of_code_and_sandbox_are_distinguished() {
    let observed = [
        (Ending::OutOfMemory, "Error: used too much memory"),
        (
            Ending::TooManyProcesses,
            "Error: started too many processes",
        ),
        (Ending::OutputLimit, "Error: printed too much"),
        (Ending::Denied, "Error: did something that is not allowed"),
        (
            Ending::Signalled { signal: 11 },
            "Error: killed by signal 11",
        ),
    ];
    for (ending, text) in observed {
        let (shown, before, after) = scripted(Some(ending)).await;
        assert_eq!(shown.unwrap(), text);
        // Acquired for the first call, released at the end.
        assert_eq!((before, after), (0, 0));
    }
    for ending in [Some(Ending::SandboxDied), None] {
        let (shown, _, after) = scripted(ending).await;
        let error = shown.unwrap_err();
        assert_eq!(error.failure_kind(), FailureKind::Sandbox);
        assert_eq!(after, 0);
    }
}

#[test]
fn invalid_settings_are_refused() {
    let provider = || Arc::new(NullProvider::default());
    for (process_reward, tool_timeout_s) in [(0.5, 1.0), (-0.1, 1.0), (f64::NAN, 1.0), (0.0, 0.0)] {
        let config = ToolMathConfig {
            process_reward,
            tool_timeout_s,
            ..ToolMathConfig::default()
        };
        let made = ToolMathFactory::new(provider(), SandboxSpec::default(), config);
        assert!(matches!(made, Err(EnvError::Config { .. })));
    }
    for levels in [&[][..], &[0], &[4]] {
        assert!(Word::new(small(0, levels)).is_err());
    }
    let none = MathTaskConfig {
        train: 0,
        ..MathTaskConfig::default()
    };
    assert!(Arithmetic::new(none).is_err());
    let mut foreign = task("?", 1.0);
    foreign.data = serde_json::json!({ "start": 1 });
    assert!(factory().create(&foreign).is_err());
}

/// The gold policy gets the full reward on every taskset.
#[tokio::test(flavor = "current_thread")]
async fn gold_runs_succeed_everywhere() {
    let mixed = Mixed::new(small(3, &[1, 2, 3])).unwrap();
    let gsm8k = Gsm8k::shipped().unwrap();
    let factory = factory();
    for taskset in [&mixed as &dyn Taskset, &gsm8k] {
        for task in tasks(taskset, Split::HeldOut).iter().take(12) {
            let (outcome, turns) = gold_run(&factory, task).await.unwrap();
            assert!(outcome.success && turns == 2, "{task:?}: {outcome:?}");
            assert_eq!(outcome.reward, 1.0);
            assert_eq!(outcome.metrics["format"], 1.0);
        }
    }
    let tiny = TinyTaskset::new(0);
    for split in [Split::Train, Split::HeldOut] {
        for task in tasks(&tiny, split) {
            let (outcome, turns) = gold_run(&TinyFactory, &task).await.unwrap();
            assert!(outcome.success && turns <= 2, "{task:?}");
        }
    }
}

fn prompts(taskset: &dyn Taskset, split: Split) -> BTreeSet<String> {
    tasks(taskset, split)
        .into_iter()
        .map(|t| t.prompt)
        .collect()
}

#[test]
fn fixed_tasksets_have_disjoint_splits() {
    let gsm8k = Gsm8k::shipped().unwrap();
    let tiny = TinyTaskset::new(0);
    for taskset in [&gsm8k as &dyn Taskset, &tiny] {
        let train = prompts(taskset, Split::Train);
        let held_out = prompts(taskset, Split::HeldOut);
        assert!(!train.is_empty() && !held_out.is_empty());
        assert!(train.is_disjoint(&held_out));
        assert!(
            taskset
                .get(Split::HeldOut, taskset.len(Split::HeldOut))
                .is_err()
        );
    }
}

#[test]
fn tasks_of_a_seed_do_not_change() {
    let mixed = Mixed::new(MathTaskConfig::default()).unwrap();
    let first: Vec<_> = (0..4)
        .map(|i| mixed.get(Split::HeldOut, i).unwrap())
        .map(|t| format!("{} [{}] {} -> {}", t.id, t.kind, t.prompt, t.data["answer"]))
        .collect();
    insta::assert_snapshot!(first.join("\n"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// No problem is in both splits, for all seeds and levels.
    #[test]
    fn splits_are_disjoint(train_seed: u64, held_out_seed: u64, level in 1u8..=3) {
        let train = Mixed::new(small(train_seed, &[level])).unwrap();
        let held_out = Mixed::new(small(held_out_seed, &[1, 2, 3])).unwrap();
        let a = prompts(&train, Split::Train);
        let b = prompts(&held_out, Split::HeldOut);
        prop_assert!(a.is_disjoint(&b));
    }

    #[test]
    fn equal_seeds_give_equal_tasks_and_unique_ids(seed: u64) {
        let one = tasks(&Mixed::new(small(seed, &[1, 2])).unwrap(), Split::Train);
        let two = tasks(&Mixed::new(small(seed, &[1, 2])).unwrap(), Split::Train);
        prop_assert_eq!(&one, &two);
        let ids: BTreeSet<_> = one.iter().map(|t| t.id.clone()).collect();
        prop_assert_eq!(ids.len(), one.len());
        let level = |kind: &str| kind.split('/').next().unwrap_or_default().to_owned();
        let levels: BTreeSet<_> = one.iter().map(|t| level(&t.kind)).collect();
        prop_assert_eq!(levels.len(), 4);
    }

    /// Text without a tool call never makes the environment fail.
    #[test]
    fn any_text_without_a_call_has_an_observation(text in "[^<]{0,60}", truncated: bool) {
        let factory = factory();
        let step = futures::executor::block_on(async {
            let mut env = factory.create(&task("?", 1.0)).unwrap();
            env.reset().await.unwrap();
            let action = Action { truncated, ..act(&text) };
            env.step(action).await.unwrap()
        });
        prop_assert_eq!(step.done, step.observation.is_none());
        prop_assert_eq!(step.done, step.outcome.is_some());
    }
}

/// Factory of tiny environments with a fault.
struct Faulty {
    fault: &'static str,
    made: std::sync::atomic::AtomicUsize,
}

impl EnvFactory for Faulty {
    fn name(&self) -> &str {
        "faulty"
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        let made = self.made.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // The second environment of a task differs from the first.
        let mut task = task.clone();
        if self.fault == "chance" && made % 2 == 1 {
            task.data["goal"] = (task.data["goal"].as_u64().unwrap() ^ 1).into();
        }
        TinyFactory.create(&task)
    }

    fn capabilities(&self) -> Capabilities {
        TinyFactory.capabilities()
    }

    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        match self.fault {
            "hopeless" => Ok((turn < 2).then(|| Action::say("stay"))),
            _ => TinyFactory.gold(task, turn),
        }
    }
}

#[tokio::test]
async fn validation_finds_false_capabilities() {
    let tiny = TinyTaskset::new(0);
    let tasks = tasks(&tiny, Split::Train);
    assert!(validate(&TinyFactory, &tasks).await.unwrap() >= tasks.len());
    for (fault, part) in [("hopeless", "its solution fails"), ("chance", "")] {
        let faulty = Faulty {
            fault,
            made: 0.into(),
        };
        let error = validate(&faulty, &tasks).await.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
