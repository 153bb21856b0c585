//! One episode: a theorem, some attempts, and a proof that holds.

use super::check::{Verdict, check, submission};
use super::script::accept;
use super::statements::Statement;
use crate::port::{Action, Capabilities, Env, EnvError, EnvFactory, EnvFuture};
use crate::registry::Sandboxes;
use crate::tools::{Answer, ToolEnv, ToolWorld, arguments, no_such_tool, tool};
use serde::Deserialize;
use serde_json::json;
use sinew_sandbox::Sandbox;
use sinew_types::{Given, Gives, Message, Outcome, Role, Task, ToolCall, ToolSpec};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Name of the only tool.
const TOOL: &str = "prove";
/// System prompt.
const RULES: &str =
    "You prove theorems in Coq. Call the tool prove with the tactics between Proof. and Qed.";

/// Limits of episodes.
#[derive(Clone, Copy, Debug)]
pub struct ProofSettings {
    /// Proofs that may be tried.
    pub attempts: u32,
    /// Tactics that search by themselves are allowed.
    pub automation: bool,
    /// Of one run of Coq.
    pub deadline: Duration,
}

/// Factory of `coq` episodes.
#[derive(Clone, Debug)]
pub struct ProofFactory {
    /// Where Coq runs.
    sandboxes: Arc<Sandboxes>,
    /// Limits of its episodes.
    settings: ProofSettings,
}

impl ProofFactory {
    /// Proofs are checked in `sandboxes`, which must have `/usr/bin/coqc`.
    pub fn new(sandboxes: Sandboxes, settings: ProofSettings) -> Self {
        Self {
            sandboxes: Arc::new(sandboxes),
            settings,
        }
    }
}

/// The theorem of a task.
fn statement(task: &Task) -> Result<Statement, EnvError> {
    serde_json::from_value(task.data["statement"].clone()).map_err(|e| EnvError::Task {
        task: task.id.to_string(),
        message: format!("data.statement is no theorem: {e}"),
    })
}

/// A turn that submits a script.
fn proving(script: &str) -> Action {
    let call = ToolCall {
        id: "call-0".into(),
        name: TOOL.into(),
        arguments: json!({ "script": script }),
    };
    Action {
        tool_calls: vec![call],
        ..Action::say("")
    }
}

impl EnvFactory for ProofFactory {
    fn name(&self) -> &str {
        "coq"
    }

    fn tools(&self) -> BTreeMap<String, String> {
        [(TOOL.to_owned(), "1".to_owned())].into()
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        let world = ProofWorld {
            factory: self.clone(),
            statement: statement(task)?,
            prompt: task.prompt.clone(),
            sandbox: None,
            proved: false,
            forged: 0,
        };
        Ok(Box::new(ToolEnv::new(world, self.settings.attempts)))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: true,
            deterministic: true,
            gives: Gives {
                turn_rewards: Given::No("a proof counts as a whole"),
                ..Gives::all(Given::Yes)
            },
            places: None,
        }
    }

    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        let statement = statement(task)?;
        Ok((turn == 0).then(|| proving(&statement.gold)))
    }
}

/// Arguments of the tool.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Prove {
    /// Tactics between `Proof.` and `Qed.`.
    script: String,
}

/// A theorem that is to be proved.
struct ProofWorld {
    /// Sandboxes and limits.
    factory: ProofFactory,
    /// What is to be proved.
    statement: Statement,
    /// The theorem in words.
    prompt: String,
    /// Acquired for the first attempt.
    sandbox: Option<Box<dyn Sandbox>>,
    /// A script proved it.
    proved: bool,
    /// Attempts that compiled and proved nothing.
    forged: u32,
}

impl ProofWorld {
    /// Checks one script. Errors of the model come back as text.
    async fn attempt(&mut self, call: &ToolCall) -> Result<Answer, EnvError> {
        let script = match self.script(call) {
            Ok(script) => script,
            Err(why) => return Ok(Err(why)),
        };
        let failed = |e: sinew_sandbox::SandboxError| EnvError::Sandbox(e.to_string());
        // Each attempt has a sandbox of its own, so that no file of an earlier one is there.
        if let Some(used) = self.sandbox.take() {
            used.destroy().await.map_err(failed)?;
        }
        let Sandboxes { provider, spec, .. } = self.factory.sandboxes.as_ref();
        let sandbox = self
            .sandbox
            .insert(provider.acquire(spec).await.map_err(failed)?);
        let file = submission(&self.statement, &script);
        let deadline = self.factory.settings.deadline;
        Ok(
            match check(sandbox.as_mut(), &self.statement, &file, deadline).await? {
                Verdict::Proved => {
                    self.proved = true;
                    Ok("proved".into())
                }
                Verdict::Refused(why) => Err(why),
                Verdict::Forged(why) => {
                    self.forged += 1;
                    Err(format!("this does not prove the theorem: {why}"))
                }
            },
        )
    }

    /// The script of a call, if it is one that may be tried.
    fn script(&self, call: &ToolCall) -> Result<String, String> {
        if call.name != TOOL {
            return Err(no_such_tool(call, &[TOOL]));
        }
        let Prove { script } = arguments(call)?;
        accept(&script, self.factory.settings.automation)
    }
}

impl ToolWorld for ProofWorld {
    fn start(&mut self) -> EnvFuture<'_, (Vec<Message>, Vec<ToolSpec>)> {
        let script =
            json!({ "script": { "type": "string", "description": "tactics, each with a period" } });
        let tools = vec![tool(
            TOOL,
            "Submit a proof. Coq's answer comes back.",
            script,
            &["script"],
        )];
        let messages = vec![
            Message::new(Role::System, RULES),
            Message::new(Role::User, self.prompt.clone()),
        ];
        Box::pin(std::future::ready(Ok((messages, tools))))
    }

    fn call<'a>(&'a mut self, call: &'a ToolCall) -> EnvFuture<'a, Answer> {
        Box::pin(self.attempt(call))
    }

    fn ended(&self) -> bool {
        self.proved
    }

    fn outcome(&self) -> Outcome {
        Outcome {
            reward: f64::from(u8::from(self.proved)),
            success: self.proved,
            metrics: [("forged".to_owned(), f64::from(self.forged))].into(),
            ..Outcome::default()
        }
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async move {
            match self.sandbox.take() {
                Some(sandbox) => sandbox
                    .destroy()
                    .await
                    .map_err(|e| EnvError::Sandbox(e.to_string())),
                None => Ok(()),
            }
        })
    }
}
