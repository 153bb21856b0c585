//! What the spawner does when nothing is asked of it.

use super::cgroup::Group;
use super::live::Way;
use super::messages::Creation;
use super::messages::send_bytes;
use super::spawner::Spawner;
use crate::port::Network;
use nix::poll::PollTimeout;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Interpreters rehearse when nothing was heard for so long: on a host with work, what a
/// rehearsal takes of the processors is worth more than what it saves a program.
const REHEARSE_AFTER: Duration = Duration::from_millis(4);
/// Control groups are kept for so long after something was heard last.
const KEEP_GROUPS: Duration = Duration::from_millis(100);
/// Control groups that are kept.
const MAX_GROUPS: usize = 64;
/// Memory that may be charged to a group of which nothing is left: what the kernel frees later,
/// and pages of files that the sandbox was the first to read.
const LEFT_BYTES: u64 = 2 << 20;
/// What an interpreter that waits is told, to rehearse; programs come with files.
const REHEARSE: &[u8] = b"R";

/// The one that ends first.
pub(super) fn sooner(a: PollTimeout, b: PollTimeout) -> PollTimeout {
    if a == PollTimeout::NONE || (b != PollTimeout::NONE && b < a) {
        b
    } else {
        a
    }
}

impl Spawner {
    /// Does what is due when it is quiet; the time until the next is.
    pub(super) fn quiet_due(&mut self) -> PollTimeout {
        let after = match (self.to_rehearse.is_empty(), self.spare_groups.is_empty()) {
            (false, _) => REHEARSE_AFTER,
            (true, false) => KEEP_GROUPS,
            (true, true) => return PollTimeout::NONE,
        };
        let left = after.saturating_sub(self.last_heard.elapsed());
        if !left.is_zero() {
            let left = left + Duration::from_millis(1);
            return PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        }
        match self.to_rehearse.pop_front() {
            Some(id) => {
                // One after the other.
                if self.rehearse(id) {
                    self.last_heard = Instant::now();
                }
            }
            None => self.drop_spare_groups(),
        }
        PollTimeout::ZERO
    }

    /// Whether an interpreter waits in it that has not rehearsed.
    fn rehearse(&mut self, id: u64) -> bool {
        let live = self.live.get_mut(&id);
        match live.and_then(|l| l.warm.as_mut()).map(|e| &mut e.way) {
            Some(Way::Python {
                socket,
                entered: true,
                rehearsed,
                ..
            }) if !*rehearsed => {
                *rehearsed = true;
                send_bytes(socket.as_fd(), REHEARSE, &[]).is_ok()
            }
            _ => false,
        }
    }

    /// A group with these limits: one of a sandbox that is gone, else a new one.
    pub(super) fn new_group(&mut self, id: u64, creation: &Creation) -> Result<Group, String> {
        let (limits, tcp) = (&creation.limits, creation.network == Network::Loopback);
        let spare = self.spare_groups.iter().rposition(|g| g.fits(limits, tcp));
        if let Some(at) = spare {
            return Ok(self.spare_groups.swap_remove(at));
        }
        let name = format!("sinew-{}-{id}", self.tag);
        self.hierarchy.create(name, limits, tcp)
    }

    pub(super) fn more_spare_groups(&self) -> bool {
        self.spare_groups.len() < MAX_GROUPS
    }

    /// Keeps the group of a sandbox whose files are gone, too, unless much is still charged to
    /// it: that would count for the next one.
    pub(super) fn keep_group(&mut self, mut group: Group) {
        if group.memory_bytes() > LEFT_BYTES {
            group.remove();
            return;
        }
        group.rest();
        self.spare_groups.push(group);
    }

    pub(super) fn drop_spare_groups(&mut self) {
        for group in self.spare_groups.drain(..) {
            group.remove();
        }
    }
}
