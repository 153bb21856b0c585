//! Trainer, engine and host together: whether they fit, in one row each.

use super::ways::{KeyNames, Tests, way_out};
use super::{EngineBytes, EngineSetup, TrainerBytes, TrainerSetup, amount};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt;

/// Share of a GPU's memory that the trainer's figures may reach, in percent. The rest is for the gaps that
/// PyTorch's allocator leaves.
const USABLE: u64 = 95;
/// A sleeping engine on each GPU: its context and what sleep mode does not free. An estimate; not measured
/// here.
const ASLEEP: u64 = 1_500_000_000;

/// GPUs of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Gpus {
    /// Number of GPUs.
    pub count: u64,
    /// Memory of each, in bytes.
    pub bytes: u64,
}

impl fmt::Display for Gpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.count == 1 { "" } else { "s" };
        write!(f, "{} GPU{s} of {}", self.count, amount(self.bytes))
    }
}

impl Gpus {
    /// The trainer's part of one GPU.
    fn usable(self) -> u64 {
        self.bytes / 100 * USABLE
    }
}

/// A trainer, its engine, and the machine of both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuPlan {
    pub trainer: TrainerSetup,
    /// A server on GPUs; `None`: the engine is in this process.
    pub engine: Option<EngineSetup>,
    /// Whether trainer and engine use the same GPUs in turns.
    pub turns: bool,
    /// `None`: the ranks compute on CPUs.
    pub gpus: Option<Gpus>,
    /// Memory of the host; `None`: it is not known, and only reported.
    pub installed: Option<u64>,
    /// Bytes of this process: an embedded engine, its KV cache.
    pub own: u64,
    /// Names of keys in messages.
    pub keys: KeyNames,
}

/// One line of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanRow {
    /// `trainer`, `generation` or `memory`.
    pub name: &'static str,
    /// The figures, or why they do not fit and the way out.
    pub result: Result<String, String>,
    /// The same figures in bytes.
    pub figures: Value,
}

/// The ranks in words.
fn each(ranks: u64) -> String {
    match ranks {
        1 => "one rank".to_owned(),
        _ => format!("each of {ranks} ranks"),
    }
}

impl GpuPlan {
    /// All rows: the trainer, the engine where it is on GPUs, and the host.
    pub fn rows(&self) -> Vec<PlanRow> {
        let bytes = self.trainer.bytes();
        let mut rows = Vec::new();
        if let Some(gpus) = self.gpus {
            rows.push(PlanRow {
                name: "trainer",
                result: self.trainer_row(gpus, &bytes),
                figures: json!({
                    "gpus": gpus,
                    "ranks": self.trainer.ranks,
                    "bytes": bytes,
                    "total": self.on_device(&self.trainer),
                }),
            });
            rows.extend(
                self.engine
                    .as_ref()
                    .map(|engine| self.engine_row(engine, gpus)),
            );
        }
        rows.push(self.host_row(&bytes));
        rows
    }

    /// The first row that does not fit.
    ///
    /// # Errors
    /// The text of that row.
    pub fn check(&self) -> Result<(), String> {
        let rows = self.rows();
        let refused = rows.into_iter().find_map(|row| row.result.err());
        refused.map_or(Ok(()), Err)
    }

    /// Bytes on one device at the peak of an update, a sleeping engine included.
    fn on_device(&self, trainer: &TrainerSetup) -> u64 {
        let asleep = if self.turns { ASLEEP } else { 0 };
        trainer.bytes().total().saturating_add(asleep)
    }

    /// Bytes of the host: this process, and the larger one of loading and, in turns, the states of all ranks
    /// while the engine works. Without GPUs: all ranks.
    fn on_host(&self, trainer: &TrainerSetup) -> u64 {
        let ranks = match (self.gpus, self.turns) {
            (None, _) => trainer.host_without_gpus(),
            (Some(_), false) => trainer.host(),
            (Some(_), true) => {
                let states = trainer.bytes().states().saturating_mul(trainer.ranks);
                trainer.host().max(states)
            }
        };
        self.own.saturating_add(ranks)
    }

    /// Whether a changed trainer fits where this one does not.
    fn fits(&self, trainer: &TrainerSetup) -> bool {
        let on_gpus = self.gpus.is_none_or(|gpus| {
            trainer.ranks <= gpus.count && self.on_device(trainer) <= gpus.usable()
        });
        let on_host = self
            .installed
            .is_none_or(|all| self.on_host(trainer) <= all);
        on_gpus && on_host
    }

