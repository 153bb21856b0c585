//! The verifier: tests come into the place after the agent, and their rewards are read.
//!
//! Before the tests are there, the agent's processes have ended (no process outlives its command), and what
//! it may have left in the folders of tests and rewards is removed. A separate verifier has a machine of its
//! own, which gets the collected files and nothing else of the agent's.

use crate::artifacts::{Copied, gather};
use crate::folder::{SeparateVerifier, Step, TEST_SCRIPT, TaskFolder};
use crate::place::{Command, Place};
use crate::rewards::{self, MAX_REWARD_BYTES, Rewards};
use crate::stages::{Wanted, World, broken, failed, healthy, interpreter, machine, said};
use crate::trajectory::TRAJECTORY_FILE;
use sinew_env::{EnvError, Unscored};
use sinew_sandbox::{Ending, Entry, EntryKind};
use std::path::Path;
use std::time::Duration;
use tokio::time::Instant;

/// File with the output of a verifier, in its folder of logs.
const OUTPUT_FILE: &str = "test-stdout.txt";

/// Bytes of that file that are read.
const MAX_OUTPUT_BYTES: u64 = 1 << 20;

/// Characters of it that are kept.
const OUTPUT_CHARS: usize = 4000;

/// Results of a verifier.
#[derive(Clone, Debug)]
pub(crate) struct Verified {
    /// Rewards, or why there are none.
    pub(crate) rewards: Result<Rewards, Unscored>,
    /// End of the output.
    pub(crate) output: String,
    /// Seconds that it took.
    pub(crate) seconds: f64,
    /// Files that the agent left, with their paths in the folder of kept files.
    pub(crate) artifacts: Vec<Entry>,
    /// Reason why some of them are not there.
    pub(crate) artifacts_missing: Option<String>,
}

/// Leaves the conversation of the episode in the machine of its agent, where the format has it. A file, link
/// or folder that the agent put there is removed.
///
/// # Errors
/// If the machine fails.
pub(crate) async fn leave(place: &mut Place, document: Vec<u8>) -> Result<(), EnvError> {
    let folder = format!("{}/agent", place.layout.logs);
    let entries = [Entry {
        path: TRAJECTORY_FILE.into(),
        mode: 0o644,
        kind: EntryKind::File(document),
    }];
    if place.put_entries(&entries, &folder, false).await.is_err() {
        // A link or a folder of the agent is in the way.
        place.empty(&folder, None).await.map_err(broken)?;
        let put = place.put_entries(&entries, &folder, false).await;
        put.map_err(broken)?;
    }
    Ok(())
}

/// Verifies a step in its place.
///
/// # Errors
/// If the place fails. A verifier that fails gives no reward.
pub(crate) async fn verify(
    world: &World,
    task: &TaskFolder,
    step: &Step,
    place: &mut Place,
) -> Result<Verified, EnvError> {
    let began = Instant::now();
    let hooks = collect(world, step, place).await?;
    let own = step.verifier.separate.as_ref();
    let gathered = gather(world, step, place, own.is_some() || world.keep_artifacts).await?;
    let (rewards, output) = match (hooks, own) {
        (Err(why), _) => (Err(why), String::new()),
        (Ok(()), None) => run(world, step, place, true).await?,
        (Ok(()), Some(own)) => match &gathered.missing {
            Some(why) => (Err(Unscored::new(why.clone())), String::new()),
            None => apart(world, task, step, own, &gathered.copied).await?,
        },
    };
    Ok(Verified {
        rewards,
        output,
        seconds: began.elapsed().as_secs_f64(),
        artifacts: gathered.kept(),
        artifacts_missing: gathered.missing,
    })
}

/// Runs the commands between agent and verifier. One that fails leaves the episode without a score: the
/// verifier would judge an older state.
async fn collect(
    world: &World,
    step: &Step,
    place: &mut Place,
) -> Result<Result<(), Unscored>, EnvError> {
    for hook in &step.verifier.keys.collect {
        let command = Command {
            user: hook.user.clone(),
            ..Command::shell(hook.command.clone(), world.time(hook.timeout_s))
        };
        let done = place.run(command).await.map_err(broken)?;
        if done.ending != (Ending::Exited { code: 0 }) {
            let (ending, why) = (done.ending, said(&done));
            let reason = format!("a command of verifier.collect failed ({ending}): {why}");
            return Ok(Err(Unscored::new(reason)));
        }
    }
    Ok(Ok(()))
}

/// Rewards and output of a verifier.
type Judged = (Result<Rewards, Unscored>, String);

/// Runs a verifier in a machine of its own.
async fn apart(
    world: &World,
    task: &TaskFolder,
    step: &Step,
    own: &SeparateVerifier,
    files: &[Copied],
) -> Result<Judged, EnvError> {
    let Some(machines) = world.sandboxes.machines.as_deref() else {
        return Err(failed(
            "a separate verifier needs sandbox.level = \"container\"",
        ));
    };
    let keys = &own.environment;
    let network = step.verifier.keys.network.as_ref();
    let wanted = Wanted {
        source: &own.source,
        keys,
        workdir: keys.workdir.clone(),
        env: world.variables(&keys.env)?,
        network: network.unwrap_or(&keys.network),
        user: step.verifier.keys.user.as_deref(),
    };
    let mut place = machine(machines, wanted).await?;
    let judged = judge(world, task, step, own, files, &mut place).await;
    let ended = place.sandbox.destroy().await;
    let judged = judged?;
    ended.map_err(broken)?;
    Ok(judged)
}

