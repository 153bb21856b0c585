//! The program behind `sinew sandbox attack|bench|leaks`.
//!
//! The same program is the worker of the wasm level: started with that request, it serves programs and never
//! reads a command line. Otherwise it parses the arguments, logs to standard error at the level that
//! `SINEW_LOG` names (default: only errors), and prints rows to standard output.

use clap::Parser;
use std::process::ExitCode;

/// Exit code: 0, or that of the `LabError`: 2 for wrong input, 1 for anything else.
fn main() -> ExitCode {
    if let Some(code) = sinew_wasm::worker_main_if_requested() {
        return ExitCode::from(u8::try_from(code).unwrap_or(1));
    }
    let cli = sinew_lab::cli::Cli::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("SINEW_LOG")
                .unwrap_or_else(|_| "error".into()),
        )
        .init();
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "sinew: {error}");
            ExitCode::from(error.code())
        }
    }
}
