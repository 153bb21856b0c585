//! Terminals of programs: a pseudo terminal of the host, whose other end goes into the sandbox.
//!
//! The host keeps the end that shows what is written (the master). Code inside has the other end as its three
//! standard files and as the terminal of its session. It cannot type into it: the filter allows neither
//! TIOCSTI nor TIOCLINUX, and none of the requests that change the kind of a terminal (TIOCSETD, TIOCCONS).
//! It is not a terminal of the user: the bytes that the user's terminal shows are copied from here.

use crate::port::{Terminal, TerminalInput, TerminalSize};
use rustix::io::Errno;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{InputModes, OptionalActions, Winsize, tcgetattr, tcsetattr, tcsetwinsize};
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

/// Bytes that one read takes at most.
const CHUNK: usize = 8 << 10;
/// Maximum wait for a reader to take a piece of output after the program has ended.
const READER_GRACE: Duration = Duration::from_secs(3);
/// Bytes that are still read when the program has ended: more than a terminal holds.
const REST: usize = 1 << 20;

/// The host's end.
pub(super) struct Master(AsyncFd<OwnedFd>);

/// A new terminal, and what goes into the sandbox as standard input, output and error. It is in no file
/// system that code inside can see, and becomes the terminal of no session of the host.
pub(super) fn open(size: TerminalSize) -> io::Result<(Master, Vec<OwnedFd>)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = openpt(flags)?;
    unlockpt(&master)?;
    let theirs = ioctl_tiocgptpeer(&master, flags)?;
    let mut modes = tcgetattr(&theirs)?;
    modes.input_modes |= InputModes::IUTF8;
    tcsetattr(&theirs, OptionalActions::Now, &modes)?;
    rustix::io::ioctl_fionbio(&master, true)?;
    #[expect(
        deprecated,
        reason = "it is unsound for types that change their descriptor; this one does not"
    )]
    let master = Master(AsyncFd::new(master)?);
    master.resize(size);
    let theirs = vec![theirs.try_clone()?, theirs.try_clone()?, theirs];
    Ok((master, theirs))
}

impl Master {
    /// Sets the size; what runs in the foreground gets SIGWINCH.
    fn resize(&self, size: TerminalSize) {
        let size = Winsize {
            ws_row: size.rows,
            ws_col: size.columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        // A terminal that hung up has no size.
        let _ = tcsetwinsize(self.0.get_ref(), size);
    }

    /// Reads what there is; waits for it. 0 after the last program has closed the terminal.
    async fn read(&self, chunk: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            let read = ready.try_io(|fd| Ok(rustix::io::read(fd.get_ref(), &mut *chunk)?));
            match read {
                Ok(Err(e)) if e.raw_os_error() == Some(libc::EIO) => return Ok(0),
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(read) => return read,
                Err(_would_block) => {}
            }
        }
    }

    /// Types bytes; waits while the terminal holds as much as it can.
    async fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut ready = self.0.writable().await?;
            match ready.try_io(|fd| Ok(rustix::io::write(fd.get_ref(), bytes)?)) {
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(written) => bytes = &bytes[written?..],
                Err(_would_block) => {}
            }
        }
        Ok(())
    }

    /// Carries bytes both ways until the user's side hangs up. Bytes already read are passed on even if this
    /// future is dropped.
    pub(super) async fn carry(&self, terminal: &mut Terminal) {
        let Terminal { input, output, .. } = terminal;
        let typed = async {
            while let Some(event) = input.recv().await {
                match event {
                    TerminalInput::Resized(size) => self.resize(size),
                    // Nothing reads it any more; the end of the program shows it.
                    TerminalInput::Typed(bytes) => drop(self.write(&bytes).await),
                }
            }
        };
        let shown = async {
            let mut chunk = vec![0; CHUNK];
            // The place first: a read after which this waits could be lost.
            while let Ok(place) = output.reserve().await {
                match self.read(&mut chunk).await {
                    Ok(n) if n > 0 => place.send(chunk[..n].to_vec()),
                    _ => std::future::pending().await,
                }
            }
        };
        tokio::select! {
            () = typed => {}
            () = shown => {}
        }
    }

    /// Sends the output that the terminal still holds after its program has ended, up to about [`REST`]
    /// bytes.
    pub(super) async fn finish(self, output: &mpsc::Sender<Vec<u8>>) {
        let (mut chunk, mut left) = (vec![0; CHUNK], REST);
        while left > 0 {
            let Ok(Ok(place)) = tokio::time::timeout(READER_GRACE, output.reserve()).await else {
                return;
            };
            match rustix::io::read(self.0.get_ref(), &mut chunk) {
                Ok(n) if n > 0 => {
                    left = left.saturating_sub(n);
                    place.send(chunk[..n].to_vec());
                }
                Err(Errno::INTR) => {}
                _ => return,
            }
        }
    }
}