/// Puts the files of the agent into a verifier's machine, and runs it.
async fn judge(
    world: &World,
    task: &TaskFolder,
    step: &Step,
    own: &SeparateVerifier,
    files: &[Copied],
    place: &mut Place,
) -> Result<Judged, EnvError> {
    if let (false, Some(folder)) = (own.has_tests, &task.upload) {
        let to = place.layout.workdir.clone();
        place.put(folder, &to, false).await.map_err(broken)?;
    }
    for copied in files {
        let to = match Path::new(&copied.path).parent() {
            Some(parent) if copied.is_file() => parent.to_string_lossy().into_owned(),
            _ => copied.path.clone(),
        };
        let put = place.put_entries(&copied.entries, &to, false).await;
        put.map_err(broken)?;
    }
    if let Some(check) = &own.environment.healthcheck {
        healthy(place, check).await?;
    }
    run(world, step, place, !own.has_tests).await
}

/// Runs the script of the tests in a place, and reads its rewards. `put`: the tests are put there, and
/// removed afterwards.
async fn run(world: &World, step: &Step, place: &mut Place, put: bool) -> Result<Judged, EnvError> {
    let (tests, logs) = (
        place.layout.tests.clone(),
        format!("{}/verifier", place.layout.logs),
    );
    let keys = &step.verifier.keys;
    // As in the format, the user of the image runs the tests where the task names none.
    let user = keys.user.clone().or_else(|| place.user.clone());
    place.empty(&logs, user.as_deref()).await.map_err(broken)?;
    let mut argv = vec!["/bin/sh".to_owned()];
    if put {
        place.empty(&tests, None).await.map_err(broken)?;
        for folder in &step.verifier.tests {
            place.put(folder, &tests, false).await.map_err(broken)?;
        }
        let tests = step.verifier.tests.iter();
        let mut scripts = tests.map(|folder| folder.join(TEST_SCRIPT));
        if let Some(script) = scripts.rfind(|script| script.is_file()) {
            argv = interpreter(&script);
        }
    } else {
        // The first line of the script is that of the image, which the system reads.
        let own = "if [ -x \"$0\" ]; then exec \"$0\"; fi; exec /bin/sh \"$0\"";
        argv.extend(["-c".to_owned(), own.to_owned()]);
    }
    argv.push(format!("{tests}/{TEST_SCRIPT}"));
    let output = format!("exec \"$@\" >\"$VERIFIER_LOGS/{OUTPUT_FILE}\" 2>&1");
    let wrapped = ["/bin/sh", "-c", output.as_str(), "sh"].map(str::to_owned);
    let mut env = vec![
        ("TESTS_DIR".to_owned(), tests.clone()),
        ("VERIFIER_LOGS".to_owned(), logs.clone()),
    ];
    env.extend(world.variables(&keys.env)?);
    let deadline = world.time(step.verifier.timeout_s);
    let command = Command {
        argv: wrapped.into_iter().chain(argv).collect(),
        env,
        user: Some(user.unwrap_or_else(|| "root".into())),
        deadline,
    };
    let done = place.run(command).await.map_err(broken)?;
    let output = format!("{logs}/{OUTPUT_FILE}");
    let text = place.read(&output, MAX_OUTPUT_BYTES).await;
    let text = text.ok().flatten().unwrap_or_default();
    let rewards = match done.ending {
        Ending::SandboxDied => return Err(EnvError::Sandbox("it died in the verifier".into())),
        Ending::Timeout => Err(late(deadline)),
        _ => rewards_of(place, &logs).await,
    };
    let rewards = rewards.map_err(|e| match (done.ending, text.is_empty()) {
        (Ending::Exited { code: 0 } | Ending::Timeout, _) => e,
        (ending, false) => Unscored::new(format!("{e} ({ending}: {})", last_line(&text))),
        (ending, true) => Unscored::new(format!("{e} ({ending}: {})", said(&done))),
    });
    if put {
        place.remove(&tests).await.map_err(broken)?;
    }
    if !place.rooted {
        let logs = place.layout.logs.clone();
        place.remove(&logs).await.map_err(broken)?;
    }
    Ok((rewards, tail(&text)))
}

fn late(deadline: Duration) -> Unscored {
    Unscored::new(format!(
        "the verifier took longer than {} s",
        deadline.as_secs_f64()
    ))
}

/// Reads the files of rewards. One that cannot be read is a reason, as one that is missing.
async fn rewards_of(place: &mut Place, logs: &str) -> Result<Rewards, Unscored> {
    let json = file_of(place, logs, "reward.json").await?;
    let text = match json {
        Some(_) => None,
        None => file_of(place, logs, "reward.txt").await?,
    };
    rewards::read(json.as_deref(), text.as_deref())
}

/// Reads one file of rewards.
async fn file_of(place: &mut Place, logs: &str, name: &str) -> Result<Option<Vec<u8>>, Unscored> {
    let path = format!("{logs}/{name}");
    let read = place.read(&path, MAX_REWARD_BYTES).await;
    read.map_err(|e| Unscored::new(format!("{name} cannot be read: {e}")))
}

/// The end of a text.
fn tail(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let skip = text.chars().count().saturating_sub(OUTPUT_CHARS);
    text.chars().skip(skip).collect()
}

fn last_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes).into_owned();
    let line = text.lines().rfind(|line| !line.trim().is_empty());
    line.unwrap_or_default().chars().take(200).collect()
}
