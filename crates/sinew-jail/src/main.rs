//! The program: its name or its first argument selects the role.
//!
//! Exit codes: 64 for arguments that make no sense, else the code of the role.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    let name = args.first().and_then(|name| Path::new(name).file_name());
    // Containers have it as `/.agent`.
    let is_agent = name.is_some_and(|n| matches!(n.as_encoded_bytes(), b"agent" | b".agent"));
    let code = match args.get(1..).unwrap_or_default() {
        rest if is_agent => sinew_jail::agent::main(rest),
        [role, config] if role == "spawner" => sinew_jail::spawner::main(&config.to_string_lossy()),
        [role, plan] if role == "monitor" => sinew_jail::monitor::main(&plan.to_string_lossy()),
        _ => 64,
    };
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
