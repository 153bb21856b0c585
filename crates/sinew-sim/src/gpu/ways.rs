//! The way out where a trainer does not fit: keys to change, tried on the same formulas.

use super::{Adapters, Checkpointing, ComputeType, TrainerSetup};

/// Rank of adapters that is proposed.
const ADAPTER_RANK: u64 = 32;
/// Micro-batches are proposed in multiples of so many tokens.
const STEP: u64 = 256;
/// Most GPUs that are proposed, as a power of two.
const MOST_DOUBLINGS: u32 = 10;

/// Names of keys in messages: those of a recipe, or of a simulated plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyNames {
    pub ranks: &'static str,
    pub dtype: &'static str,
    pub checkpointing: &'static str,
    pub micro_batch_tokens: &'static str,
    pub adapters: &'static str,
}

impl KeyNames {
    /// Keys of a recipe.
    pub const RECIPE: Self = Self {
        ranks: "trainer.ranks",
        dtype: "trainer.dtype",
        checkpointing: "trainer.checkpointing",
        micro_batch_tokens: "train.micro_batch_tokens",
        adapters: "train.lora.rank",
    };
    /// Keys of a simulated plan.
    pub const PLAN: Self = Self {
        ranks: "trainer.devices",
        dtype: "memory.dtype",
        checkpointing: "memory.checkpointing",
        micro_batch_tokens: "memory.micro_batch_tokens",
        adapters: "memory.lora_rank",
    };
}

/// Functions of the plan that a proposal is tried with.
pub(super) struct Tests<'a> {
    /// Whether a trainer fits the machine.
    pub(super) fits: &'a dyn Fn(&TrainerSetup) -> bool,
    /// Whether it fits GPUs of that size, however many there are.
    pub(super) enough: &'a dyn Fn(&TrainerSetup) -> bool,
    /// Its bytes, for people.
    pub(super) shown: &'a dyn Fn(&TrainerSetup) -> String,
}

/// A change of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Dtype,
    Checkpointing(Checkpointing),
    Ranks(u64),
    Tokens(u64),
    Adapters,
}

impl Change {
    fn applied(self, setup: &TrainerSetup) -> TrainerSetup {
        let mut changed = setup.clone();
        match self {
            Self::Dtype => changed.dtype = ComputeType::Bf16,
            Self::Checkpointing(how) => changed.checkpointing = how,
            Self::Ranks(ranks) => changed.ranks = ranks,
            Self::Tokens(tokens) => changed.micro_batch_tokens = tokens,
            Self::Adapters => {
                changed.adapters = Some(Adapters {
                    rank: ADAPTER_RANK,
                    targets: Vec::new(),
                });
            }
        }
        changed
    }

    fn text(self, keys: KeyNames) -> String {
        match self {
            Self::Dtype => format!("{} = \"bf16\"", keys.dtype),
            Self::Checkpointing(how) => format!("{} = \"{}\"", keys.checkpointing, how.name()),
            Self::Ranks(ranks) => format!("{} = {ranks}", keys.ranks),
            Self::Tokens(tokens) => format!("{} = {tokens}", keys.micro_batch_tokens),
            Self::Adapters => format!("{} = {ADAPTER_RANK}", keys.adapters),
        }
    }
}

/// All changes that could help, those that cost least first.
fn possible(setup: &TrainerSetup, gpus: Option<u64>) -> Vec<Change> {
    let mut changes = Vec::new();
    if setup.cuda && setup.dtype == ComputeType::F32 {
        changes.push(Change::Dtype);
    }
    if setup.checkpointing == Checkpointing::None {
        changes.push(Change::Checkpointing(Checkpointing::Full));
    }
    match gpus {
        Some(count) if count != setup.ranks => changes.push(Change::Ranks(count)),
        None if setup.ranks > 1 => changes.push(Change::Ranks(1)),
        _ => {}
    }
    if setup.micro_batch_tokens > setup.least_tokens {
        changes.push(Change::Tokens(setup.least_tokens));
    }
    if setup.cuda && setup.checkpointing != Checkpointing::Offload {
        changes.push(Change::Checkpointing(Checkpointing::Offload));
    }
    if setup.adapters.is_none() {
        changes.push(Change::Adapters);
    }
    changes
}

