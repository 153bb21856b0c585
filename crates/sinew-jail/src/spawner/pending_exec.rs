//! Programs on their way into a sandbox: their state before they run.
//!
//! A fork of the zygote gets two packets over its own socket. The first is the plan by which it gives up its
//! privileges, sent as soon as the namespaces are ready. The second is the program with three files, when
//! there is one. The fork waits between the two.

use super::children::Child;
use crate::error::{Error, Result};
use crate::protocol::{MAX_PACKET, send_bytes};
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::rc::Rc;

/// A program on its way into a sandbox.
#[derive(Debug)]
pub(super) struct PendingExec {
    /// Number of the sandbox init whose namespaces it is for.
    pub(super) serial: u32,
    /// The child; `None` before the fork.
    pub(super) child: Option<Rc<Child>>,
    pub(super) way: Way,
}

#[derive(Debug)]
/// Way in which it comes to run, and its progress.
pub(super) enum Way {
    /// Waits for the namespaces to be ready; then it is forked.
    Program {
        argv: Vec<CString>,
        env: Vec<CString>,
        files: Vec<OwnedFd>,
        /// Whether its first file is the terminal of its session.
        terminal: bool,
    },
    /// A fork of the zygote: it gets a plan when the namespaces are ready, then a program.
    Python {
        socket: OwnedFd,
        entered: bool,
        program: Option<(Vec<u8>, Vec<OwnedFd>)>,
    },
    /// The program was started, and no step is left.
    Started,
}

impl PendingExec {
    /// Whether it is a fork of the zygote that has no plan yet.
    pub(super) fn lacks_plan(&self) -> bool {
        self.child.is_some() && matches!(self.way, Way::Python { entered: false, .. })
    }

    /// Has a fork of the zygote enter its namespaces. A packet that cannot be sent means that the
    /// fork is dead, which its end shows.
    pub(super) fn enter(&mut self, plan: &[u8], given: &[RawFd]) {
        if let Way::Python {
            socket,
            entered: entered @ false,
            ..
        } = &mut self.way
        {
            *entered = send_bytes(socket.as_fd(), plan, given).is_ok();
        }
    }

    /// The program of a fork that has entered, and where to send it.
    pub(super) fn program(&mut self) -> Option<(OwnedFd, Vec<u8>, Vec<OwnedFd>)> {
        let ready = |way: &Way| {
            matches!(
                way,
                Way::Python {
                    entered: true,
                    program: Some(_),
                    ..
                }
            )
        };
        if !ready(&self.way) {
            return None;
        }
        match std::mem::replace(&mut self.way, Way::Started) {
            Way::Python {
                socket,
                program: Some((packet, files)),
                ..
            } => Some((socket, packet, files)),
            _ => None,
        }
    }
}

/// Arguments without inner zero bytes.
pub(super) fn c_strings(list: impl IntoIterator<Item = String>) -> Result<Vec<CString>> {
    list.into_iter()
        .map(|s| CString::new(s).map_err(|e| Error::refused("argument", e.to_string())))
        .collect()
}

/// Packet for a fork of the zygote: the bytes of the environment, which are added to that of the zygote, the
/// environment, the code.
pub(super) fn program_packet(code: &str, env: &[(String, String)]) -> Result<Vec<u8>> {
    let mut packet = vec![0; 4];
    for (name, value) in env {
        if name.is_empty() || name.contains('=') || name.contains('\0') || value.contains('\0') {
            return Err(Error::refused(
                format!("environment variable {name:?}"),
                "a name is not empty and has no '=', and there are no zero bytes",
            ));
        }
        for part in [name.as_str(), "=", value, "\0"] {
            packet.extend_from_slice(part.as_bytes());
        }
    }
    let bytes = packet.len() as u32 - 4;
    packet[..4].copy_from_slice(&bytes.to_le_bytes());
    packet.extend_from_slice(code.as_bytes());
    if packet.len() > MAX_PACKET {
        return Err(Error::TooLong {
            what: "program with its environment",
            bytes: packet.len(),
            max: MAX_PACKET,
        });
    }
    Ok(packet)
}
