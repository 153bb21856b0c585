//! A level without any isolation, for tests of the layers above. Recipes refuse it.

use crate::port::{
    Ending, ExecRequest, ExecResult, Program, Protection, Sandbox, SandboxError, SandboxFuture,
    SandboxProvider, SandboxSpec, Usage,
};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Instant;
use tokio::io::AsyncWriteExt;

/// Runs programs as plain children of this process.
#[derive(Clone, Debug)]
pub struct NullProvider {
    protections: Arc<Vec<Protection>>,
}

impl Default for NullProvider {
    fn default() -> Self {
        let none = Protection {
            name: "isolation".into(),
            enforced: false,
            how: "the null sandbox isolates nothing".into(),
        };
        Self {
            protections: Arc::new(vec![none]),
        }
    }
}

#[derive(Debug)]
/// A sandbox without a work folder: programs run in the folder of this process.
struct NullSandbox {
    provider: NullProvider,
    output_bytes: usize,
}

impl SandboxProvider for NullProvider {
    fn level(&self) -> &'static str {
        "null"
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move {
            spec.refuse_writable_root("null")?;
            if spec.strict {
                return Err(SandboxError::NotEnforced {
                    missing: "isolation: the null sandbox isolates nothing".into(),
                });
            }
            let sandbox = NullSandbox {
                provider: self.clone(),
                output_bytes: spec.limits.output_bytes as usize,
            };
            Ok(Box::new(sandbox) as Box<dyn Sandbox>)
        })
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        Arc::clone(&self.protections)
    }
}

/// Variables of this process with passwords and keys of its stores.
const SECRETS: [&str; 4] = [
    "PGPASSWORD",
    "REDISCLI_AUTH",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
];

impl Sandbox for NullSandbox {
    fn exec(&mut self, request: ExecRequest) -> SandboxFuture<'_, ExecResult> {
        Box::pin(async move {
            let argv = match request.program {
                Program::Argv(argv) => argv,
                Program::Python(code) => vec!["python3".into(), "-c".into(), code],
                Program::Shell(script) => vec!["sh".into(), "-c".into(), script],
            };
            let started = Instant::now();
            let mut command = tokio::process::Command::new(&argv[0]);
            for name in SECRETS {
                command.env_remove(name);
            }
            let mut child = command
                .args(&argv[1..])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .kill_on_drop(true)
                .spawn()
                .map_err(|e| SandboxError::io("spawn", e))?;
            if let Some(mut stdin) = child.stdin.take() {
                let _ = stdin.write_all(&request.stdin).await;
            }
            let waited = tokio::time::timeout(request.deadline, child.wait_with_output()).await;
            let (ending, mut stdout, mut stderr) = match waited {
                Err(_) => (Ending::Timeout, Vec::new(), Vec::new()),
                Ok(Err(e)) => return Err(SandboxError::io("wait", e)),
                Ok(Ok(o)) => {
                    let code = o.status.code().unwrap_or(-1);
                    (Ending::Exited { code }, o.stdout, o.stderr)
                }
            };
            let truncated = stdout.len().max(stderr.len()) > self.output_bytes;
            stdout.truncate(self.output_bytes);
            stderr.truncate(self.output_bytes);
            Ok(ExecResult {
                ending,
                stdout,
                stderr,
                truncated,
                usage: Usage {
                    wall_s: started.elapsed().as_secs_f64(),
                    ..Usage::default()
                },
                protections: self.provider.protections(),
            })
        })
    }

    fn write_file<'a>(&'a mut self, path: &'a str, _: &'a [u8]) -> SandboxFuture<'a, ()> {
        let value = path.to_string();
        Box::pin(async move { Err(no_files(value)) })
    }

    fn read_file<'a>(&'a mut self, path: &'a str, _: u64) -> SandboxFuture<'a, Vec<u8>> {
        let value = path.to_string();
        Box::pin(async move { Err(no_files(value)) })
    }

    fn destroy(self: Box<Self>) -> SandboxFuture<'static, ()> {
        Box::pin(async { Ok(()) })
    }
}

fn no_files(value: String) -> SandboxError {
    SandboxError::Request {
        field: "path",
        value,
        allowed: "the null sandbox has no files of its own".into(),
    }
}
