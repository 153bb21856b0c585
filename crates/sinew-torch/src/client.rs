//! The calls of one owner: numbers, repetitions, deadlines, and the error that lasts.

use crate::error::TorchError;
use crate::options::{Deadlines, Residence};
use crate::status::ServerStatus;
use crate::transport::{HttpTransport, Lost, Reply, ServerAddress, Transport};
use crate::usage::TorchUsage;
use crate::wire::{self, AnswerUsage, Call, Nothing, ResideBody, Verb};
use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sinew_http::Retry;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Attempts at a call whose connection fails, and the pauses between them: 11 s in all.
const PAUSES: Retry = Retry::doubling(8, Duration::from_millis(100), Duration::from_secs(5));
/// Time for the answer to `status`, which the server gives while it computes.
const STATUS: Duration = Duration::from_secs(5);

/// The processes behind a server, as far as their owner sees them.
pub(crate) trait Watch: Send + fmt::Debug {
    /// The first process that ended, with its reason, if one did.
    fn ended(&mut self) -> Option<(usize, String)>;

    /// Announces that all processes are about to end by themselves.
    fn expect_end(&mut self);
}

/// The client of a server. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct SharedClient(Arc<Mutex<Client>>);

impl SharedClient {
    pub(crate) fn new(client: Client) -> Self {
        Self(Arc::new(Mutex::new(client)))
    }

    /// Waits for the calls of other clones.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Client> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The numbers with which a client begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Start {
    /// Generation of the owner.
    pub(crate) fence: u64,
    /// Number before that of the first call. Random, so that the server takes no call of this client for the
    /// repetition of another client's call.
    pub(crate) seq: u64,
}

impl Start {
    /// Begins at a random number.
    ///
    /// # Errors
    /// If the system has no randomness.
    pub(crate) fn of(fence: u64) -> Result<Self, TorchError> {
        let random = getrandom::u32();
        let seq = random.map_err(|e| TorchError::Setup(format!("no randomness: {e}")))?;
        Ok(Self {
            fence,
            seq: u64::from(seq),
        })
    }
}

/// Makes the engines leave the devices; the error says why they do not.
pub type FreeDevices = Box<dyn FnMut() -> Result<(), String> + Send>;

/// Use of devices in turns with engines.
struct Turns {
    free: FreeDevices,
    /// Whether weights, gradients and moments are in host memory.
    is_away: bool,
}

sinew_types::debug_fields!(Turns, is_away);

/// The calls of one owner to one server.
#[derive(Debug)]
pub(crate) struct Client {
    // Dropped before the processes, which then see the end of their connection first.
    transport: Box<dyn Transport>,
    watch: Option<Box<dyn Watch>>,
    fence: u64,
    /// Number of the last call that the server took.
    seq: u64,
    deadlines: Deadlines,
    /// Use of the devices in turns with engines; `None`: they are the trainer's own.
    turns: Option<Turns>,
    /// Error after which no call is of use.
    broken: Option<TorchError>,
    usage: TorchUsage,
}

impl Client {
    pub(crate) fn new(
        transport: Box<dyn Transport>,
        watch: Option<Box<dyn Watch>>,
        start: Start,
        deadlines: Deadlines,
    ) -> Self {
        Self {
            transport,
            watch,
            fence: start.fence,
            seq: start.seq,
            deadlines,
            turns: None,
            broken: None,
            usage: TorchUsage::default(),
        }
    }

    /// The client of a server over HTTP.
    ///
    /// # Errors
    /// If the address is none, or the system has no randomness.
    pub(crate) fn connect(
        server: &ServerAddress,
        watch: Option<Box<dyn Watch>>,
        fence: u64,
        deadlines: Deadlines,
    ) -> Result<Self, TorchError> {
        let transport = Box::new(HttpTransport::new(server)?);
        Ok(Self::new(transport, watch, Start::of(fence)?, deadlines))
    }

    /// Uses the devices in turns with engines, from now on.
    pub(crate) fn take_turns(&mut self, free: FreeDevices) {
        self.turns = Some(Turns {
            free,
            is_away: false,
        });
    }