    /// The keys to change, as the last line of a refusal.
    fn hint(&self) -> String {
        let shown = |trainer: &TrainerSetup| match self.gpus {
            Some(_) => format!("{} a GPU", amount(self.on_device(trainer))),
            None => amount(self.on_host(trainer)),
        };
        let fits = |trainer: &TrainerSetup| self.fits(trainer);
        let enough = |trainer: &TrainerSetup| {
            self.gpus
                .is_some_and(|gpus| self.on_device(trainer) <= gpus.usable())
        };
        let gpus = self.gpus.map(|gpus| gpus.count);
        let tests = Tests {
            fits: &fits,
            enough: &enough,
            shown: &shown,
        };
        let way = way_out(&self.trainer, gpus, self.keys, &tests);
        format!("\n  hint: {way}")
    }

    fn trainer_row(&self, gpus: Gpus, bytes: &TrainerBytes) -> Result<String, String> {
        let (need, ranks) = (self.on_device(&self.trainer), self.trainer.ranks);
        let asleep = if self.turns {
            format!(", sleeping engine {}", amount(ASLEEP))
        } else {
            String::new()
        };
        if ranks > gpus.count {
            let key = self.keys.ranks;
            return Err(format!(
                "{key} = {ranks}: the machine has {gpus}{}",
                self.hint()
            ));
        }
        if need > gpus.usable() {
            return Err(format!(
                "an update needs {} on {}, GPUs of {} have {} for it: {bytes}{asleep}{}",
                amount(need),
                each(ranks),
                amount(gpus.bytes),
                amount(gpus.usable()),
                self.hint()
            ));
        }
        Ok(format!(
            "{} of {} at most on {}: {bytes}{asleep}",
            amount(need),
            amount(gpus.bytes),
            each(ranks)
        ))
    }

    fn engine_row(&self, engine: &EngineSetup, gpus: Gpus) -> PlanRow {
        let (result, found) = match engine.fitting(gpus.count, gpus.bytes) {
            Ok(found) => (Ok(self.fitting_engine(&found, gpus)), found),
            Err(found) if engine.here => (Err(self.tight_engine(engine, &found, gpus)), found),
            Err(found) => {
                let tight = self.tight_engine(engine, &found, gpus);
                (
                    Ok(format!("warning: unless it is elsewhere, {tight}")),
                    found,
                )
            }
        };
        PlanRow {
            name: "generation",
            result,
            figures: json!({ "bytes": found, "total": found.total() }),
        }
    }

    /// A server that fits; with a warning if the trainer leaves it too few GPUs.
    fn fitting_engine(&self, found: &EngineBytes, gpus: Gpus) -> String {
        let parallel = found.tensor_parallel;
        let together = parallel.saturating_add(self.trainer.ranks);
        let crowded = !self.turns && together > gpus.count;
        let warning = if crowded {
            format!(
                "; warning: trainer and one server take {together} GPUs, there are {}: lower {}, let \
                 them take turns, or serve on another host",
                gpus.count, self.keys.ranks
            )
        } else {
            String::new()
        };
        let asleep = if self.turns {
            "the trainer's states are on the host; "
        } else {
            ""
        };
        format!(
            "{asleep}{parallel} GPU(s) a server: weights {}, then room for {} tokens of keys and \
             values{warning}",
            amount(found.weights),
            found.kv_tokens
        )
    }

    /// The reason why no server fits.
    fn tight_engine(&self, engine: &EngineSetup, found: &EngineBytes, gpus: Gpus) -> String {
        let way = match engine.fewest(gpus.bytes) {
            Some(more) => format!(
                "a server on {more} GPUs of this size fits (tensor parallelism {more}); or take a \
                 smaller model"
            ),
            None => "take a smaller model or larger GPUs".to_owned(),
        };
        format!(
            "a server on {} of {gpus} needs {} on each: {found}; 90 % of a GPU are its share\n  hint: {way}",
            found.tensor_parallel,
            amount(found.total())
        )
    }

    fn host_row(&self, bytes: &TrainerBytes) -> PlanRow {
        let need = self.on_host(&self.trainer);
        let ranks = self.trainer.ranks;
        let detail = match (self.gpus, self.turns) {
            (None, _) => format!("{} on {}: {bytes}", amount(bytes.total()), each(ranks)),
            (Some(_), false) => "loading the model or offloaded activations".to_owned(),
            (Some(_), true) => format!(
                "loading the model, or the trainer's states while the engine works ({})",
                amount(bytes.states().saturating_mul(ranks))
            ),
        };
        let own = amount(self.own);
        let text = format!(
            "{} of the host at most: this process {own}, {detail}",
            amount(need)
        );
        let result = match self.installed.filter(|installed| need > *installed) {
            Some(installed) => Err(format!(
                "{text}; it has {}{}",
                amount(installed),
                self.hint()
            )),
            None => Ok(text),
        };
        PlanRow {
            name: "memory",
            result,
            figures: json!({
                "total": need,
                "installed": self.installed,
                "bytes": bytes,
                "own": self.own,
            }),
        }
    }
}
