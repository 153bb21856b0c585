//! Loads of weights during which attempts stay open, and the weights that sampled each of their tokens.
//!
//! A server that freezes its requests continues them with the new weights. Its answer reports spans: which
//! part of the output was sampled under which label. Tokens that arrived before the load began are of the
//! old weights. Those that arrive later wait until a span names their weights; without one they are
//! dropped, and the request continues from the tokens before them. So a token is never handed on with a
//! guessed version.

use crate::attempt::Attempt;
use crate::backend::{ServedWeights, Stamp};
use crate::error::{AttemptError, Stage};
use crate::http::EventStream;
use serde::Deserialize;
use sinew_types::WeightsId;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Maximum loads that are remembered; an attempt during more of them is cut.
const MAX_LOADS: usize = 256;

/// A part of an output, and the label of the weights that sampled it. Positions count from the attempt's
/// first token. vLLM and SGLang report it in this form.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct LabelSpan {
    #[serde(rename = "version")]
    pub(crate) label: String,
    #[serde(default)]
    pub(crate) start: usize,
    /// Position after the last one.
    #[serde(default)]
    pub(crate) end: usize,
}

/// The loads of one server by this process.
#[derive(Debug, Default)]
pub(crate) struct Swaps(Mutex<Loads>);

#[derive(Debug, Default)]
struct Loads {
    /// Number of loads that have begun.
    begun: u64,
    running: bool,
    /// End of the last load.
    ended: Option<Instant>,
    /// Number and weights of loads that succeeded.
    loaded: VecDeque<(u64, WeightsId)>,
}

impl Swaps {
    fn lock(&self) -> MutexGuard<'_, Loads> {
        // Nothing is done to it in more than one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A load begins. Called before the server is asked to freeze its requests.
    pub(crate) fn begin(&self) {
        let mut loads = self.lock();
        loads.begun += 1;
        loads.running = true;
    }

    /// The server has verified weights and their label. Called before its requests continue.
    pub(crate) fn loaded(&self, id: WeightsId) {
        let mut loads = self.lock();
        let number = loads.begun;
        loads.loaded.push_back((number, id));
        if loads.loaded.len() > MAX_LOADS {
            loads.loaded.pop_front();
        }
    }

    /// The load is over, whether it succeeded or not.
    pub(crate) fn end(&self) {
        let mut loads = self.lock();
        loads.running = false;
        loads.ended = Some(Instant::now());
    }

    /// Watches for loads that begin from now on.
    pub(crate) fn watch(&self) -> SwapWatch<'_> {
        SwapWatch {
            swaps: self,
            began: self.lock().begun,
        }
    }

    /// Whether requests stood still at any time after `since`.
    fn froze(&self, since: Instant) -> bool {
        let loads = self.lock();
        loads.running || loads.ended.is_some_and(|ended| ended > since)
    }

    /// The next event of a stream. The time of a load does not count as silence of the server.
    pub(crate) async fn next(
        &self,
        events: &mut EventStream,
    ) -> Result<Option<Vec<u8>>, AttemptError> {
        loop {
            let since = Instant::now();
            match events.next().await {
                Err(AttemptError::Timeout {
                    stage: Stage::FirstToken | Stage::BetweenTokens,
                    ..
                }) if self.froze(since) => {}
                other => return other,
            }
        }
    }
}

/// Checks that a server has still the label that it was given when a load began: one that was started anew
/// meanwhile has other weights.
///
/// # Errors
/// If it has another one.
pub(crate) fn same_label(found: &str, given: &str) -> Result<(), AttemptError> {
    if found == given {
        return Ok(());
    }
    let why = format!("its label became `{found}` while weights were loaded: was it restarted?");
    Err(AttemptError::Cut(why))
}

/// The loads since an attempt began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SwapWatch<'a> {
    swaps: &'a Swaps,
    began: u64,
}

