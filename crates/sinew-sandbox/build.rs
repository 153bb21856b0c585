//! Builds `sinew-jail`, the small static program that this crate carries.
//!
//! Cargo has no stable way to depend on a program, so this runs Cargo once more. The separate target folder
//! below `OUT_DIR` needs no lock of the outer one, and its build output stays.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Settings of the outer build that would change what is built, or build it again each time.
const OUTER: [&str; 9] = [
    "RUSTFLAGS",
    "RUSTC",
    "RUSTDOC",
    "RUSTC_WRAPPER",
    "RUSTC_WORKSPACE_WRAPPER",
    "CLIPPY_ARGS",
    "CARGO_UNSTABLE_FEATURE_UNIFICATION",
    "CARGO_RESOLVER_FEATURE_UNIFICATION",
    "__CARGO_TEST_CHANNEL_OVERRIDE_DO_NOT_USE_THIS",
];

fn main() {
    let var = |name: &str| std::env::var(name).unwrap_or_default();
    let crates = PathBuf::from(var("CARGO_MANIFEST_DIR")).join("..");
    let (jail, out) = (crates.join("sinew-jail"), PathBuf::from(var("OUT_DIR")));
    for path in ["src", "Cargo.toml", "../../Cargo.lock", "../../Cargo.toml"] {
        println!("cargo::rerun-if-changed={}", jail.join(path).display());
    }
    let (target, folder) = (var("TARGET"), out.join("jail"));
    let mut cargo = Command::new(var("CARGO"));
    OUTER.iter().for_each(|name| {
        cargo.env_remove(name);
    });
    // Explicit, so that macros, which run at build time, are not linked statically.
    cargo.args([
        "build",
        "--quiet",
        "--locked",
        "--offline",
        "--target",
        &target,
    ]);
    cargo.args([
        "--package",
        "sinew-jail",
        "--bin",
        "sinew-jail",
        "--profile",
        "jail",
    ]);
    cargo.arg("--manifest-path").arg(jail.join("Cargo.toml"));
    cargo.arg("--target-dir").arg(&folder);
    let flags = ["-Ctarget-feature=+crt-static", "-Crelocation-model=static"];
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
    let built = folder.join(&target).join("jail/sinew-jail");
    if let Err(why) = run(&mut cargo, &built, &out.join("sinew-jail")) {
        println!(
            "cargo::error=sinew-jail cannot be built ({why}): it is linked statically, which needs \
             the C library's static form (Debian: libc6-dev)"
        );
    }
}

fn run(cargo: &mut Command, built: &Path, to: &Path) -> Result<(), String> {
    match cargo.status() {
        Ok(status) if status.success() => {}
        Ok(status) => return Err(status.to_string()),
        Err(e) => return Err(e.to_string()),
    }
    let copied = std::fs::copy(built, to);
    copied
        .map(|_| ())
        .map_err(|e| format!("{}: {e}", built.display()))
}