    /// Moves everything to host memory, if the devices are used in turns.
    ///
    /// # Errors
    /// The server's.
    pub(crate) fn leave_devices(&mut self) -> Result<(), TorchError> {
        if self.turns.as_ref().is_none_or(|turns| turns.is_away) {
            return Ok(());
        }
        let place = Residence::Host;
        let Nothing {} = self.send(Verb::Reside, &ResideBody { place })?;
        if let Some(turns) = &mut self.turns {
            turns.is_away = true;
        }
        Ok(())
    }

    /// Moves everything back to the devices, once the engines have left them.
    fn return_to_devices(&mut self) -> Result<(), TorchError> {
        match &mut self.turns {
            Some(turns) if turns.is_away => (turns.free)().map_err(TorchError::Setup)?,
            _ => return Ok(()),
        }
        let place = Residence::Device;
        let Nothing {} = self.send(Verb::Reside, &ResideBody { place })?;
        if let Some(turns) = &mut self.turns {
            turns.is_away = false;
        }
        Ok(())
    }

    /// Sends a call and returns its answer, after the trainer has come back to devices that it left.
    ///
    /// # Errors
    /// Those of [`Client::send`], and of engines that do not leave the devices.
    pub(crate) fn call<B: Serialize, T: DeserializeOwned>(
        &mut self,
        verb: Verb,
        body: &B,
    ) -> Result<T, TorchError> {
        if verb.computes() {
            self.return_to_devices()?;
        }
        self.send(verb, body)
    }

