//! Engines of other processes of a run in front of one router. The owner's registry names them, and they come
//! and go.
//!
//! A router has a fixed list of engines, here *seats*: each is empty or has an engine at an address. An empty
//! seat answers no probe, so that nothing starts there. An attempt that runs when its engine leaves its seat
//! runs to its end; one whose engine dies is repeated elsewhere, as with any other engine.
//!
//! Only weights that the owner announced are sampled from: by version, lineage and the hash of their
//! manifest. Of the announced ones the last two count, so that generation continues while the newest are
//! loaded.

use crate::attempt::{Attempt, AttemptEnd};
use crate::backend::{AttemptSink, Backend, Probe, ServedWeights, Weights};
use crate::config::{ConfigError, Timeouts};
use crate::error::AttemptError;
use crate::http::{self, Http};
use crate::local::{checked_end, refusal};
use crate::served::{GENERATE_PATH, STATE_PATH, ServedCall, ServedEvent, ServedMark, ServedState};
use futures::FutureExt;
use futures::future::BoxFuture;
use sinew_types::{Fidelity, PromptLogprobs, WeightsId};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Announced weights that count.
const KNOWN: usize = 2;
/// Time from a call to its first token, which covers the queue of an engine that many workers share.
const FIRST_TOKEN_S: f64 = 600.0;

/// Weights that the owner announced last. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct KnownWeights(Arc<Mutex<VecDeque<(WeightsId, String)>>>);

impl KnownWeights {
    /// The owner announced weights, with the hash of their manifest.
    pub fn announce(&self, id: WeightsId, manifest: String) {
        let mut known = self.lock();
        known.retain(|(other, _)| *other != id);
        known.push_back((id, manifest));
        while known.len() > KNOWN {
            known.pop_front();
        }
    }

    /// Every change leaves the list whole, so a poisoned lock is usable.
    fn lock(&self) -> MutexGuard<'_, VecDeque<(WeightsId, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn manifest(&self, id: WeightsId) -> Option<String> {
        let known = self.lock();
        let found = known.iter().find(|(other, _)| *other == id);
        found.map(|(_, manifest)| manifest.clone())
    }

    /// The weights of an engine, as a router may use them.
    fn judged(&self, mark: &ServedMark) -> ServedWeights {
        let Ok(id) = mark.id.parse::<WeightsId>() else {
            let none = "no weights yet".to_owned();
            let other = Some(mark.id.clone()).filter(|id| !id.is_empty());
            return ServedWeights::Foreign(other.unwrap_or(none));
        };
        match self.manifest(id) {
            Some(manifest) if manifest == mark.manifest => ServedWeights::Version(id),
            Some(_) => ServedWeights::Foreign(format!("{id} with another checksum than announced")),
            // They are older ones that are being replaced, or newer ones that this process hears of soon.
            None => ServedWeights::Foreign(format!("loading-{id}")),
        }
    }
}

/// An engine that the registry names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineAddress {
    /// Name of the role, which no other engine of the run ever has.
    pub id: String,
    /// Its address.
    pub url: String,
}

/// Seats in front of a router. Clones share them.
#[derive(Clone)]
pub struct EngineSeats {
    seats: Vec<Arc<Seat>>,
    /// Seats without an engine, the one that was left first at the front.
    free: Arc<Mutex<VecDeque<usize>>>,
    known: KnownWeights,
    key: String,
}

// The key is not for logs.
sinew_types::debug_fields!(EngineSeats, seats, free, known);

impl EngineSeats {
    /// Empty seats. `key` is the bearer token of all engines.
    pub fn new(count: usize, known: KnownWeights, key: &str) -> Self {
        let seat = |index| {
            Arc::new(Seat {
                name: format!("seat {index}"),
                engine: Mutex::default(),
            })
        };
        Self {
            seats: (0..count).map(seat).collect(),
            free: Arc::new(Mutex::new((0..count).collect())),
            known,
            key: key.to_owned(),
        }
    }

