//! Runs one target of `sinew-fuzz` in libFuzzer. The variable `SINEW_FUZZ_TARGET` names it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;

static RUN: OnceLock<fn(&[u8])> = OnceLock::new();

fuzz_target!(
    init: {
        let name = std::env::var("SINEW_FUZZ_TARGET").unwrap_or_default();
        let names: Vec<_> = sinew_fuzz::TARGETS.iter().map(|t| t.name).collect();
        let Some(target) = sinew_fuzz::target(&name) else {
            panic!("SINEW_FUZZ_TARGET is {name:?}; one of: {}", names.join(", "));
        };
        RUN.get_or_init(|| target.run);
    },
    |data: &[u8]| if let Some(run) = RUN.get() { run(data) }
);
