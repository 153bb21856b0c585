//! Sandboxes at the command line: what is refused, and what another program carries out.

use crate::{root, sinew};

#[test]
fn a_server_of_sandboxes_for_other_hosts_needs_chosen_tokens() {
    let refused = sinew()
        .args(["serve", "--sandbox-only", "--listen", "0.0.0.0:0"])
        .output()
        .unwrap();
    assert!(crate::failure(&refused, 2).contains("--token-file"));
    let wrong = root().join("Cargo.toml");
    let refused = sinew()
        .args([
            "serve",
            "--sandbox-only",
            "--listen",
            "127.0.0.1:0",
            "--token-file",
        ])
        .arg(wrong)
        .output()
        .unwrap();
    assert!(crate::failure(&refused, 2).contains("line 1"));
}

/// `sinew-bench` and `sinew-lab` next to the program carry its sub-commands out, with their arguments as they
/// are.
#[test]
fn benches_and_attacks_are_another_program() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().join("sinew");
    std::fs::copy(env!("CARGO_BIN_EXE_sinew"), &own).unwrap();
    let run = |args: &[&str]| {
        let mut command = std::process::Command::new(&own);
        command.args(args).env("PATH", "/usr/bin:/bin");
        command.output().unwrap()
    };
    let missing = crate::failure(&run(&["bench", "soak"]), 3);
    assert!(missing.contains("cargo build -p sinew-bench"), "{missing}");
    for name in ["bench", "lab"] {
        let program = dir.path().join(format!("sinew-{name}"));
        std::fs::write(&program, format!("#!/bin/sh\necho {name} \"$@\"\nexit 7\n")).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    }
    for (args, expected) in [
        (
            &["bench", "compute", "--help"][..],
            "bench compute --help\n",
        ),
        (
            &["sandbox", "attack", "--level", "crun", "--json"],
            "lab sandbox attack --level crun --json\n",
        ),
        (&["sandbox", "leaks"], "lab sandbox leaks\n"),
    ] {
        let output = run(args);
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
        assert_eq!(output.status.code(), Some(7));
    }
}

#[cfg(not(feature = "wasm"))]
#[test]
fn a_part_that_was_not_built_is_refused_with_its_feature() {
    let run = |args: &[&str]| crate::failure(&sinew().args(args).output().unwrap(), 3);
    let missing = run(&["sandbox", "run", "--level", "wasm", "--code", "1"]);
    assert!(missing.contains("the feature `wasm`"), "{missing}");
    assert!(missing.contains("--features wasm"), "{missing}");
}
