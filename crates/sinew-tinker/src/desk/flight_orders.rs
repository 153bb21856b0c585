//! Orders to the thread that samples: a mailbox that never blocks. It is bounded by the sequences that the
//! clerk lets fly.

use super::mailbox::Mailbox;
use super::types::{RequestId, SampleInput};
use sinew_types::{AdapterName, PolicyVersion};
use std::collections::VecDeque;
use std::time::Duration;

/// An adapter on disk, and its name at the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AdapterSource {
    pub(crate) name: AdapterName,
    pub(crate) version: PolicyVersion,
    /// Its checkpoint, relative to the state folder.
    pub(crate) folder: String,
}

/// The weights of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The base model.
    Base,
    /// An adapter on it.
    Adapter(AdapterSource),
    /// A whole model.
    Full {
        /// Its checkpoint, relative to the state folder.
        folder: String,
    },
}

/// A request for the engine.
#[derive(Clone, Debug)]
pub(crate) struct SampleTask {
    pub(crate) request: RequestId,
    pub(crate) source: Source,
    pub(crate) input: SampleInput,
    pub(crate) seed: u64,
}

/// An order to the thread.
#[derive(Debug)]
pub(crate) enum Order {
    /// It ends.
    Stop,
    /// It gives a request to the engine.
    Start(Box<SampleTask>),
    /// It gives a request up.
    Cancel(RequestId),
    /// Weights of a folder leave the engine once no request uses them.
    Ground(String),
    /// An adapter at the engine is replaced.
    Publish(AdapterSource),
    /// It gives up all requests.
    ForgetAll,
    /// All sequences of a flight have ended.
    Ended(u64),
    /// Nothing was asked for within the wait.
    Idle,
}

#[derive(Debug, Default)]
struct State {
    orders: VecDeque<Order>,
    is_stopped: bool,
}

/// The mailbox.
#[derive(Debug, Default)]
pub(crate) struct FlightOrders(Mailbox<State>);

impl FlightOrders {
    fn push(&self, order: Order) {
        self.0.change(|state| state.orders.push_back(order));
    }

    /// Asks for a request.
    pub(crate) fn start(&self, task: Box<SampleTask>) {
        self.push(Order::Start(task));
    }

    /// Asks to give a request up.
    pub(crate) fn cancel(&self, request: RequestId) {
        self.push(Order::Cancel(request));
    }

    /// Asks to drop weights.
    pub(crate) fn ground(&self, folder: String) {
        self.push(Order::Ground(folder));
    }

    /// Asks to replace an adapter.
    pub(crate) fn publish(&self, adapter: AdapterSource) {
        self.push(Order::Publish(adapter));
    }

    /// Asks to give up all requests, also those that have not begun.
    pub(crate) fn forget_all(&self) {
        self.0.change(|state| {
            let stays = |order: &Order| matches!(order, Order::Ground(_) | Order::Publish(_));
            state.orders.retain(stays);
            state.orders.push_back(Order::ForgetAll);
        });
    }

    /// Tells that a flight has ended. Called on the engine's thread.
    pub(crate) fn ended(&self, flight: u64) {
        self.push(Order::Ended(flight));
    }

    /// Asks to end.
    pub(crate) fn stop(&self) {
        self.0.change(|state| state.is_stopped = true);
    }

    /// The next order, waiting up to `wait` for one.
    pub(crate) fn next(&self, wait: Duration) -> Order {
        let next = self.0.next(wait, |state| {
            if state.is_stopped {
                return Some(Order::Stop);
            }
            state.orders.pop_front()
        });
        next.unwrap_or(Order::Idle)
    }
}
