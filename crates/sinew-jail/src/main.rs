//! The program: what its name or its first argument says.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    let name = args.first().and_then(|name| Path::new(name).file_name());
    let code = match (name, args.get(1..).unwrap_or_default()) {
        (Some(name), rest) if name == "agent" => sinew_jail::agent::main(rest),
        (_, [role, config]) if role == "spawner" => {
            sinew_jail::spawner::main(&config.to_string_lossy())
        }
        (_, [role, plan]) if role == "monitor" => {
            sinew_jail::monitor::main(&plan.to_string_lossy())
        }
        _ => 64,
    };
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