    /// The seats as engines of a router.
    pub fn backends(&self) -> Vec<Arc<dyn Backend>> {
        let backend = |seat: &Arc<Seat>| Arc::<Seat>::clone(seat) as Arc<dyn Backend>;
        self.seats.iter().map(backend).collect()
    }

    /// Number of seats with an engine.
    pub fn taken(&self) -> usize {
        let taken = |seat: &&Arc<Seat>| seat.engine().is_some();
        self.seats.iter().filter(taken).count()
    }

    /// Lets exactly these engines sit, as far as there are seats: those that sit already stay where they are.
    /// Returns the reasons for addresses that are none.
    pub fn seat(&self, engines: &[EngineAddress]) -> Vec<ConfigError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, seat) in self.seats.iter().enumerate() {
            let mut engine = seat.engine();
            let sits = engine.as_ref().map(|engine| &engine.address);
            if sits.is_some_and(|address| !engines.contains(address)) {
                *engine = None;
                free.push_back(index);
            }
        }
        let mut faults = Vec::new();
        for address in engines {
            let sits = |seat: &Arc<Seat>| {
                let engine = seat.engine();
                engine.as_ref().is_some_and(|e| e.address == *address)
            };
            if self.seats.iter().any(sits) {
                continue;
            }
            let Some(index) = free.front().copied() else {
                break;
            };
            match self.engine(address) {
                Ok(engine) => {
                    free.pop_front();
                    *self.seats[index].engine() = Some(engine);
                }
                Err(fault) => faults.push(fault),
            }
        }
        faults
    }

    fn engine(&self, address: &EngineAddress) -> Result<SeatedEngine, ConfigError> {
        let timeouts = Timeouts {
            first_token_s: FIRST_TOKEN_S,
            ..Timeouts::default()
        };
        Ok(SeatedEngine {
            address: address.clone(),
            http: Http::new(&address.url, Some(&self.key), timeouts)?,
            known: self.known.clone(),
        })
    }
}

/// An engine in a seat.
#[derive(Clone, Debug)]
struct SeatedEngine {
    address: EngineAddress,
    http: Http,
    known: KnownWeights,
}

impl SeatedEngine {
    async fn probe(&self) -> Result<Probe, AttemptError> {
        let state: ServedState = self.http.get(STATE_PATH).await?;
        let status = state.status;
        let known = status.kv_tokens_total > 0;
        Ok(Probe {
            sleeping: status.asleep,
            running: status.running,
            waiting: status.waiting,
            kv_tokens_total: known.then_some(status.kv_tokens_total),
            kv_tokens_free: known.then_some(status.kv_tokens_free),
            context: Some(state.context),
            vocab: Some(state.vocab),
            sampled_tokens: status.sampled_tokens,
            prefill_tokens: status.prefill_tokens,
            cached_prompt_tokens: status.cached_prompt_tokens,
            preemptions: status.preemptions,
            ..Probe::new(self.known.judged(&state.weights))
        })
    }

    async fn generate(
        &self,
        attempt: &Attempt,
        sink: &mut AttemptSink,
    ) -> Result<AttemptEnd, AttemptError> {
        let id = attempt.weights;
        let Some(manifest) = self.known.manifest(id) else {
            let body = format!("weights {id} are not among the last that the owner announced");
            return Err(AttemptError::Busy { status: 503, body });
        };
        let call = ServedCall {
            weights: ServedMark {
                id: id.to_string(),
                manifest,
            },
            prompt: attempt.prompt.to_vec(),
            sampling: attempt.sampling.clone(),
            priority: attempt.priority,
            prompt_logprobs: attempt.prompt_logprobs.as_deref().cloned(),
        };
        let body = serde_json::to_value(&call);
        let body = body.map_err(|e| AttemptError::Unsupported(e.to_string()))?;
        let mut events = self.http.stream(GENERATE_PATH, &body).await?;
        while let Some(data) = events.next().await? {
            let event: Option<ServedEvent> = http::event(&data)?;
            let Some(event) = event else { break };
            if let Some(end) = self.take(event, attempt, sink).await? {
                return Ok(end);
            }
        }
        Err(AttemptError::Cut("the engine said nothing more".to_owned()))
    }

