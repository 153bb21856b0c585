//! One Chromium as a child process.
//!
//! It runs in user, network and process namespaces of its own, made by `unshare` of util-linux. The network
//! namespace has no interface that is up: whatever a page asks for reaches its site through the DevTools pipe
//! or fails. The process namespace ends with its first process, so that no process of the browser survives a
//! kill of the browser or the end of this program. Profile and shared memory are in a file system of its own
//! that is gone with it, too.

use super::protocol::{CallFault, Client};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::process::{Child, Command};

/// Namespaces, made before the browser is started.
const UNSHARE: [&str; 8] = [
    "--user",
    "--map-root-user",
    "--net",
    "--pid",
    "--mount-proc",
    "--fork",
    "--kill-child=SIGKILL",
    "--",
];
/// The pipe's two ends are the third and fourth descriptor of the browser.
const PREPARE: &str =
    "mount -t tmpfs -o size=1g tmpfs /tmp && exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null";
/// No extras that would ask for a network, and none that slow pages that are not in front.
///
/// `--no-sandbox`: Chromium's own sandbox does not start for the root of a user namespace. Pages come from
/// sites of this crate alone, and the model cannot run scripts.
const FLAGS: [&str; 19] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-default-apps",
    "--mute-audio",
    "--disable-dev-shm-usage",
    "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows",
    "--remote-debugging-pipe",
    // What is not answered through the pipe goes to a proxy that is not there.
    "--proxy-server=127.0.0.1:9",
    "--user-data-dir=/tmp/profile",
];

/// A browser that runs. Dropping it kills all of its processes.
#[derive(Debug)]
pub(super) struct Browser {
    /// The connection.
    pub(super) client: Arc<Client>,
    /// Killed when it is dropped.
    child: Mutex<Child>,
}

/// Whether namespaces can be made here.
async fn can_unshare() -> Result<(), String> {
    let tried = Command::new("unshare")
        .args(UNSHARE)
        .arg("true")
        .stdin(Stdio::null())
        .output()
        .await;
    let why = match tried {
        Ok(done) if done.status.success() => return Ok(()),
        Ok(done) => String::from_utf8_lossy(&done.stderr).trim().to_owned(),
        Err(error) => format!("unshare (util-linux): {error}"),
    };
    Err(format!(
        "the browser cannot have namespaces of its own: {why}; allow user namespaces \
         (sysctl kernel.unprivileged_userns_clone=1) or run as root"
    ))
}

impl Browser {
    /// Starts a browser and waits until it answers.
    ///
    /// # Errors
    /// What is missing or refused, in one line.
    pub(super) async fn start(program: &Path, limit: Duration) -> Result<Self, String> {
        can_unshare().await?;
        let mut command = Command::new("unshare");
        command
            .args(UNSHARE)
            .args(["sh", "-c", PREPARE, "sh"])
            .arg(program)
            .args(FLAGS);
        command
            .env("HOME", "/tmp")
            .env_remove("DISPLAY")
            .env_remove("DBUS_SESSION_BUS_ADDRESS");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        command.kill_on_drop(true).process_group(0);
        let mut child = command
            .spawn()
            .map_err(|e| format!("{}: {e}", program.display()))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("the browser has no pipe".into());
        };
        let browser = Self {
            client: Client::start(input, output),
            child: Mutex::new(child),
        };
        browser.answers(limit).await.map_err(|e| match e {
            CallFault::Gone => format!(
                "{} ended at its start; is it Chromium? (Debian: apt-get install chromium)",
                program.display()
            ),
            other => other.to_string(),
        })?;
        Ok(browser)
    }

    /// Asks for its version: a browser that answers is healthy.
    pub(super) async fn answers(&self, limit: Duration) -> Result<(), CallFault> {
        self.call("Browser.getVersion", json!({}), limit)
            .await
            .map(|_| ())
    }

    /// Calls a method of the browser itself.
    pub(super) async fn call(
        &self,
        method: &'static str,
        params: Value,
        limit: Duration,
    ) -> Result<Value, CallFault> {
        self.client.call(None, method, params, limit).await
    }

    /// Id of its first process outside of the namespaces, while it runs.
    pub(super) fn process_id(&self) -> Option<u32> {
        self.child
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .id()
    }

    /// Kills it with all of its processes. Its pages learn that it is gone.
    pub(super) fn kill(&self) {
        // One that ended by itself needs no kill.
        let _ = self
            .child
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .start_kill();
    }
}