    /// Sends a call and returns its answer. A call whose connection fails is repeated under its number, and
    /// the server computes it once.
    ///
    /// # Errors
    /// The server's, and those of the connection. After a final error all calls fail with it.
    fn send<B: Serialize, T: DeserializeOwned>(
        &mut self,
        verb: Verb,
        body: &B,
    ) -> Result<T, TorchError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let call = Call {
            fence: self.fence,
            seq: self.seq + 1,
            body,
        };
        let message = Bytes::from(wire::encode(verb, &call)?);
        let answer = self.settled(verb, &message).and_then(|body| {
            // The server has computed this number, whatever the answer looks like.
            self.seq += 1;
            wire::decode(verb.name(), &body)
        });
        answer.map_err(|error| self.failed(error))
    }

    /// Takes note of the error of a call, and returns what it means.
    fn failed(&mut self, error: TorchError) -> TorchError {
        if error.is_answer() {
            self.seq += 1;
        }
        let error = match error {
            // A rank that could not write a file leaves the server usable, one that failed in a pass does
            // not.
            TorchError::Rank(fault) => match self.status() {
                Ok(status) if !status.is_broken() => TorchError::Input(fault),
                _ => TorchError::Rank(fault),
            },
            other => other,
        };
        if error.is_final() {
            self.broken = Some(error.clone());
        }
        error
    }

    /// Whether a call may succeed.
    pub(crate) fn is_usable(&self) -> bool {
        self.broken.is_none()
    }

    /// The body of a success.
    fn settled(&mut self, verb: Verb, message: &Bytes) -> Result<Vec<u8>, TorchError> {
        let start = self.transport.now();
        let Reply { status, body } = self.answered(verb, message)?;
        if status == 200 {
            let usage: AnswerUsage = wire::decode(verb.name(), &body)?;
            let wall = self.transport.now().saturating_sub(start).as_secs_f64();
            let (name, peak) = (verb.name(), &usage.peak_bytes);
            self.usage.add(name, usage.seconds, wall, peak);
            return Ok(body);
        }
        let Some(error) = wire::reported(&body) else {
            let said = sinew_http::line(&body, 200);
            return Err(TorchError::Connection {
                verb: verb.name(),
                why: match status {
                    401 => "status 401: the token is not that of the server".to_owned(),
                    _ => format!("status {status}: {said}"),
                },
            });
        };
        // A process that ended is the cause of what the others report.
        let lost = matches!(error, TorchError::Rank(_) | TorchError::Broken(_));
        match self.first_ended().filter(|_| lost) {
            Some((rank, why)) => Err(TorchError::Ended {
                rank,
                why: format!("{why}\n  the server reports: {error}"),
            }),
            None => Err(error),
        }
    }

    /// The answer of any status, after repetitions where the connection fails.
    fn answered(&mut self, verb: Verb, message: &Bytes) -> Result<Reply, TorchError> {
        let limit = self.limit(verb);
        let end = self.transport.now() + limit;
        let mut failed = 0;
        loop {
            let left = end.saturating_sub(self.transport.now());
            let why = match self.transport.post(verb.name(), message, left) {
                Ok(reply) => return Ok(reply),
                Err(Lost::Late) => return Err(self.late(verb, limit)),
                Err(Lost::Lasting(why)) => {
                    let verb = verb.name();
                    return Err(TorchError::Connection { verb, why });
                }
                Err(Lost::Passing(why)) => why,
            };
            failed += 1;
            if let Some((rank, why)) = self.first_ended() {
                return Err(TorchError::Ended { rank, why });
            }
            let pause = PAUSES.pause(failed, None);
            let left = end.saturating_sub(self.transport.now());
            match pause.filter(|pause| *pause < left) {
                Some(pause) => self.transport.pause(pause),
                None => {
                    let verb = verb.name();
                    return Err(TorchError::Connection { verb, why });
                }
            }
        }
    }

    fn first_ended(&mut self) -> Option<(usize, String)> {
        self.watch.as_mut()?.ended()
    }

    /// The error of a call that took too long, with the phase of each rank.
    fn late(&mut self, verb: Verb, limit: Duration) -> TorchError {
        if let Some((rank, why)) = self.first_ended() {
            return TorchError::Ended { rank, why };
        }
        let ranks = match self.status() {
            Ok(status) => status.to_string(),
            Err(_) => format!("nor `status` within {} s", STATUS.as_secs()),
        };
        TorchError::Deadline {
            verb: verb.name(),
            seconds: limit.as_secs(),
            ranks,
        }
    }

    /// The work of the ranks, also while they compute.
    ///
    /// # Errors
    /// If the server does not answer within 5 s.
    pub(crate) fn status(&mut self) -> Result<ServerStatus, TorchError> {
        let verb = "status";
        let failed = |why: String| TorchError::Connection { verb, why };
        let body = rmp_serde::to_vec_named(&Nothing {}).map_err(|e| failed(e.to_string()))?;
        match self.transport.post(verb, &Bytes::from(body), STATUS) {
            Ok(Reply { status: 200, body }) => wire::decode(verb, &body),
            Ok(Reply { status, body }) => Err(failed(format!(
                "status {status}: {}",
                sinew_http::line(&body, 200)
            ))),
            Err(Lost::Late) => Err(failed(format!("no answer in {} s", STATUS.as_secs()))),
            Err(Lost::Passing(why) | Lost::Lasting(why)) => Err(failed(why)),
        }
    }

    /// Ends all ranks.
    ///
    /// # Errors
    /// Fails as [`Client::call`]; then the ranks may still run.
    pub(crate) fn close(&mut self) -> Result<(), TorchError> {
        if let Some(watch) = &mut self.watch {
            watch.expect_end();
        }
        let Nothing {} = self.call(Verb::Close, &Nothing {})?;
        self.broken = Some(TorchError::Setup("it is closed".to_owned()));
        Ok(())
    }

    /// Returns what the calls since the last look took.
    pub(crate) fn take_usage(&mut self) -> TorchUsage {
        std::mem::take(&mut self.usage)
    }

    fn limit(&self, verb: Verb) -> Duration {
        match verb {
            Verb::Open => self.deadlines.open,
            Verb::Forward | Verb::Backward | Verb::Top | Verb::Apply => self.deadlines.compute,
            Verb::Save | Verb::Load | Verb::Publish | Verb::Reside => self.deadlines.files,
            Verb::Zero | Verb::Close => self.deadlines.other,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
