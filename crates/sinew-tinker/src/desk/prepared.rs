//! Commands as the clerk takes them: named, encoded and counted, which costs too much for its thread.

use super::codec::{pack, squeeze};
use super::types::{Command, ModelId, Refusal, RequestId};

/// Kind of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    CreateModel,
    CreateFromState,
    Forward,
    ForwardBackward,
    OptimStep,
    SaveState,
    LoadState,
    SaveForSampler,
    SaveExternal,
    Refused,
    Unload,
    Sample,
}

impl Kind {
    const ALL: [Self; 12] = [
        Self::CreateModel,
        Self::CreateFromState,
        Self::Forward,
        Self::ForwardBackward,
        Self::OptimStep,
        Self::SaveState,
        Self::LoadState,
        Self::SaveForSampler,
        Self::SaveExternal,
        Self::Refused,
        Self::Unload,
        Self::Sample,
    ];

    /// The name in the journal.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::CreateModel => "create_model",
            Self::CreateFromState => "create_from_state",
            Self::Forward => "forward",
            Self::ForwardBackward => "forward_backward",
            Self::OptimStep => "optim_step",
            Self::SaveState => "save_state",
            Self::LoadState => "load_state",
            Self::SaveForSampler => "save_for_sampler",
            Self::SaveExternal => "save_external",
            Self::Refused => "refused",
            Self::Unload => "unload",
            Self::Sample => "sample",
        }
    }

    /// The kind of a name.
    pub(super) fn parse(name: &str) -> Result<Self, Refusal> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| Refusal::Failed(format!("the journal has a command of kind {name:?}")))
    }

    /// Kind of a command.
    pub(super) fn of(command: &Command) -> Self {
        match command {
            Command::CreateModel { .. } => Self::CreateModel,
            Command::CreateFromState { .. } => Self::CreateFromState,
            Command::ForwardBackward {
                forward_only: true, ..
            } => Self::Forward,
            Command::ForwardBackward { .. } => Self::ForwardBackward,
            Command::OptimStep { .. } => Self::OptimStep,
            Command::SaveState { .. } => Self::SaveState,
            Command::LoadState { .. } => Self::LoadState,
            Command::SaveForSampler { .. } => Self::SaveForSampler,
            Command::SaveExternal { .. } => Self::SaveExternal,
            Command::Refused { .. } => Self::Refused,
            Command::Unload { .. } => Self::Unload,
            Command::Sample { .. } => Self::Sample,
        }
    }

    /// Whether another tenant's turn begins after it.
    pub(super) fn ends_turn(self) -> bool {
        matches!(self, Self::OptimStep | Self::Unload)
    }

    /// Whether the trainer reads the whole command.
    pub(super) fn is_compute(self) -> bool {
        matches!(
            self,
            Self::Forward | Self::ForwardBackward | Self::OptimStep
        )
    }

    /// Whether its effect is only in memory until a live checkpoint is written.
    pub(super) fn is_replayed(self) -> bool {
        matches!(self, Self::ForwardBackward | Self::OptimStep)
    }
}

/// A command that arrives.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) kind: Kind,
    pub(super) digest: [u8; 32],
    /// The command, encoded.
    pub(super) payload: Vec<u8>,
    /// Tokens that it computes; sequences of a sample request.
    pub(super) cost: u64,
    /// The command, without its data where it has many.
    pub(super) command: Command,
}

impl Prepared {
    /// Encodes a command.
    pub(super) fn of(mut command: Command) -> Result<Self, Refusal> {
        let raw = pack(&command)?;
        let digest = *blake3::hash(&raw).as_bytes();
        let payload = squeeze(&raw)?;
        let cost = cost(&command);
        let kind = Kind::of(&command);
        if let Command::ForwardBackward { data, .. } = &mut command {
            data.clear();
        }
        Ok(Self {
            kind,
            digest,
            payload,
            cost,
            command,
        })
    }
}

/// Tokens that a command computes, where a backward pass counts as two forward passes; sequences that a
/// sample request needs at the engine.
fn cost(command: &Command) -> u64 {
    match command {
        Command::ForwardBackward {
            data, forward_only, ..
        } => {
            let tokens: u64 = data.iter().map(|datum| datum.tokens.len() as u64).sum();
            tokens.saturating_mul(if *forward_only { 1 } else { 3 })
        }
        Command::Sample { request, .. } => {
            let places = (request.prompt.len() as u64).saturating_sub(1);
            let draws = places.saturating_mul(u64::from(request.alternatives));
            draws.saturating_add(u64::from(request.samples))
        }
        _ => 1,
    }
}

/// The future of a model's command.
pub(super) fn model_request(model: &ModelId, seq: u64) -> RequestId {
    RequestId::from(format!("{model}:{seq}"))
}

/// The future of a model's end.
pub(super) fn unload_request(model: &ModelId) -> RequestId {
    RequestId::from(format!("{model}:unload"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desk::types::{SampleInput, SamplerRef};
    use crate::{Datum, LossRequest};

    fn compute(tokens: usize, forward_only: bool) -> Command {
        Command::ForwardBackward {
            model: "m".into(),
            seq: 1,
            data: vec![
                Datum {
                    tokens: vec![1; tokens],
                    ..Datum::default()
                };
                2
            ],
            loss: LossRequest::default(),
            forward_only,
        }
    }

    #[test]
    fn the_same_command_has_the_same_digest() {
        let first = Prepared::of(compute(3, false)).unwrap();
        let again = Prepared::of(compute(3, false)).unwrap();
        let other = Prepared::of(compute(4, false)).unwrap();
        assert_eq!(first.digest, again.digest);
        assert_ne!(first.digest, other.digest);
        assert_eq!((first.cost, first.kind), (18, Kind::ForwardBackward));
        assert_eq!(Prepared::of(compute(3, true)).unwrap().cost, 6);
        assert_eq!(first.payload, again.payload);
    }

    #[test]
    fn kinds_are_read_as_they_are_written() {
        for kind in Kind::ALL {
            assert_eq!(Kind::parse(kind.name()).unwrap(), kind);
        }
        assert!(Kind::parse("sleep").is_err());
        let sample = Command::Sample {
            sampler: SamplerRef::Base("tiny".to_owned()),
            seq: Some(4),
            request: SampleInput {
                samples: 7,
                ..SampleInput::default()
            },
        };
        assert_eq!(Prepared::of(sample).unwrap().cost, 7);
    }
}