    /// Hands an event on; the end, if it is one.
    async fn take(
        &self,
        event: ServedEvent,
        attempt: &Attempt,
        sink: &mut AttemptSink,
    ) -> Result<Option<AttemptEnd>, AttemptError> {
        match event {
            ServedEvent::Prompt(logprobs) => sink.prompt(logprobs).await?,
            ServedEvent::Tokens(tokens) => {
                let ids: Vec<_> = tokens.iter().map(|t| t.id).collect();
                let logprobs = tokens.iter().map(|t| Some(f64::from(t.logprob)));
                let logprobs: Vec<_> = logprobs.collect();
                let top = tokens.into_iter().map(|t| t.top).collect();
                sink.tokens(&ids, &logprobs, top).await?;
            }
            ServedEvent::Finished {
                reason,
                cached_prompt_tokens,
                routes,
            } => {
                return Ok(Some(AttemptEnd {
                    reason: checked_end(sink, reason).await?,
                    cached_prompt_tokens,
                    routes,
                }));
            }
            ServedEvent::Failed(error) => return Err(refusal(error, attempt)),
            ServedEvent::Weights(mark) => {
                let found = match self.known.judged(&mark) {
                    ServedWeights::Foreign(label) => label,
                    other => other.to_string(),
                };
                return Err(AttemptError::Version {
                    expected: attempt.weights,
                    found,
                });
            }
        }
        Ok(None)
    }
}

/// A place for an engine.
#[derive(Debug)]
struct Seat {
    name: String,
    engine: Mutex<Option<SeatedEngine>>,
}

impl Seat {
    /// Every change is one assignment, so a poisoned lock is usable.
    fn engine(&self) -> MutexGuard<'_, Option<SeatedEngine>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seated(&self) -> Result<SeatedEngine, AttemptError> {
        let empty = || AttemptError::Connect {
            to: self.name.clone(),
            why: "no engine of the registry sits there".to_owned(),
        };
        self.engine().clone().ok_or_else(empty)
    }
}

/// Weights of such an engine are its own affair: it follows the owner.
fn follows(what: &str) -> BoxFuture<'static, Result<(), AttemptError>> {
    let why = format!("{what}: engines of the registry follow the owner of the run");
    std::future::ready(Err(AttemptError::Unsupported(why))).boxed()
}

impl Backend for Seat {
    fn name(&self) -> &str {
        &self.name
    }

    fn fidelity(&self) -> Fidelity {
        Fidelity::TokenExact
    }

    /// The engine itself refuses what it cannot report.
    fn accepts_prompt(&self, _: &PromptLogprobs) -> Result<(), AttemptError> {
        Ok(())
    }