impl SwapWatch<'_> {
    /// Whether a load has begun since.
    pub(crate) fn across(&self) -> bool {
        self.swaps.lock().begun != self.began
    }

    /// An error of the server's version is no fault of a server whose weights are being loaded.
    pub(crate) fn excused(&self, error: AttemptError) -> AttemptError {
        if matches!(error, AttemptError::Version { .. }) && self.across() {
            return AttemptError::Busy {
                status: 503,
                body: "its weights are being loaded".to_owned(),
            };
        }
        error
    }

    /// The versions of the spans. Tokens before `before_load` were handed on as those of the attempt's
    /// weights.
    ///
    /// # Errors
    /// If a span is of other weights than the attempt's and those that were loaded since.
    pub(crate) fn stamps(
        &self,
        spans: &[LabelSpan],
        attempt: &Attempt,
        before_load: usize,
    ) -> Result<Vec<Stamp>, AttemptError> {
        let loads = self.swaps.lock();
        let since = loads.loaded.iter().filter(|(n, _)| *n > self.began);
        let loaded: Vec<WeightsId> = since.map(|(_, id)| *id).collect();
        drop(loads);
        let mut stamps = Vec::with_capacity(spans.len());
        for span in spans.iter().filter(|span| span.start < span.end) {
            let own = ServedWeights::Version(attempt.weights);
            match ServedWeights::from_label(&span.label) {
                other if span.start < before_load && other != own => {
                    return Err(AttemptError::Version {
                        expected: attempt.weights,
                        found: span.label.clone(),
                    });
                }
                ServedWeights::Version(id) if id == attempt.weights || loaded.contains(&id) => {
                    stamps.push(Stamp {
                        version: id.version,
                        start: span.start,
                        end: span.end,
                    });
                }
                other => {
                    let why = format!("tokens during a load are of {other}");
                    return Err(AttemptError::Cut(why));
                }
            }
        }
        Ok(stamps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::{Lineage, PolicyVersion};

    fn id(version: u64) -> WeightsId {
        WeightsId::new(PolicyVersion(version), Lineage(0xaa))
    }

    fn attempt() -> Attempt {
        Attempt {
            weights: id(3),
            ..Attempt::default()
        }
    }

    fn span(label: &str, start: usize, end: usize) -> LabelSpan {
        LabelSpan {
            label: label.to_owned(),
            start,
            end,
        }
    }

    #[test]
    fn spans_name_only_weights_that_were_loaded_meanwhile() {
        let swaps = Swaps::default();
        swaps.begin();
        swaps.loaded(id(2));
        swaps.end();
        let watch = swaps.watch();
        assert!(!watch.across());
        swaps.begin();
        assert!(watch.across());
        swaps.loaded(id(4));
        let stamps = |spans: &[LabelSpan]| watch.stamps(spans, &attempt(), 2);
        let both = [
            span("v3-000000aa", 0, 3),
            span("loading-v4-000000aa", 3, 3),
            span("v4-000000aa", 3, 5),
        ];
        let found: Vec<_> = stamps(&both).unwrap().iter().map(|s| s.version.0).collect();
        assert_eq!(found, [3, 4]);
        for other in ["v2-000000aa", "v4-000000bb", "loading-v4-000000aa", "v4"] {
            let error = stamps(&[span("v3-000000aa", 0, 2), span(other, 2, 3)]);
            assert!(matches!(error, Err(AttemptError::Cut(_))), "{other}");
        }
        // Tokens that were handed on already must be of the attempt's weights.
        let error = stamps(&[span("v4-000000aa", 0, 3)]);
        assert!(matches!(error, Err(AttemptError::Version { .. })));
    }

    #[test]
    fn a_version_that_is_missed_during_a_load_is_no_fault() {
        let swaps = Swaps::default();
        let watch = swaps.watch();
        let wrong = AttemptError::Version {
            expected: id(3),
            found: "loading-v4-000000aa".to_owned(),
        };
        assert_eq!(watch.excused(wrong.clone()), wrong);
        swaps.begin();
        assert!(matches!(
            watch.excused(wrong),
            AttemptError::Busy { status: 503, .. }
        ));
        let cut = AttemptError::Cut("x".to_owned());
        assert_eq!(watch.excused(cut.clone()), cut);
    }
}
