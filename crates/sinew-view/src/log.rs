//! Lines for standard error that may come while a live view is drawn there: they go above it.
//!
//! Lines and the view share standard error: otherwise a warning would land in the middle of a drawing. A
//! process has one view, so the destination of lines is a static.

use crate::visible::visible;
use std::io::Write;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Mutex, PoisonError};

/// Lines that wait for the next drawing. More than these go to the terminal at once.
const WAITING: usize = 256;

/// Receiver of lines while a view is drawn.
static VIEW: Mutex<Option<SyncSender<String>>> = Mutex::new(None);

/// Sends further lines to the receiver; those that nobody takes are lost with it.
pub(crate) fn divert() -> Receiver<String> {
    let (sender, receiver) = sync_channel(WAITING);
    *VIEW.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
    receiver
}

/// Sends further lines to standard error again.
pub(crate) fn undivert() {
    *VIEW.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

/// Writes a line, or several. Text of models, environments and data in it cannot control the terminal.
pub fn say(text: &str) {
    let text = visible(text);
    let view = VIEW.lock().unwrap_or_else(PoisonError::into_inner);
    let text = match view.as_ref() {
        Some(view) => match view.try_send(text) {
            Ok(()) => return,
            Err(TrySendError::Full(text) | TrySendError::Disconnected(text)) => text,
        },
        None => text,
    };
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// One event of a log, forwarded as a whole. Dropping it prints it.
#[derive(Debug, Default)]
pub struct Event(Vec<u8>);

/// Writer for `tracing`, which asks for one for each event.
pub fn writer() -> Event {
    Event::default()
}

impl Write for Event {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            say(String::from_utf8_lossy(&self.0).trim_end());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_to_the_view_while_there_is_one() {
        let lines = divert();
        let mut event = writer();
        event.write_all(b"first ").unwrap();
        event.write_all(b"line\n").unwrap();
        drop(event);
        say("second\x1b[2J");
        undivert();
        say("after the view");
        let seen: Vec<String> = lines.try_iter().collect();
        assert_eq!(seen, ["first line", "second\\u{1b}[2J"]);
    }
}
