//! Rows of the program and the machine.

use super::row::{Mark, Row};
use crate::check::{device, disk::nearest};
use sinew_telemetry::{Memory, disk_free};
use sinew_tensor::{KernelSet, KernelSetError};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Memory and disk with which a project of `sinew init` trains.
const LEAST_MEMORY: u64 = 256 << 20;
const LEAST_DISK: u64 = 256 << 20;
/// Memory and disk that `recipes/quickstart.toml` takes at its peak.
const QUICKSTART_MEMORY: u64 = 6_800_000_000;
const QUICKSTART_DISK: u64 = 5 << 30;

/// Bytes in GiB.
fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

/// The program and the system that it runs on.
pub(super) fn version(name: &str) -> Vec<Row> {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let (version, arch) = (env!("CARGO_PKG_VERSION"), std::env::consts::ARCH);
    vec![Row::ok(
        name,
        format!("sinew {version}, {arch}, Linux {}", kernel.trim()),
    )]
}

/// Parts that a build may leave out.
pub(super) fn features(name: &str) -> Vec<Row> {
    let all = [
        ("container", cfg!(feature = "container")),
        ("egress", cfg!(feature = "egress")),
        ("mcp", cfg!(feature = "mcp")),
        ("microvm", cfg!(feature = "microvm")),
        ("parquet", cfg!(feature = "parquet")),
        ("pool", cfg!(feature = "pool")),
        ("wasm", cfg!(feature = "wasm")),
    ];
    let which = |built: bool| -> Vec<&str> {
        let some = all.iter().filter(|(_, there)| *there == built);
        some.map(|(name, _)| *name).collect()
    };
    let (built, left_out) = (which(true).join(", "), which(false).join(", "));
    vec![match (built.is_empty(), left_out.is_empty()) {
        (_, true) => Row::ok(name, built),
        (none, false) => {
            let built = if none {
                String::new()
            } else {
                format!("{built}; ")
            };
            let hint = "cargo build -p sinew --features full; the wheel has all of them";
            Row::new(
                Mark::Warn,
                name,
                format!("{built}left out: {left_out}"),
                hint,
            )
        }
    }]
}

/// Kernels and threads, and why the fastest kernels of this CPU cannot be used.
pub(super) fn kernels(name: &str) -> Vec<Row> {
    let found = match device() {
        Ok(found) => found.trim_start_matches("kernels ").to_owned(),
        Err(e) => {
            let hint = "unset SINEW_CPU and SINEW_THREADS: the best of this machine is taken";
            return vec![Row::failed(Mark::Fail, name, e.text(), hint)];
        }
    };
    vec![match KernelSet::parse("amx") {
        Err(e) if e.is_about_this_system() => {
            let why = match e {
                KernelSetError::Amx { why, .. } => why.to_string(),
                other => other.to_string(),
            };
            let detail = format!("{found}; the AMX of this CPU cannot be used: {why}");
            let hint = "Linux 5.16 or later grants AMX, unless a container or a virtual machine keeps it back; without it \
                        all works, and products take longer";
            Row::new(Mark::Warn, name, detail, hint)
        }
        _ => Row::ok(name, found),
    }]
}

/// Memory of the machine, and of the control group where that has a limit.
pub(super) fn memory(name: &str) -> Vec<Row> {
    let memory = match Memory::look() {
        Ok(memory) => memory,
        Err(e) => {
            let hint = "mount /proc: sandboxes need it as well";
            return vec![Row::failed(Mark::Fail, name, &e.to_string(), hint)];
        }
    };
    let group = memory.group.map_or(String::new(), |(limit, used)| {
        format!(
            "; limit of the control group: {}, {} in use",
            gib(limit),
            gib(used)
        )
    });
    let (free, installed) = (memory.free(), gib(memory.installed));
    let detail = format!("{} free of {installed}{group}", gib(free));
    let raise = match memory.group {
        Some(_) => "raise the limit of the container or the job (docker run --memory)",
        None => "end other programs",
    };
    vec![match free {
        0..LEAST_MEMORY => Row::new(Mark::Fail, name, detail, raise),
        LEAST_MEMORY..QUICKSTART_MEMORY => {
            let hint = format!(
                "recipes/quickstart.toml takes up to {}; {raise}, set train.lora, or lower engine.kv_tokens and \
                 train.micro_batch_tokens (`sinew check RECIPE` estimates)",
                gib(QUICKSTART_MEMORY)
            );
            Row::new(Mark::Warn, name, detail, hint)
        }
        _ => Row::ok(name, detail),
    }]
}

/// Room where runs are written: the current folder, and `runs` where that is another file system.
pub(super) fn disk(name: &str) -> Vec<Row> {
    let (here, runs) = (Path::new("."), nearest(Path::new("runs")));
    let device = |path: &Path| path.metadata().map(|m| m.dev()).ok();
    if device(here) == device(runs) {
        vec![room(name, "here and under runs/", runs)]
    } else {
        vec![room(name, "here", here), room(name, "under runs/", runs)]
    }
}

/// Writes a file without a name, and looks at what is free.
fn room(name: &str, place: &str, folder: &Path) -> Row {
    let found = tempfile::tempfile_in(folder).and_then(|_| disk_free(folder));
    let free = match found {
        Ok(free) => free,
        Err(e) => {
            let detail = format!("{place}: nothing can be written: {e}");
            let hint = "cd to a folder that you may write to, or name one with --run-dir";
            return Row::new(Mark::Fail, name, detail, hint);
        }
    };
    let detail = format!("{} free {place}", gib(free));
    match free {
        0..LEAST_DISK => Row::new(
            Mark::Fail,
            name,
            detail,
            "free some space; `sinew gc RUN` removes episodes that were trained",
        ),
        LEAST_DISK..QUICKSTART_DISK => Row::new(
            Mark::Warn,
            name,
            detail,
            "checkpoints of recipes/quickstart.toml need about 5 GiB: free some space, lower train.keep_checkpoints, or \
             name another folder with --run-dir",
        ),
        _ => Row::ok(name, detail),
    }
}
