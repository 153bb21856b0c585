//! `sinew doctor`: what this host can do, what is missing, and what to do about it.
//!
//! | group | rows |
//! |---|---|
//! | `program` | version, features that are built in |
//! | `machine` | kernels and threads, memory with the limit of the control group, free disk |
//! | `sandboxes` | one Python program at each level; protections that are not in force; what makes it slower |
//! | `python` | a worker with the user's interpreter, Chromium under Playwright, clients of trackers |
//! | `agents` | coding agents of `sinew setup agents` |
//! | `models` | the model package of `recipes/quickstart.toml`, the hub and its cache |
//! | `torch` | with `--torch`: the Python of the trainer with PyTorch, its packages, GPUs and NCCL |
//! | `tinker` | with `--tinker URL`: the models of a Tinker service, and one token that it samples |
//!
//! A row is `ok`, `warn` or `FAIL`. Every row was tried. A row that is not `ok` has a hint with the command
//! or the key. All probes run at the same time, and one that does not answer within [`PATIENCE`] is a row,
//! too.
//!
//! A first run is a project of `sinew init`: a model from scratch, tasks, and a reward in Python. The exit
//! code is 0 if nothing that it needs is missing, else 3.

mod agents;
mod host;
mod levels;
mod models;
mod python;
mod row;
mod tinker;
mod torch;

use crate::output;
use clap::Args;
use row::{Mark, Row};
use serde_json::json;
use sinew_assembly::Failure;
use std::io::IsTerminal;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

/// Time that all probes together have.
const PATIENCE: Duration = Duration::from_secs(60);
/// Width of the columns before the text of a row.
const INDENT: usize = 21;
/// Minimum width of a text: a narrower window wraps lines by itself.
const NARROW: usize = 30;
/// Commands of a first run.
const FIRST: &str = "sinew init my-tasks && cd my-tasks && sinew train recipe.toml";

/// Arguments of `sinew doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// One JSON object a row, and one with the counts at the end
    #[arg(long)]
    json: bool,
    /// Also try the trainer with PyTorch: its Python, packages, GPUs
    #[arg(long)]
    torch: bool,
    /// Also try the Tinker service at this address: its models, one sampled token. TINKER_API_KEY has the key
    #[arg(long, value_name = "URL")]
    tinker: Option<String>,
}

/// One thing to try: the group and the name of its row, whether a first run needs it, and how it is tried.
struct Probe {
    group: &'static str,
    name: &'static str,
    needed: bool,
    tried: Tried,
}

