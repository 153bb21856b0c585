//! The sandbox spawner as a separate program, for tests. `sinew` contains it.

fn main() -> std::process::ExitCode {
    match sinew_sandbox::spawner_main_if_requested() {
        Some(code) => std::process::ExitCode::from(u8::try_from(code).unwrap_or(1)),
        None => std::process::ExitCode::from(2),
    }
}
