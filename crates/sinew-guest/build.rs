//! Compiles the agent: one static program without dependencies, carried by whoever uses this crate.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    let var = |name: &str| std::env::var(name).unwrap_or_default();
    println!("cargo::rerun-if-changed=agent");
    let out = PathBuf::from(var("OUT_DIR")).join("agent");
    let target = var("TARGET");
    let mut command = Command::new(var("RUSTC"));
    command
        .args([
            "agent/main.rs",
            "--edition=2024",
            "--crate-name=sinew_agent",
        ])
        .args(["--crate-type=bin", "--target", &target, "-o"])
        .arg(&out)
        .args([
            "-C",
            "target-feature=+crt-static",
            "-C",
            "relocation-model=static",
        ])
        .args([
            "-C",
            "opt-level=s",
            "-C",
            "panic=abort",
            "-C",
            "strip=symbols",
        ]);
    let linker = format!(
        "CARGO_TARGET_{}_LINKER",
        target.to_uppercase().replace('-', "_")
    );
    if let Ok(linker) = std::env::var(&linker) {
        command.args(["-C", &format!("linker={linker}")]);
    }
    match command.status() {
        Ok(status) if status.success() => {}
        other => {
            println!(
                "cargo::error=the agent cannot be compiled ({other:?}): it is linked statically, which needs the C library's static form (Debian: libc6-dev)"
            );
        }
    }
}
