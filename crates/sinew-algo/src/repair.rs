//! Repair of groups with failed episodes. The steps are retry, continue, mask, pad and drop, in this order.
//! The report counts each step.
//!
//! An episode has failed if its end is [`EpisodeEnd::Failed`](sinew_types::EpisodeEnd) or it was quarantined.
//! Errors of the model are not failures. [`Truncated`](crate::Truncated) handles truncated episodes.

use crate::batch::Batch;
use crate::composition::{Advantage, Composition};
use crate::error::ConfigError;
use crate::report::RepairReport;
use serde::{Deserialize, Serialize};

/// Maximum attempts after the first.
const MAX_RETRIES: u32 = 8;

/// A step of repair, in a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", tag = "type", deny_unknown_fields)]
pub enum GroupRepair {
    /// Run failed episodes again.
    Retry {
        /// Maximum further attempts of an episode, 1 to 8.
        times: u32,
    },
    /// Continue with the usable episodes if they are at least this share of the group.
    MinViable {
        /// Minimum share of usable episodes, above 0 and at most 1.
        share: f64,
    },
    /// Keep the group, but do not train on its failed episodes. With `in_baseline`, their recorded reward (0
    /// if there is none) counts in the group's baseline.
    Mask {
        /// Whether failed episodes count in the group's baseline.
        in_baseline: bool,
    },
    /// Fill the group by repeating episodes in order, if at least this share is usable. Repeated episodes
    /// count twice in the baseline and the loss. GLM-5 uses 0.5.
    PadRepeat {
        /// Minimum share of usable episodes, above 0 and at most 1.
        share: f64,
    },
    /// Remove the group from the batch.
    // The braces make serde refuse keys of this variant.
    DropGroup {},
}

/// Last step for a group that is not viable.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rest {
    Mask { in_baseline: bool },
    PadRepeat { share: f64 },
    Drop,
}

/// Checked repair steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Repair {
    retries: u32,
    /// Minimum usable share to continue without repair.
    min_viable: Option<f64>,
    rest: Rest,
}

impl Default for Repair {
    /// Failed episodes are removed. A group continues while at least two episodes can be compared.
    fn default() -> Self {
        Self {
            retries: 0,
            min_viable: Some(0.0),
            rest: Rest::Drop,
        }
    }
}

impl Repair {
    /// Checks steps, which must have the order of [`GroupRepair`] and occur at most once.
    ///
    /// # Errors
    /// [`ConfigError`] if a step can never act, or a number is out of range.
    pub fn new(steps: &[GroupRepair]) -> Result<Self, ConfigError> {
        let mut repair = Self {
            retries: 0,
            min_viable: None,
            rest: Rest::Drop,
        };
        let impossible = |why: &str| Err(ConfigError::impossible(format!("repair: {why}")));
        let rank = |step: &GroupRepair| match step {
            GroupRepair::Retry { .. } => 0,
            GroupRepair::MinViable { .. } => 1,
            GroupRepair::Mask { .. } => 2,
            GroupRepair::PadRepeat { .. } => 3,
            GroupRepair::DropGroup {} => 4,
        };
        if !steps.windows(2).all(|w| rank(&w[0]) < rank(&w[1])) {
            return impossible(
                "the order is retry, min_viable, mask or pad_repeat, drop_group, each at most once",
            );
        }
        for step in steps {
            match *step {
                GroupRepair::Retry { times } if (1..=MAX_RETRIES).contains(&times) => {
                    repair.retries = times;
                }
                GroupRepair::Retry { times } => {
                    return Err(ConfigError::Range {
                        field: "repair.retry.times",
                        value: f64::from(times),
                        allowed: "1 to 8",
                    });
                }
                GroupRepair::MinViable { share } => {
                    repair.min_viable = Some(checked("repair.min_viable.share", share)?);
                }
                GroupRepair::Mask { in_baseline } => repair.rest = Rest::Mask { in_baseline },
                GroupRepair::PadRepeat { share } => {
                    if matches!(repair.rest, Rest::Mask { .. }) {
                        return impossible("after mask nothing is left for pad_repeat; keep one");
                    }
                    let share = checked("repair.pad_repeat.share", share)?;
                    if repair.min_viable.is_some_and(|viable| viable <= share) {
                        return impossible(
                            "min_viable takes every group that pad_repeat could fill; \
                             raise min_viable.share above pad_repeat.share or remove one",
                        );
                    }
                    repair.rest = Rest::PadRepeat { share };
                }
                GroupRepair::DropGroup {} => {
                    if matches!(repair.rest, Rest::Mask { .. }) {
                        return impossible("after mask nothing is left for drop_group");
                    }
                }
            }
        }
        match steps.last() {
            Some(GroupRepair::Mask { .. } | GroupRepair::DropGroup {}) => Ok(repair),
            _ => impossible("the last step must be mask or drop_group, so that it ends"),
        }
    }

