//! `tests(COLUMN)` and `program(COLUMN)`: the task's tests against the model's code, in a fresh sandbox.
//!
//! The names that the tests use decide which code of the output is the solution ([`sinew_answer::code`]); the
//! metrics `block`, `blocks` and `joined` report the choice. Each score has a separate sandbox, at the level
//! of the recipe, which is destroyed after it.
//!
//! | reward | what decides |
//! |---|---|
//! | `tests` | a process apart from the code's, which asks its functions for plain data and compares it ([`RUNNER`]) |
//! | `program` | the exit code of the task's program, which reads the code as a file |
//!
//! The output, the files, the patches and the exit code of the code are not a verdict. A verdict of `tests`
//! names a secret that the code's process never had. Without a verdict a sample has the value 0 if the code
//! ended or starved its tests, and is unscored if the tests or the sandbox failed by themselves. If the time
//! or the output ran out, the same tests run again without the code: if they end then, the value is 0.

use crate::kind::Kind;
use crate::named::expected;
use futures::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_env::{Reward, RewardSample, Sandboxes, Score, Unscored};
use sinew_sandbox::{Ending, ExecRequest, ExecResult, Program, SandboxError};
use std::time::Duration;

/// Runs the tests: the trusted side of `tests`.
const RUNNER: &str = include_str!("run_tests.py");
/// Sharing of objects between the runner and the code, for both processes.
const CARRY: &str = include_str!("carry.py");
/// The process of the code.
const SOLUTION: &str = include_str!("solution.py");
/// Bytes of code and of tests, each.
const MAX_BYTES: usize = 256 << 10;
/// Sandboxes that one run may lose to their hosts. Each is replaced: a score does not depend on them.
const LOST_SANDBOXES: usize = 2;
/// Time that the runner has less than the sandbox, so that it ends by itself.
const MARGIN: f64 = 0.8;

/// A reward that runs code.
pub(crate) struct UnitTests {
    pub(crate) kind: Kind,
    pub(crate) column: String,
    pub(crate) sandboxes: Sandboxes,
    /// Maximum time of one score, without the wait for a sandbox.
    pub(crate) timeout: Duration,
}

/// Whether a sandbox went without an answer.
fn is_lost(error: &SandboxError) -> bool {
    matches!(error, SandboxError::HostLost { .. } | SandboxError::Died(_))
}

/// Verdict of the runner.
#[derive(Deserialize)]
struct Verdict {
    secret: String,
    #[serde(default)]
    passed: u32,
    #[serde(default)]
    total: u32,
    /// Reason why the tests cannot run, whatever the code.
    broken: Option<String>,
    /// A module that the tests import and the sandbox's Python does not have.
    missing: Option<String>,
}

/// The end of a run that tests code.
enum Run {
    Scored(Result<Score, Unscored>),
    /// It was cut without a verdict: by the code, or by tests that take too long themselves.
    Cut(Unscored),
}

impl UnitTests {
    async fn run(&self, sample: &RewardSample) -> Result<Score, Unscored> {
        let given = expected(sample, &self.column)?;
        let uses = match given {
            Value::Array(tests) => tests
                .iter()
                .filter_map(Value::as_str)
                .collect::<Vec<_>>()
                .join("\n"),
            other => other.as_str().unwrap_or_default().to_owned(),
        };
        let taken = sinew_answer::code(&sample.output, &uses);
        let code = taken.text.as_str();
        if code.len() > MAX_BYTES {
            return Score::new(0.0);
        }
        let mut score = match self.once(sample, given, code, &sample.output).await? {
            Run::Scored(score) => score,
            // The same tests without the code: where they end, the code was what did not.
            Run::Cut(why) => match self.once(sample, given, "", "").await? {
                Run::Scored(_) => Score::new(0.0),
                Run::Cut(_) => Err(why),
            },
        }?;
        let counts = [
            ("block", taken.block),
            ("blocks", taken.blocks),
            ("joined", taken.joined),
        ];
        let counts = counts.map(|(name, count)| (name.to_owned(), count as f64));
        score.parts.extend(counts);
        Ok(score)
    }

    /// Tests code in a separate sandbox.
    async fn once(
        &self,
        sample: &RewardSample,
        given: &Value,
        code: &str,
        output: &str,
    ) -> Result<Run, Unscored> {
        let secret = secret();
        let (program, stdin) = match self.kind {
            Kind::Tests => {
                // A solution in a loop must end before the sandbox, which would leave no verdict.
                let cpu_s = self.sandboxes.spec.limits.cpu_s;
                let seconds = self.timeout.as_secs_f64().min(cpu_s) * MARGIN;
                let tests = self.tests(given)?;
                let input = json!({
                    "code": code, "tests": tests, "seconds": seconds, "secret": secret,
                    "carry": CARRY, "solution": SOLUTION,
                });
                (RUNNER.to_owned(), input.to_string())
            }
            Kind::Program => {
                let program = self.text(given)?;
                (program.to_owned(), sample.task.data.to_string())
            }
        };
        let files = [("solution.py", code), ("output.txt", output)];
        let files = if self.kind == Kind::Program {
            &files[..]
        } else {
            &[]
        };
        let request = || ExecRequest {
            program: Program::Python(program.clone()),
            stdin: stdin.clone().into_bytes(),
            deadline: self.timeout,
        };
        let mut lost = 0;
        let result = loop {
            match self.in_sandbox(files, request()).await {
                Err(error) if is_lost(&error) && lost < LOST_SANDBOXES => {
                    lost += 1;
                    tracing::warn!(%error, "a score lost its sandbox: another one is made");
                }
                result => {
                    break result.map_err(|e| Unscored::new(format!("sandbox: {e}")))?;
                }
            }
        };
        Ok(match self.kind {
            Kind::Tests => tested(&result, &secret),
            Kind::Program => exited(&result),
        })
    }