    fn generate<'a>(
        &'a self,
        attempt: &'a Attempt,
        sink: &'a mut AttemptSink,
    ) -> BoxFuture<'a, Result<AttemptEnd, AttemptError>> {
        async move { self.seated()?.generate(attempt, sink).await }.boxed()
    }

    fn probe(&self) -> BoxFuture<'_, Result<Probe, AttemptError>> {
        async move { self.seated()?.probe().await }.boxed()
    }

    fn label(&self, _: WeightsId) -> BoxFuture<'_, Result<(), AttemptError>> {
        follows("labels")
    }

    fn load<'a>(&'a self, _: &'a Weights) -> BoxFuture<'a, Result<(), AttemptError>> {
        follows("weights")
    }

    fn sleep(&self) -> BoxFuture<'_, Result<(), AttemptError>> {
        follows("sleep")
    }

    fn wake(&self) -> BoxFuture<'_, Result<(), AttemptError>> {
        follows("wake")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::{Lineage, PolicyVersion};

    fn id(version: u64, lineage: u32) -> WeightsId {
        WeightsId::new(PolicyVersion(version), Lineage(lineage))
    }

    fn mark(id: WeightsId, manifest: &str) -> ServedMark {
        ServedMark {
            id: id.folder_name(),
            manifest: manifest.to_owned(),
        }
    }

    fn engine(index: usize) -> EngineAddress {
        EngineAddress {
            id: format!("r-engine-{index}-0"),
            url: format!("http://h{index}:1"),
        }
    }

    /// Ids of the engines by their seats.
    fn seated(seats: &EngineSeats) -> Vec<Option<String>> {
        let of = |seat: &Arc<Seat>| seat.engine().as_ref().map(|e| e.address.id.clone());
        seats.seats.iter().map(of).collect()
    }

    #[test]
    fn only_announced_weights_are_sampled_from() {
        let known = KnownWeights::default();
        assert!(matches!(
            known.judged(&ServedMark::default()),
            ServedWeights::Foreign(_)
        ));
        known.announce(id(5, 1), "aa".into());
        let served = ServedWeights::Version(id(5, 1));
        assert_eq!(known.judged(&mark(id(5, 1), "aa")), served);
        for (other, manifest) in [
            (id(5, 1), "bb"),
            (id(5, 2), "aa"),
            (id(6, 1), "aa"),
            (id(4, 1), "aa"),
        ] {
            let judged = known.judged(&mark(other, manifest));
            assert!(
                matches!(judged, ServedWeights::Foreign(_)),
                "{other} {manifest}"
            );
        }
        known.announce(id(6, 1), "cc".into());
        assert_eq!(known.judged(&mark(id(5, 1), "aa")), served);
        // The same version may be published again with other bits.
        known.announce(id(6, 1), "dd".into());
        assert_eq!(known.judged(&mark(id(5, 1), "aa")), served);
        assert_ne!(
            known.judged(&mark(id(6, 1), "cc")),
            ServedWeights::Version(id(6, 1))
        );
        known.announce(id(7, 1), "ee".into());
        assert_ne!(known.judged(&mark(id(5, 1), "aa")), served);
    }

    #[test]
    fn engines_keep_their_seats_and_free_ones_rest_longest() {
        let seats = EngineSeats::new(3, KnownWeights::default(), "key");
        let all: Vec<EngineAddress> = (0..5).map(engine).collect();
        assert!(seats.seat(&all[..2]).is_empty());
        let name = |index: usize| Some(all[index].id.clone());
        assert_eq!(seated(&seats), [name(0), name(1), None]);
        assert!(seats.seat(&[all[1].clone(), all[2].clone()]).is_empty());
        assert_eq!(seated(&seats), [None, name(1), name(2)]);
        // There are no more seats than these.
        assert!(seats.seat(&all[1..]).is_empty());
        assert_eq!(seated(&seats), [name(3), name(1), name(2)]);
        assert_eq!(seats.taken(), 3);
        // A new incarnation at another address is another engine.
        let moved = EngineAddress {
            url: "http://h9:1".into(),
            ..all[1].clone()
        };
        assert!(seats.seat(std::slice::from_ref(&moved)).is_empty());
        assert_eq!(seated(&seats), [name(1), None, None]);
        assert!(seats.seat(&[]).is_empty());
        assert_eq!(seats.taken(), 0);
    }

    #[test]
    fn an_address_that_is_none_takes_no_seat() {
        let seats = EngineSeats::new(1, KnownWeights::default(), "not-for-logs");
        let wrong = EngineAddress {
            id: "r-engine-0-0".into(),
            url: "ftp://h".into(),
        };
        let faults = seats.seat(&[wrong, engine(1)]);
        assert_eq!(faults.len(), 1);
        assert!(faults[0].to_string().contains("ftp://h"), "{faults:?}");
        assert_eq!(seated(&seats), [Some(engine(1).id)]);
        assert!(!format!("{seats:?}").contains("not-for-logs"));
    }
}
