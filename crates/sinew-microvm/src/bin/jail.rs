//! Becomes the monitor of a virtual machine, behind walls: started by the provider alone.

fn main() -> std::process::ExitCode {
    let code = sinew_microvm::jail_main_if_requested().unwrap_or(64);
    std::process::ExitCode::from(u8::try_from(code).unwrap_or(1))
}