/// The largest micro-batch that fits, in steps; the least one where it is smaller than a step.
fn refined(change: Change, setup: &TrainerSetup, tests: &Tests<'_>) -> Change {
    let Change::Tokens(least) = change else {
        return change;
    };
    let (mut low, mut high) = (least.div_ceil(STEP), setup.micro_batch_tokens / STEP);
    let fits = |steps: u64| (tests.fits)(&Change::Tokens(steps * STEP).applied(setup));
    if low > high || !fits(low) {
        return change;
    }
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    Change::Tokens(low * STEP)
}

/// All changes applied, one after the other.
fn all_applied(changes: &[Change], setup: &TrainerSetup) -> TrainerSetup {
    let first = setup.clone();
    changes.iter().fold(first, |s, change| change.applied(&s))
}

/// The fewest changes in this order that fit together; `None`: not even all of them do.
fn together(changes: &[Change], setup: &TrainerSetup, tests: &Tests<'_>) -> Option<Vec<Change>> {
    let fits = |some: &[Change]| (tests.fits)(&all_applied(some, setup));
    let count = (1..=changes.len()).find(|count| fits(&changes[..*count]))?;
    let mut chosen = changes[..count].to_vec();
    for at in (0..chosen.len()).rev() {
        let mut fewer = chosen.clone();
        fewer.remove(at);
        if fits(&fewer) {
            chosen = fewer;
        }
    }
    Some(chosen)
}

/// The keys to change, with their new values, in words. `gpus` is the number of GPUs that there are.
pub(super) fn way_out(
    setup: &TrainerSetup,
    gpus: Option<u64>,
    keys: KeyNames,
    tests: &Tests<'_>,
) -> String {
    let changes = possible(setup, gpus);
    let alone: Vec<String> = changes
        .iter()
        .map(|change| refined(*change, setup, tests))
        .filter(|change| (tests.fits)(&change.applied(setup)))
        .map(|change| {
            let need = (tests.shown)(&change.applied(setup));
            format!("{} ({need})", change.text(keys))
        })
        .collect();
    if !alone.is_empty() {
        return alone.join(", or ");
    }
    if let Some(chosen) = together(&changes, setup, tests) {
        let need = (tests.shown)(&all_applied(&chosen, setup));
        let texts: Vec<String> = chosen.iter().map(|change| change.text(keys)).collect();
        return format!("together: {} ({need})", texts.join(", "));
    }
    if gpus.is_none() {
        return "no change of these keys is enough: take a smaller model, or a machine with GPUs"
            .to_owned();
    }
    more_gpus(setup, &changes, tests)
}

/// The number of GPUs of the same size that would be enough, with all weights trained and with adapters.
fn more_gpus(setup: &TrainerSetup, changes: &[Change], tests: &Tests<'_>) -> String {
    let free = |change: &&Change| !matches!(change, Change::Adapters | Change::Ranks(_));
    let lean: Vec<Change> = changes.iter().filter(free).copied().collect();
    let lean = all_applied(&lean, setup);
    let fewest = |setup: &TrainerSetup| {
        let mut counts = (0..=MOST_DOUBLINGS).map(|doublings| 1 << doublings);
        counts.find(|count| (tests.enough)(&Change::Ranks(*count).applied(setup)))
    };
    let adapted = match setup.adapters {
        Some(_) => None,
        None => fewest(&Change::Adapters.applied(&lean)),
    };
    let least = "no change of these keys is enough: with the least micro-batch";
    match (fewest(&lean), adapted) {
        (Some(all), Some(some)) => {
            format!("{least}, {all} GPUs of this size are, or {some} with adapters")
        }
        (Some(all), None) => format!("{least}, {all} GPUs of this size are"),
        (None, Some(some)) => format!("{least}, {some} GPUs of this size are, with adapters"),
        (None, None) => "no number of GPUs of this size is enough: take a smaller model".to_owned(),
    }
}
