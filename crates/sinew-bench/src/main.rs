//! The program behind `sinew bench`.
//!
//! It parses the arguments, logs to standard error at the level that `SINEW_LOG` names (default: only
//! errors), and prints rows to standard output.

use clap::Parser;
use std::process::ExitCode;

/// Exit code: 0, or that of the `BenchError`: 2 for wrong input, 1 for anything else.
fn main() -> ExitCode {
    let cli = sinew_bench::Cli::parse();
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
