//! The worker as a separate program, for tests. `sinew` contains it.

fn main() -> std::process::ExitCode {
    let code = sinew_wasm::worker_main_if_requested();
    std::process::ExitCode::from(code.and_then(|c| u8::try_from(c).ok()).unwrap_or(2))
}
