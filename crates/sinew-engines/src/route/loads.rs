//! Engines in the order of their load.

use super::state::EngineState;
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// A load, ordered as `f64::total_cmp` does.
#[derive(Clone, Copy, Debug)]
struct Load(f64);

impl Ord for Load {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Load {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Load {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Load {}

/// Engines whose number of attempts allows one more, the least loaded first.
#[derive(Debug)]
pub(super) struct Loads {
    open: BTreeSet<(Load, usize)>,
    /// Load of each engine under which `open` lists it.
    place: Vec<Option<Load>>,
    max_running: usize,
}

impl Loads {
    /// Idle engines.
    pub(super) fn new(engines: usize, max_running: usize) -> Self {
        let mut loads = Self {
            open: BTreeSet::new(),
            place: vec![None; engines],
            max_running,
        };
        for engine in 0..engines {
            loads.set(engine, 0.0, 0);
        }
        loads
    }

    /// Takes over load and attempts of an engine, which have changed.
    pub(super) fn changed(&mut self, engine: usize, state: &EngineState) {
        self.set(engine, state.load, state.attempts.len());
    }

    fn set(&mut self, engine: usize, load: f64, attempts: usize) {
        let place = (attempts < self.max_running).then_some(Load(load));
        let old = std::mem::replace(&mut self.place[engine], place);
        if old == place {
            return;
        }
        if let Some(load) = old {
            self.open.remove(&(load, engine));
        }
        if let Some(load) = place {
            self.open.insert((load, engine));
        }
    }

    /// Engines and their loads, the least loaded first.
    pub(super) fn iter(&self) -> impl Iterator<Item = (f64, usize)> + '_ {
        self.open.iter().map(|(load, engine)| (load.0, *engine))
    }
}
