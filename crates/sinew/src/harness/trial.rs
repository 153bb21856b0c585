//! One start of the program without a model: does it come as far as asking one?

use super::fork_server::{ForkServer, tail};
use super::program::Command;
use super::run::{Ended, RunError, Sandboxes};
use super::{command, sandboxes, variables};
use crate::failure::Failure;
use crate::harness::HarnessSection;
use crate::wire;
use sinew_env::Split;
use sinew_recipe::CommandSection;
use sinew_recipe::RunPlan;
use sinew_sandbox::Ending;
use std::time::Duration;
use tokio::net::TcpListener;

/// How long a program may take until it asks.
const WITHIN_S: f64 = 120.0;

/// Starts the program of a recipe with one of its tasks and an address that takes connections and answers
/// nothing: a program that connects has found its packages and its task.
pub(crate) fn starts(recipe: &RunPlan) -> Result<(), Failure> {
    let HarnessSection::Command(section) = &recipe.harness else {
        return Ok(());
    };
    let task = wire::taskset(recipe)?.get(Split::Train, 0);
    let task = task.map_err(Failure::system)?;
    let command = command(section)?;
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::system)?;
    runtime.block_on(async {
        let model = TcpListener::bind(("127.0.0.1", 0))
            .await
            .map_err(Failure::system)?;
        let at = model.local_addr().map_err(Failure::system)?;
        let sandboxes = sandboxes(section, &command, &recipe.sandbox, at)?;
        let mut env = variables(&format!("http://{at}/rollouts/check/v1"), "check", &task);
        env.extend(section.env.clone());
        let limit = Duration::from_secs_f64(section.timeout_s.min(WITHIN_S));
        tokio::select! {
            asked = model.accept() => asked.map(|_| ()).map_err(Failure::system),
            ended = run(section, &command, &sandboxes, env, limit) => Err(why(ended, limit)),
        }
    })
}

async fn run(
    section: &CommandSection,
    command: &Command,
    sandboxes: &Sandboxes,
    env: Vec<(String, String)>,
    limit: Duration,
) -> Result<Ended, RunError> {
    if !section.preload {
        return sandboxes.run(command, env, limit).await;
    }
    let server = ForkServer::start(sandboxes, command).await?;
    server.run(env, section.cpu_s, limit).await
}

/// What is missing if a program ended before it asked.
fn why(ended: Result<Ended, RunError>, limit: Duration) -> Failure {
    let hint = "hint: start it by hand with OPENAI_BASE_URL and SINEW_TASK set; what it imports must be installed where \
                its sandbox sees it";
    let how = match ended {
        Err(RunError::Sandbox(e)) => return Failure::system(e),
        Err(e) => e.to_string(),
        Ok(Ended {
            ending: Ending::Timeout,
            ..
        }) => format!("{} s passed", limit.as_secs_f64()),
        Ok(ended) => format!("it ended ({:?}): {}", ended.ending, tail(&ended.stderr)),
    };
    Failure::outside(format!(
        "harness.command: the program did not ask the model: {how}\n  {hint}"
    ))
}