/// The function that tries something.
#[derive(Clone, Copy)]
enum Tried {
    /// On this host.
    Here(fn(&'static str) -> Vec<Row>),
    /// At an address.
    At(fn(&'static str, &str) -> Vec<Row>),
}

/// All probes, in the order of their rows.
const PROBES: [Probe; 15] = [
    probe("program", "version", true, host::version),
    probe("program", "features", false, host::features),
    probe("machine", "kernels", true, host::kernels),
    probe("machine", "memory", true, host::memory),
    probe("machine", "disk", true, host::disk),
    probe("sandboxes", "process", true, levels::process),
    probe("sandboxes", "container", false, levels::other),
    probe("sandboxes", "microvm", false, levels::other),
    probe("sandboxes", "wasm", false, levels::other),
    probe("python", "python3", true, python::workers),
    probe("python", "browser", false, python::browser),
    probe("python", "trackers", false, python::trackers),
    probe("agents", "cli", false, agents::installed),
    probe("models", "package", false, models::package),
    probe("models", "hub", false, models::hub),
];

/// The probe of `--torch`, which all its rows need.
static TORCH: Probe = probe("torch", "interpreter", true, torch::rows);

/// The probe of `--tinker`.
static TINKER: Probe = Probe {
    group: "tinker",
    name: "service",
    needed: true,
    tried: Tried::At(tinker::rows),
};

const fn probe(
    group: &'static str,
    name: &'static str,
    needed: bool,
    tried: fn(&'static str) -> Vec<Row>,
) -> Probe {
    Probe {
        group,
        name,
        needed,
        tried: Tried::Here(tried),
    }
}

/// Tries everything and reports it.
///
/// # Errors
/// [`Failure::Outside`] if something is missing that a first run needs.
pub(crate) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let until = Instant::now() + PATIENCE;
    let probes = PROBES.iter().chain(args.torch.then_some(&TORCH));
    let probes = probes.chain(args.tinker.as_ref().map(|_| &TINKER));
    let url = args.tinker.as_deref().unwrap_or_default();
    let started: Vec<_> = probes.map(|p| (p, start(p, url))).collect();
    let (mut group, mut counts) = ("", [0; 3]);
    let mut missing = Vec::new();
    for (probe, answer) in started {
        if probe.group != group && !args.json {
            output::print(&format!("{}\n", probe.group));
        }
        group = probe.group;
        let left = until.saturating_duration_since(Instant::now());
        let rows = answer.recv_timeout(left);
        for row in rows.unwrap_or_else(|_| vec![silent(probe)]) {
            counts[row.mark as usize] += 1;
            if row.mark == Mark::Fail {
                let detail = row.detail.lines().next().unwrap_or_default();
                missing.push(format!("{}: {detail}", row.name));
            }
            if args.json {
                output::print_json(&row.json(group))
            } else {
                output::print(&shown(&row, columns()))
            }
        }
    }
    let [ok, warn, fail] = counts;
    if args.json {
        let end = json!({ "first_run": fail == 0, "ok": ok, "warn": warn, "fail": fail });
        output::print_json(&end);
    } else if fail == 0 {
        let warned = match warn {
            0 => "",
            _ => "Warnings concern other kinds of runs.\n",
        };
        output::print(&format!("A first run works here: {FIRST}\n{warned}"));
    }
    if missing.is_empty() {
        Ok(())
    } else {
        let parts = [
            (true, "a first run"),
            (args.torch, "PyTorch"),
            (args.tinker.is_some(), "the Tinker service"),
        ];
        let parts: Vec<&str> = parts
            .iter()
            .filter(|part| part.0)
            .map(|part| part.1)
            .collect();
        Err(Failure::outside(format!(
            "missing for {}: {}",
            parts.join(" or "),
            missing.join("; ")
        )))
    }
}

/// Runs a probe in its own thread, at `url` if it needs an address. A probe that hangs leaves the thread
/// behind.
fn start(probe: &'static Probe, url: &str) -> Receiver<Vec<Row>> {
    let (answer, answered) = sync_channel(1);
    let url = url.to_owned();
    std::thread::spawn(move || {
        answer.send(match probe.tried {
            Tried::Here(tried) => tried(probe.name),
            Tried::At(tried) => tried(probe.name, &url),
        })
    });
    answered
}

/// The row of a probe that gave none.
fn silent(probe: &Probe) -> Row {
    let mark = if probe.needed { Mark::Fail } else { Mark::Warn };
    let detail = format!("no answer within {} s", PATIENCE.as_secs());
    let hint = match probe.group {
        "sandboxes" => format!("`sinew sandbox probe --level {}` waits longer", probe.name),
        _ => "run `sinew doctor` again when the machine is less busy".to_owned(),
    };
    Row::new(mark, probe.name, detail, hint)
}

/// Width of the terminal of standard output; none where it is no terminal.
fn columns() -> Option<usize> {
    let out = std::io::stdout();
    let size = out
        .is_terminal()
        .then(|| rustix::termios::tcgetwinsize(out));
    let columns = size?.ok()?.ws_col;
    (columns > 0).then_some(columns.into())
}

/// A row as lines of at most `columns` characters.
fn shown(row: &Row, columns: Option<usize>) -> String {
    let width = columns.map_or(usize::MAX, |c| c.saturating_sub(INDENT).max(NARROW));
    let mut lines = wrapped(&row.detail, width);
    let hint = row.hint.as_deref().map(|hint| format!("hint: {hint}"));
    lines.extend(hint.iter().flat_map(|hint| wrapped(hint, width)));
    let head = format!("  {:4}  {:12} ", row.mark.text(), row.name);
    let mut text = String::new();
    for (at, line) in lines.iter().enumerate() {
        let before = if at == 0 { head.as_str() } else { "" };
        text.push_str(&format!("{before:INDENT$}{line}\n"));
    }
    text
}

/// Text in lines of at most `width` characters, but for longer words.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for line in text.lines() {
        let mut filled = String::new();
        for word in line.split_whitespace() {
            let length = filled.chars().count();
            if length > 0 && length + 1 + word.chars().count() > width {
                lines.push(std::mem::take(&mut filled));
            }
            if !filled.is_empty() {
                filled.push(' ');
            }
            filled.push_str(word);
        }
        lines.push(filled);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_fit_the_terminal_and_name_what_to_do() {
        let row = Row::new(
            Mark::Warn,
            "hub",
            "one two three four five six seven",
            "do it",
        );
        let text = shown(&row, Some(INDENT + NARROW));
        assert_eq!(
            text,
            "  warn  hub          one two three four five six\n                     seven\n\
             \x20                    hint: do it\n"
        );
        assert_eq!(shown(&row, None).lines().count(), 2);
        assert_eq!(silent(&PROBES[5]).mark, Mark::Fail);
    }
}
