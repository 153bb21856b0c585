//! Orders of the clerk to the trainer: a mailbox that never blocks the clerk, bounded by its models.

use super::mailbox::Mailbox;
use super::types::{ModelId, ModelSpec, RequestId};
use sinew_types::PolicyVersion;
use std::collections::BTreeSet;
use std::time::Duration;

/// The part of a command that the trainer carries out.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum TrainJob {
    /// Makes the model.
    Create,
    /// Replaces its weights by those of a checkpoint.
    Load {
        /// Folder of the checkpoint.
        folder: String,
        /// Whether the optimizer's state is loaded, too.
        with_optimizer: bool,
    },
    /// A `ForwardBackward` or `OptimStep`, encoded.
    Compute {
        /// The command.
        payload: Vec<u8>,
    },
    /// Writes weights and optimizer state.
    SaveState {
        /// Folder of the new checkpoint.
        folder: String,
    },
    /// Writes weights for sampling.
    SaveSampler {
        /// Folder of the new checkpoint.
        folder: String,
        /// Number of the checkpoint.
        version: PolicyVersion,
    },
    /// Forgets the model.
    Unload,
}

/// A command for the trainer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Work {
    pub(super) model: ModelId,
    pub(super) seq: u64,
    pub(super) request: RequestId,
    pub(super) spec: ModelSpec,
    /// Tokens that it computes.
    pub(super) cost: u64,
    /// Reading of the journal that the order follows from; results of an earlier one do not count.
    pub(super) epoch: u64,
    pub(super) job: TrainJob,
}

/// The next work of the trainer.
#[derive(Debug, PartialEq)]
pub(super) enum Order {
    /// It ends, at once.
    Stop,
    /// It forgets all models: the journal does not have what they have.
    ForgetAll,
    /// It forgets a model.
    Forget(ModelId),
    /// It carries out a command.
    Run(Box<Work>),
    /// It writes the state of all models.
    Drain,
    /// Nothing was asked for within the wait.
    Idle,
}

#[derive(Debug, Default)]
struct State {
    run: Option<Box<Work>>,
    forget: BTreeSet<ModelId>,
    forget_all: bool,
    drain: bool,
    stop: bool,
}

/// The mailbox.
#[derive(Debug, Default)]
pub(super) struct Orders(Mailbox<State>);

impl Orders {
    /// Asks for a command. There is at most one at a time.
    pub(super) fn run(&self, work: Box<Work>) {
        self.0.change(|state| state.run = Some(work));
    }

    /// Asks to forget a model.
    pub(super) fn forget(&self, model: ModelId) {
        self.0.change(|state| {
            state.forget.insert(model);
        });
    }

    /// Asks to forget all models, and takes back a command that has not begun.
    pub(super) fn forget_all(&self) {
        self.0.change(|state| {
            state.forget_all = true;
            state.run = None;
        });
    }

    /// Asks to write the state of all models.
    pub(super) fn drain(&self) {
        self.0.change(|state| state.drain = true);
    }

    /// Asks to end.
    pub(super) fn stop(&self) {
        self.0.change(|state| state.stop = true);
    }

    /// The next order, waiting up to `wait` for one.
    pub(super) fn next(&self, wait: Duration) -> Order {
        let next = self.0.next(wait, |state| {
            if state.stop {
                return Some(Order::Stop);
            }
            if std::mem::take(&mut state.forget_all) {
                state.forget.clear();
                return Some(Order::ForgetAll);
            }
            if let Some(model) = state.forget.pop_first() {
                return Some(Order::Forget(model));
            }
            if let Some(work) = state.run.take() {
                return Some(Order::Run(work));
            }
            std::mem::take(&mut state.drain).then_some(Order::Drain)
        });
        next.unwrap_or(Order::Idle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desk::types::Metadata;

    #[test]
    fn orders_come_in_the_order_of_their_weight() {
        let orders = Orders::default();
        let short = Duration::from_millis(1);
        assert_eq!(orders.next(short), Order::Idle);
        let work = Work {
            model: "m".into(),
            seq: 1,
            request: "m:1".into(),
            spec: ModelSpec {
                base_model: "tiny".to_owned(),
                lora: None,
                metadata: Metadata::new(),
            },
            cost: 1,
            epoch: 0,
            job: TrainJob::Create,
        };
        orders.drain();
        orders.run(Box::new(work.clone()));
        orders.forget("a".into());
        assert_eq!(orders.next(short), Order::Forget("a".into()));
        assert_eq!(orders.next(short), Order::Run(Box::new(work.clone())));
        assert_eq!(orders.next(short), Order::Drain);
        orders.run(Box::new(work));
        orders.forget("b".into());
        orders.forget_all();
        assert_eq!(orders.next(short), Order::ForgetAll);
        assert_eq!(orders.next(short), Order::Idle);
        orders.stop();
        assert_eq!(orders.next(short), Order::Stop);
    }
}
