//! The terminal of the user.

use rustix::termios::{
    OptionalActions, QueueSelector, Termios, isatty, tcflush, tcgetattr, tcgetwinsize, tcsetattr,
};
use sinew_assembly::Failure;
use sinew_sandbox::{TerminalInput, TerminalSize};
use std::io::{Read, Write};
use std::time::Duration;
use tokio::sync::mpsc::Sender;

/// Bytes of a key or of what was pasted that are taken at once.
const CHUNK: usize = 4096;
/// Time in which a terminal answers what it was asked before a session ended.
const ANSWER_TIME: Duration = Duration::from_millis(30);
/// Puts back what programs set: no mouse reports (1000 to 1006), no marks around what is pasted (2004), no
/// focus reports (1004), the first screen (1049), the cursor (25), plain characters; then a soft reset
/// (DECSTR).
const RESET: &[u8] =
    b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1004l\x1b[?1005l\x1b[?1006l\x1b[?2004l\x1b[?1049l\
    \x1b[?25h\x1b[0m\x1b[!p";

/// Standard input and output, in raw mode as long as this lives.
pub(super) struct UserTerminal {
    /// Earlier settings of the terminal.
    before: Termios,
}

impl UserTerminal {
    /// Refuses standard streams that are not a terminal.
    pub(super) fn check() -> Result<(), Failure> {
        if isatty(std::io::stdin()) && isatty(std::io::stdout()) {
            Ok(())
        } else {
            Err(Failure::input(
                "sinew sandbox shell needs a terminal as standard input and output\n  \
                 hint: sinew sandbox run --shell SCRIPT runs without one",
            ))
        }
    }

    /// Takes the terminal into raw mode.
    pub(super) fn raw() -> Result<Self, Failure> {
        let before = tcgetattr(std::io::stdin()).map_err(Failure::system)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Drain, &raw).map_err(Failure::system)?;
        Ok(Self { before })
    }

    /// Returns the size of the terminal; 24 by 80 if the terminal does not report it.
    pub(super) fn size(&self) -> TerminalSize {
        let told = tcgetwinsize(std::io::stdout())
            .ok()
            .filter(|s| s.ws_row > 0 && s.ws_col > 0);
        told.map_or(
            TerminalSize {
                rows: 24,
                columns: 80,
            },
            |s| TerminalSize {
                rows: s.ws_row,
                columns: s.ws_col,
            },
        )
    }
}

impl Drop for UserTerminal {
    fn drop(&mut self) {
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(RESET).and_then(|()| out.flush());
        // An answer to the sandbox must not be typed at the shell of the host.
        std::thread::sleep(ANSWER_TIME);
        let _ = tcflush(std::io::stdin(), QueueSelector::IFlush);
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Flush, &self.before);
    }
}

/// The kind of the terminal, for programs inside. A name with other characters than those of terminals is not
/// forwarded.
pub(super) fn kind() -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-+._".contains(&b);
    let named = std::env::var("TERM").ok();
    let named = named.filter(|t| !t.is_empty() && t.len() <= 64 && t.bytes().all(plain));
    named.unwrap_or_else(|| "xterm".into())
}

/// Forwards typed input from a separate thread, since a read cannot be cancelled. The end of standard input
/// hangs up.
pub(super) fn read_keys(typing: Sender<TerminalInput>) {
    std::thread::spawn(move || {
        let mut chunk = [0; CHUNK];
        while let Ok(n) = std::io::stdin().lock().read(&mut chunk) {
            let typed = TerminalInput::Typed(chunk[..n].to_vec());
            if n == 0 || typing.blocking_send(typed).is_err() {
                return;
            }
        }
    });
}
