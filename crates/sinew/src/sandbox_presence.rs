//! A sandbox server as a role of a run: it registers at the owner, so that the run finds it, and drains when
//! the owner says so.

use crate::output;
use clap::Args;
use sinew_assembly::Failure;
use sinew_control::{ControlError, Heartbeat, Registration, RoleClient, RoleKind};
use sinew_sandbox_http::Service;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Pause after a registration, and the shortest one between heartbeats.
const SOON: Duration = Duration::from_millis(100);
/// Pause after a registration that failed.
const AGAIN: Duration = Duration::from_secs(5);

/// Arguments of a server that registers.
#[derive(Debug, Args)]
pub(crate) struct PresenceArgs {
    /// Owner of a run (`sinew train --control`) at which this server registers
    #[arg(long, value_name = "URL", requires_all = ["owner_token_file", "advertise", "sandbox_only"])]
    owner: Option<String>,
    /// File with the owner's token
    #[arg(long, value_name = "FILE", requires = "owner")]
    owner_token_file: Option<PathBuf>,
    /// Address at which the run reaches this server
    #[arg(long, value_name = "URL", requires = "owner")]
    advertise: Option<String>,
    /// Name that a launcher gave this server
    #[arg(long, value_name = "NAME", requires = "owner", default_value = "")]
    role_name: String,
    /// The host may be taken away at short notice
    #[arg(long, requires = "owner")]
    preemptible: bool,
}

/// A registration that is kept. Dropping it ends it.
pub(crate) struct Presence {
    /// Its drop ends the thread.
    _stop: SyncSender<()>,
}

/// State of the thread.
struct Member {
    owner: String,
    token: String,
    registration: Registration,
    service: Arc<Service>,
    /// Disconnected at the end.
    stop: Receiver<()>,
}

/// Registers, if an owner is named, and renews until the value is dropped.
///
/// # Errors
/// If the token cannot be read.
pub(crate) fn start(
    args: &PresenceArgs,
    service: &Arc<Service>,
    capacity: usize,
) -> Result<Option<Presence>, Failure> {
    let (Some(owner), Some(file)) = (&args.owner, &args.owner_token_file) else {
        return Ok(None);
    };
    let token = sinew_assembly::token_of("--owner-token-file", file)?;
    let (stop, stopped) = sync_channel(0);
    let member = Member {
        owner: owner.clone(),
        token,
        registration: Registration {
            kind: RoleKind::Sandbox,
            name: args.role_name.clone(),
            host: sinew_assembly::host_name().unwrap_or_default(),
            address: args.advertise.clone(),
            build: env!("CARGO_PKG_VERSION").to_owned(),
            capacity: u32::try_from(capacity).unwrap_or(u32::MAX),
            preemptible: args.preemptible,
        },
        service: Arc::clone(service),
        stop: stopped,
    };
    // A blocking client must not be used on a thread of the runtime.
    let thread = std::thread::Builder::new().name("role".into());
    let started = thread.spawn(move || member.keep());
    started.map_err(Failure::system)?;
    Ok(Some(Presence { _stop: stop }))
}

impl Member {
    /// Whether the server ends within a time.
    fn ends_within(&self, time: Duration) -> bool {
        matches!(
            self.stop.recv_timeout(time),
            Ok(()) | Err(RecvTimeoutError::Disconnected)
        )
    }

    /// Registers until it works; `None`: the server ended before.
    fn register(&self) -> Option<RoleClient> {
        loop {
            match RoleClient::register(&self.owner, &self.token, &self.registration) {
                Ok(client) => return Some(client),
                Err(error) => output::say_error(&format!("sinew: --owner: {error}\n")),
            }
            if self.ends_within(AGAIN) {
                return None;
            }
        }
    }

    /// Renews the registration, and does what the owner orders.
    fn keep(&self) {
        let Some(mut client) = self.register() else {
            return;
        };
        let (mut worked, mut away) = (Instant::now(), false);
        loop {
            let (live, _) = self.service.live();
            if live > 0 {
                worked = Instant::now();
            }
            let beat = Heartbeat {
                version: None,
                checksum: None,
                busy: u32::try_from(live).unwrap_or(u32::MAX),
                queued: 0,
                idle_s: worked.elapsed().as_secs_f64(),
                cause: None,
            };
            // The first heartbeat after a registration makes the role ready.
            let mut soon = false;
            match client.beat(&beat) {
                Ok(orders) if orders.drain => {
                    self.service.drain();
                    if live == 0 {
                        break;
                    }
                }
                Ok(_) => away = false,
                Err(ControlError::Gone(_)) => match client.again() {
                    Ok(()) => soon = true,
                    Err(error) => output::say_error(&format!("sinew: --owner: {error}\n")),
                },
                Err(error @ ControlError::Superseded(_)) => {
                    output::say_error(&format!("sinew: --owner: {error}\n"));
                    self.service.drain();
                    return;
                }
                // The address has the owner of another run, as this server outlives runs.
                Err(error @ ControlError::Fenced { .. }) => {
                    output::say_error(&format!("sinew: --owner: {error}; registering anew\n"));
                    let Some(anew) = self.register() else {
                        return;
                    };
                    client = anew;
                    soon = true;
                }
                // The owner is away: sandboxes go on, and the next beat may find it.
                Err(error) => {
                    if !away {
                        output::say_error(&format!("sinew: --owner: {error}\n"));
                    }
                    away = true;
                }
            }
            let renew = Duration::from_millis(client.lease().renew_ms).max(SOON);
            if self.ends_within(if soon { SOON } else { renew }) {
                break;
            }
        }
        // The end of the lease says the same to an owner that does not answer.
        let _ = client.leave();
    }
}