    /// Maximum number of retries of a failed episode.
    pub fn retries(&self) -> u32 {
        self.retries
    }

    /// Refuses steps without effect on an algorithm.
    pub(crate) fn check(&self, c: &Composition) -> Result<(), ConfigError> {
        let pair = matches!(c.advantage, Advantage::Preference { .. });
        let compares = c.advantage.compares() && !pair;
        let refuse = |why: &str| {
            let kind = c.kind;
            Err(ConfigError::impossible(format!("repair: `{kind}` {why}")))
        };
        match self.rest {
            Rest::Mask { in_baseline: true } if !compares => {
                refuse("has no baseline that masked episodes could count in")
            }
            Rest::PadRepeat { .. } if !compares => refuse("has no baseline that needs full groups"),
            Rest::PadRepeat { .. } if c.filters.resample.is_some() => {
                refuse("chooses among an oversampled group, so that none needs to be filled up")
            }
            Rest::PadRepeat { .. } if matches!(c.advantage, Advantage::Gigpo { .. }) => {
                refuse("compares states, which a repeated episode would count twice")
            }
            _ => Ok(()),
        }
    }
}

/// Checks a share: above 0, at most 1.
fn checked(field: &'static str, share: f64) -> Result<f64, ConfigError> {
    if share > 0.0 && share <= 1.0 {
        return Ok(share);
    }
    Err(ConfigError::Range {
        field,
        value: share,
        allowed: "above 0, at most 1",
    })
}

/// Repairs every group with failed episodes.
pub(crate) fn settle(
    repair: &Repair,
    c: &Composition,
    batch: &mut Batch<'_>,
    report: &mut RepairReport,
) {
    let least = if c.advantage.compares() { 2 } else { 1 };
    for group in &mut batch.groups {
        let usable = group.members.len();
        if usable >= group.size {
            continue;
        }
        report.broken_groups += 1;
        let share = usable as f64 / group.size as f64;
        if usable >= least && repair.min_viable.is_some_and(|viable| share >= viable) {
            report.viable_groups += 1;
            continue;
        }
        match repair.rest {
            Rest::Mask { in_baseline } if usable >= if in_baseline { 1 } else { least } => {
                report.masked_groups += 1;
                report.masked_episodes += group.size - usable;
                if in_baseline {
                    group.members.append(&mut group.failed);
                }
            }
            Rest::PadRepeat { share: enough } if usable >= least && share >= enough => {
                let missing = group.size - usable;
                let repeated = group.members.iter().cycle().take(missing);
                group.copies = repeated.copied().collect();
                report.padded_groups += 1;
                report.repeated_episodes += missing;
            }
            // `groups_too_small` of the report names it.
            _ if usable < least => group.members.clear(),
            _ => {
                report.dropped_groups.push(group.id.clone());
                group.members.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETRY: GroupRepair = GroupRepair::Retry { times: 2 };
    const VIABLE: GroupRepair = GroupRepair::MinViable { share: 0.75 };
    const MASK: GroupRepair = GroupRepair::Mask { in_baseline: true };
    const PAD: GroupRepair = GroupRepair::PadRepeat { share: 0.5 };
    const DROP: GroupRepair = GroupRepair::DropGroup {};

    #[test]
    fn steps_that_can_never_act_are_refused() {
        let low = GroupRepair::MinViable { share: 0.5 };
        for (steps, part) in [
            (vec![], "last step"),
            (vec![RETRY], "last step"),
            (vec![PAD], "last step"),
            (vec![VIABLE, RETRY, DROP], "order"),
            (vec![RETRY, RETRY, DROP], "order"),
            (vec![MASK, DROP], "nothing is left for drop_group"),
            (vec![MASK, PAD, DROP], "nothing is left for pad_repeat"),
            (vec![low, PAD, DROP], "min_viable takes every group"),
            (vec![GroupRepair::Retry { times: 0 }, DROP], "1 to 8"),
            (
                vec![GroupRepair::MinViable { share: f64::NAN }, DROP],
                "above 0",
            ),
            (
                vec![GroupRepair::PadRepeat { share: 1.5 }, DROP],
                "at most 1",
            ),
        ] {
            let refused = Repair::new(&steps).unwrap_err().to_string();
            assert!(refused.contains(part), "{steps:?}: {refused}");
        }
        for steps in [
            vec![DROP],
            vec![RETRY, MASK],
            vec![RETRY, VIABLE, PAD, DROP],
        ] {
            Repair::new(&steps).unwrap();
        }
    }
}
