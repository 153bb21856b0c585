//! The weights that engines shall serve, compared with those that they report.

use crate::role::Heartbeat;

/// The weights that engines shall serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WantedWeights {
    pub(super) version: u64,
    pub(super) checksum: Option<String>,
}

/// Relation of an engine's weights to the wanted ones.
pub(super) enum Fitness {
    Fits,
    Behind,
    /// With the reason of the quarantine.
    Wrong(String),
}

pub(super) fn fitness(wanted: &WantedWeights, heartbeat: &Heartbeat) -> Fitness {
    let want = wanted.version;
    match heartbeat.version {
        None => Fitness::Behind,
        Some(version) if version < want => Fitness::Behind,
        Some(version) if version > want => {
            let why = format!("serves weights of version {version}, wanted is {want}");
            Fitness::Wrong(why)
        }
        Some(_) => match &wanted.checksum {
            Some(sum) if heartbeat.checksum.as_ref() != Some(sum) => {
                let has = heartbeat.checksum.as_deref().unwrap_or("none");
                Fitness::Wrong(format!(
                    "version {want} has checksum {has}, wanted is {sum}"
                ))
            }
            _ => Fitness::Fits,
        },
    }
}
