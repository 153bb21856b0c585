//! The port, at the level of machines.

use sinew_microvm::{Accel, MicrovmConfig, MicrovmProvider};
use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, ExecResult, Limits, OutputStream, Program, Sandbox,
    SandboxError, SandboxProvider, SandboxSpec,
};
use std::path::Path;
use std::time::Duration;

pub(crate) fn config() -> MicrovmConfig {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/microvm");
    let mut config = MicrovmConfig::new(folder, env!("CARGO_BIN_EXE_sinew-microvm-jail").into());
    config.accel = Some(Accel::Tcg);
    config
}

pub(crate) fn provider() -> MicrovmProvider {
    MicrovmProvider::start(config()).expect("run scripts/setup.sh: it installs QEMU and an image")
}

pub(crate) fn spec() -> SandboxSpec {
    SandboxSpec {
        limits: Limits {
            cpu_s: 20.0,
            memory_bytes: 64 << 20,
            processes: 16,
            output_bytes: 64 << 10,
            work_bytes: 4 << 20,
            open_files: 32,
        },
        ..SandboxSpec::default()
    }
}

pub(crate) fn request(program: Program, seconds: u64) -> ExecRequest {
    ExecRequest {
        program,
        stdin: Vec::new(),
        deadline: Duration::from_secs(seconds),
    }
}

pub(crate) async fn python(sandbox: &mut dyn Sandbox, code: &str) -> ExecResult {
    let request = request(Program::Python(code.into()), 30);
    sandbox.exec(request).await.expect("an execution")
}

pub(crate) fn printed(result: &ExecResult) -> String {
    assert_eq!(
        result.ending,
        Ending::Exited { code: 0 },
        "{}",
        String::from_utf8_lossy(&result.stderr)
    );
    String::from_utf8_lossy(&result.stdout).trim().to_owned()
}

#[tokio::test]
async fn programs_files_and_endings() {
    let provider = provider();
    let spec = spec();
    let mut sandbox = provider.acquire(&spec).await.expect("a machine");
    assert_eq!(
        printed(&python(sandbox.as_mut(), "print(6 * 7)").await),
        "42"
    );
    let shell = request(Program::Shell("echo out; echo err >&2; exit 3".into()), 10);
    let result = sandbox.exec(shell).await.expect("a script");
    assert_eq!(result.ending, Ending::Exited { code: 3 });
    assert_eq!(
        (result.stdout.as_slice(), result.stderr.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );
}

#[tokio::test]
async fn attacks_that_only_machines_have() {
    let provider = provider();
    let mut rows = Vec::new();
    let mut on_row = |row: sinew_attack::attack::AttackRow| rows.push(row);
    // Halts and frames that never end take ten seconds each to be told from slow guests.
    for filter in [
        "48 ",
        "80 panic",
        "80 reboot",
        "81 ",
        "82 ",
        "83 frame of",
        "83 output",
        "83 frames",
        "84 ",
    ] {
        sinew_microvm::attack::run_own(&provider, filter, &mut on_row)
            .await
            .expect("attacks");
    }
    for row in &rows {
        let held = row.outcome == sinew_attack::attack::AttackOutcome::Held;
        assert!(held, "{}: {}", row.case, row.why);
    }
    assert_eq!(rows.len(), 11);
}