    /// Runs a program with its files in a sandbox that is made for it and destroyed after it.
    async fn in_sandbox(
        &self,
        files: &[(&str, &str)],
        request: ExecRequest,
    ) -> Result<ExecResult, SandboxError> {
        let provider = &self.sandboxes.provider;
        let mut sandbox = provider.acquire(&self.sandboxes.spec).await?;
        for (name, content) in files {
            sandbox.write_file(name, content.as_bytes()).await?;
        }
        let result = sandbox.exec(request).await;
        match sandbox.destroy().await {
            // A sandbox that went with its host needs no end.
            Err(error) if !is_lost(&error) => Err(error),
            _ => result,
        }
    }

    /// Tests of a task, each a text that is not empty.
    fn tests<'a>(&self, given: &'a Value) -> Result<&'a Value, Unscored> {
        let text = |v: &Value| v.as_str().is_some_and(|t| !t.trim().is_empty());
        let list = given
            .as_array()
            .is_some_and(|l| !l.is_empty() && l.iter().all(text));
        if (text(given) || list) && given.to_string().len() <= MAX_BYTES {
            Ok(given)
        } else {
            Err(self.wrong("tests in Python: a text or a list of texts, up to 256 KiB"))
        }
    }

    fn text<'a>(&self, given: &'a Value) -> Result<&'a str, Unscored> {
        let fits = |t: &&str| !t.trim().is_empty() && t.len() <= MAX_BYTES;
        let text = given.as_str().filter(fits);
        text.ok_or_else(|| self.wrong("a program in Python of up to 256 KiB"))
    }

    fn wrong(&self, allowed: &str) -> Unscored {
        Unscored::new(format!("column {}: allowed: {allowed}", self.column))
    }
}

/// A number that code inside cannot know: it is made for each score, and only the runner is given it.
fn secret() -> String {
    use std::hash::{BuildHasher, RandomState};
    let random = || RandomState::new().hash_one(0u64);
    format!("{:016x}{:016x}", random(), random())
}

/// Reason why an execution has no verdict.
fn no_verdict(ending: Ending, stderr: &[u8]) -> Run {
    match ending {
        // The code ended or starved what tests it.
        Ending::Signalled { .. }
        | Ending::OutOfMemory
        | Ending::TooManyProcesses
        | Ending::Denied => Run::Scored(Score::new(0.0)),
        _ => {
            let error = String::from_utf8_lossy(stderr);
            let last = error.lines().rfind(|l| !l.trim().is_empty());
            let last = last.unwrap_or_default();
            let why = Unscored::new(format!("no verdict of the tests: {ending} {last}"));
            match ending {
                Ending::Timeout | Ending::OutputLimit => Run::Cut(why),
                _ => Run::Scored(Err(why)),
            }
        }
    }
}

/// The share of passed tests.
fn tested(result: &ExecResult, secret: &str) -> Run {
    let own = serde_json::from_slice::<Verdict>(&result.stdout);
    match own.ok().filter(|v| v.secret == secret) {
        Some(verdict) => Run::Scored(share(verdict)),
        None => no_verdict(result.ending, &result.stderr),
    }
}

fn share(verdict: Verdict) -> Result<Score, Unscored> {
    if let Some(why) = verdict.broken {
        return Err(Unscored::new(format!("the tests cannot run: {why}")));
    }
    if let Some(module) = verdict.missing {
        return Err(Unscored::new(format!(
            "the tests import {module}, which python3 in the sandbox does not have: it runs without \
             site-packages (-S), so installing {module} does not help: use the standard library, or remove these tests"
        )));
    }
    if verdict.total == 0 {
        return Err(Unscored::new("there are no tests"));
    }
    let (passed, total) = (
        f64::from(verdict.passed.min(verdict.total)),
        f64::from(verdict.total),
    );
    let parts = [("passed", passed), ("tests", total)].map(|(n, v)| (n.to_owned(), v));
    Score::with_parts(passed / total, parts.into())
}

/// 1 for the exit code 0.
fn exited(result: &ExecResult) -> Run {
    match result.ending {
        Ending::Exited { code } => Run::Scored(Score::new(f64::from(u8::from(code == 0)))),
        ending => no_verdict(ending, &result.stderr),
    }
}

sinew_types::debug_fields!(UnitTests, kind, column, timeout);

impl Reward for UnitTests {
    fn name(&self) -> &str {
        match self.kind {
            Kind::Tests => "tests",
            Kind::Program => "program",
        }
    }

    fn score<'a>(&'a self, sample: &'a RewardSample) -> BoxFuture<'a, Result<Score, Unscored>> {
        Box::pin(self.run(sample))
    }
}
