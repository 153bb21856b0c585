//! Making and resetting sandboxes.
//!
//! A sandbox costs a file system in memory, a control group, and, as long as no more than `Host` allows
//! wait, namespaces with an interpreter in them. All of it is made for this sandbox and goes with it: no
//! kernel object of one sandbox is used again by another.

use super::Spawner;
use super::files::{Files, Layer};
use super::live::{Live, NO_SANDBOX};
use crate::cgroup::Bounds;
use crate::error::{Error, Result};
use crate::protocol::Creation;
use crate::spec::Network;
use std::os::fd::OwnedFd;

impl Spawner {
    /// Files, a control group and, as long as not too many wait, namespaces with an interpreter in them.
    pub(super) fn create(&mut self, id: u64, creation: Creation) -> Result<()> {
        let layers = self.stores.layers(creation.base)?;
        // Files of a snapshot belong to the user that made them.
        let user = match layers.first().and_then(Layer::user) {
            Some(user) => Some(user),
            None => self.stores.new_user()?,
        };
        let (number, bytes) = (self.stores.next(), creation.limits.work_bytes);
        let files = Files::new(number, bytes, user.clone(), self.host.mounting, layers)?;
        let tcp = creation.network == Network::Loopback;
        let net_ns = tcp.then(|| self.host.networks.new_loopback()).transpose()?;
        let name = format!("sinew-{}-{id}", self.host.tag);
        let bounds = Bounds {
            memory_bytes: creation.limits.memory_bytes,
            // One more for the sandbox init.
            processes: creation.limits.processes + 1,
            tcp,
        };
        let group = self.host.hierarchy.create(&name, &bounds)?;
        let more = self.more_may_wait();
        let live = Live::new(creation, group, (files, user), net_ns, self.python_last);
        self.live.insert(id, live);
        if !more {
            return Ok(());
        }
        let opened = self.start_init(id).and_then(|()| self.warm_up(id));
        if opened.is_err() {
            self.destroy(id, 0);
        }
        opened
    }

    /// A listener of the host's inside.
    pub(super) fn listen(&self, id: u64, port: u16) -> Result<OwnedFd> {
        let live = self.live.get(&id).ok_or(NO_SANDBOX)?;
        let loopback = live.creation.network == Network::Loopback;
        let net_ns = live.net_ns.as_ref().filter(|_| loopback);
        let net_ns = net_ns.ok_or(Error::NoSuch("interface: its network is not `loopback`"))?;
        self.host.networks.listen(net_ns, port)
    }

    /// Throws away all files: it has those again that it started with.
    pub(super) fn reset(&mut self, id: u64) -> Result<()> {
        let live = self.idle(id)?;
        let (base, bytes) = (live.creation.base, live.creation.limits.work_bytes);
        let user = live.user.clone();
        let layers = self.stores.layers(base)?;
        self.stop_init(id);
        let number = self.stores.next();
        let files = Files::new(number, bytes, user, self.host.mounting, layers)?;
        let live = self.idle(id)?;
        (live.files, live.ruleset) = (Some(files), None);
        self.warming.soon(id);
        Ok(())
    }
}
