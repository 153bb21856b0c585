//! Owners of a server, and ends of ranks.

use crate::bench::{Bench, MAX_TOKENS, batches, rows, update, weights};
use rustix::process::{Pid, Signal, kill_process};
use sinew_torch::{TorchError, TorchPolicy, probe};
use sinew_train::pack::{MicroBatch, pack};
use sinew_train::{OutputChoice, Policy};
use std::path::Path;
use std::time::{Duration, Instant};

const PLAIN: OutputChoice = OutputChoice {
    entropies: false,
    values: false,
    backward: false,
};

pub(crate) fn versions_are_reported(bench: &Bench) {
    let report = probe(&bench.python, Duration::from_secs(120)).unwrap();
    assert_eq!(report.missing(), [""; 0]);
    assert!(report.packages["torch"].is_some(), "{report:?}");
}

pub(crate) fn refused_requests_change_nothing(bench: &Bench, model: &Path) {
    let mut torch = bench.open(model, |_| {});
    let info = torch.info();
    assert_eq!((info.lanes, info.vocabulary, info.hidden), (2, 61, 32));
    assert_eq!((info.family.as_str(), info.devices.len()), ("llama", 2));
    let before = weights(&mut torch);
    let long = pack(&rows(0), 256).unwrap().micro_batches;
    assert!(long[0].tokens.len() > MAX_TOKENS as usize);
    let error = torch.forward(&[&long[0]], PLAIN).unwrap_err();
    assert!(error.to_string().contains("max_tokens"), "{error}");
    assert!(torch.is_usable());
    let batches = batches(&rows(0));
    torch.forward(&[&batches[0]], PLAIN).unwrap();
    assert_eq!(weights(&mut torch), before);
}

pub(crate) fn tokens_and_fences(bench: &Bench, model: &Path) {
    let mut first = bench.open(model, |_| {});
    let mut server = bench.group.server().clone();
    server.token.push('0');
    let setup = bench.setup(model);
    let error = TorchPolicy::attach(&server, &setup).unwrap_err();
    assert!(
        error.to_string().contains("the token is not that"),
        "{error}"
    );
    // The first owner still is one.
    first.zero_gradients().unwrap();
    let mut second = bench.open(model, |_| {});
    let error = first.zero_gradients().unwrap_err();
    assert!(error.to_string().contains("has another owner"), "{error}");
    assert!(!first.is_usable());
    let mut late = bench.setup(model);
    late.fence = 1;
    let error = TorchPolicy::attach(bench.group.server(), &late).unwrap_err();
    assert!(matches!(error, TorchError::Fence(_)), "{error}");
    second.zero_gradients().unwrap();
}

pub(crate) fn time_is_measured(bench: &Bench, model: &Path) {
    let mut torch = bench.open(model, |_| {});
    update(&mut torch, &batches(&rows(0)), 1);
    let usage = torch.take_verb_usage();
    assert!(usage.server_seconds > 0.0 && usage.wall_seconds >= usage.server_seconds);
    assert_eq!(usage.peak_bytes.len(), 2);
    assert!(usage.peak_bytes.iter().all(|&bytes| bytes > 1 << 20));
    assert_eq!(usage.verbs["apply"].calls, 1);
    let status = torch.status().unwrap();
    assert!(!status.is_broken() && status.ranks.len() == 2, "{status:?}");
}

pub(crate) fn a_killed_rank_is_named(bench: Bench, model: &Path) {
    let setup = bench.setup(model);
    let pids = bench.group.pids();
    let mut torch = TorchPolicy::start(bench.group, &setup).unwrap();
    let batches = batches(&rows(0));
    let wave: Vec<&MicroBatch> = batches.iter().take(2).collect();
    torch.forward(&wave, PLAIN).unwrap();
    let pid = Pid::from_raw(i32::try_from(pids[1]).unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    let start = Instant::now();
    // The limit of a collective, which the survivors would wait for, is 60 s.
    let error = torch.forward(&wave, PLAIN).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("rank 1 of the torch trainer ended: signal: 9 (SIGKILL)"),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(55));
    assert!(!torch.is_usable());
    assert_eq!(torch.forward(&wave, PLAIN).unwrap_err(), error);
    drop(torch);
    assert!(
        !pids
            .iter()
            .any(|pid| Path::new(&format!("/proc/{pid}")).exists()),
        "all ranks ended with their owner"
    );
}
