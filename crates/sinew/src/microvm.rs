//! The microvm level: its provider, attacks and benches at the command line.

use crate::failure::Failure;
use crate::output;
use crate::recipe::SandboxSection;
use serde_json::json;
use sinew_attack::attack::{AttackOutcome, AttackRow};
use sinew_microvm::{MicrovmConfig, MicrovmProvider, attack, bench};
use sinew_sandbox::{Pool, PoolConfig, SandboxProvider};
use std::sync::Arc;

/// Machines that are kept ready, at most: each takes about 100 MB.
const READY: usize = 4;
/// Runs of each row of the bench, and boots.
const RUNS: (usize, usize) = (15, 3);

fn named(e: &dyn std::fmt::Display) -> Failure {
    Failure::system(format!("sandbox.level = \"microvm\": {e}"))
}

pub(crate) fn provider(section: &SandboxSection) -> Result<MicrovmProvider, Failure> {
    let program = std::env::current_exe().map_err(Failure::system)?;
    let mut config = MicrovmConfig::new(section.microvm_images.clone().into(), program);
    config.temporary = std::env::temp_dir();
    config.firecracker = std::env::var_os("FIRECRACKER_BIN").map(Into::into);
    config.max_live = section.max_live;
    MicrovmProvider::start(config).map_err(|e| named(&e))
}

/// Machines for a recipe: a few are ready before they are asked for.
pub(crate) fn sandboxes(section: &SandboxSection) -> Result<Arc<dyn SandboxProvider>, Failure> {
    let pool = PoolConfig {
        floor: 0,
        ceiling: READY.min(section.max_live / 2),
        starts_at_once: 1,
        ..PoolConfig::default()
    };
    let pool = Pool::new(Arc::new(provider(section)?), pool).map_err(|e| named(&e))?;
    Ok(Arc::new(pool))
}

fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Runtime::new().map_err(Failure::system)
}

pub(crate) fn attack_all(filter: &str, as_json: bool) -> Result<(), Failure> {
    let provider = provider(&SandboxSection::default())?;
    let mut escaped = 0;
    let mut on_row = |row: AttackRow| {
        escaped += usize::from(row.outcome == AttackOutcome::Escaped);
        if as_json {
            output::print_json(&json!(row));
        } else {
            output::print(&format!("{:?}  {}  {}\n", row.outcome, row.case, row.why));
        }
    };
    let attacks = attack::run(&provider, filter, &mut on_row);
    runtime()?.block_on(attacks).map_err(Failure::system)?;
    match escaped {
        0 => Ok(()),
        many => Err(Failure::system(format!("{many} attacks escaped"))),
    }
}

pub(crate) fn bench_all(as_json: bool) -> Result<(), Failure> {
    let provider = provider(&SandboxSection::default())?;
    let mut on_row = |row: bench::BenchRow| {
        if as_json {
            output::print_json(&json!(row));
        } else {
            output::print(&format!(
                "{:52} {:>9.2} {}\n",
                row.name, row.value, row.unit
            ));
        }
    };
    let benches = bench::run(&provider, RUNS, &mut on_row);
    runtime()?.block_on(benches).map_err(Failure::system)
}
