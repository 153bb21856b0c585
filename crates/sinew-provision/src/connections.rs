//! Quotas of open connections.
//!
//! A new connection is unauthenticated. Unauthenticated connections have a small quota and a short timeout.
//! A full quota closes the oldest connection of the address that has the most, so that a client that sends
//! its request at once is served. A valid token moves the connection to its owner's quota.

use crate::registry::Bounds;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// Current connections.
#[derive(Debug, Default)]
struct Counts {
    /// Number of the latest connection.
    next: u64,
    /// Unauthenticated connections by address, oldest first. Dropping a sender closes the connection.
    unauthenticated: HashMap<IpAddr, VecDeque<(u64, watch::Sender<bool>)>>,
    /// Number of unauthenticated connections.
    total: usize,
    /// Number of connections by owner.
    owners: HashMap<String, usize>,
}

impl Counts {
    /// Removes an unauthenticated connection.
    fn remove(&mut self, address: IpAddr, number: u64) {
        let Some(list) = self.unauthenticated.get_mut(&address) else {
            return;
        };
        let before = list.len();
        list.retain(|(n, _)| *n != number);
        self.total -= before - list.len();
        if list.is_empty() {
            self.unauthenticated.remove(&address);
        }
    }

    /// Closes the oldest unauthenticated connection of an address.
    fn evict(&mut self, address: IpAddr) {
        let oldest = self.unauthenticated.get(&address).and_then(VecDeque::front);
        if let Some(number) = oldest.map(|(number, _)| *number) {
            self.remove(address, number);
        }
    }
}

/// Quotas and counts of all connections.
#[derive(Clone, Debug)]
pub(crate) struct Connections {
    /// Current connections.
    counts: Arc<Mutex<Counts>>,
    /// Maximum unauthenticated connections per address.
    per_address: usize,
    /// Maximum unauthenticated connections.
    unauthenticated: usize,
    /// Maximum connections per owner.
    per_owner: usize,
}

/// Quota that a connection counts against.
#[derive(Debug)]
enum Quota {
    /// The quota of an address, with the connection's number.
    Unauthenticated(IpAddr, u64),
    /// The quota of an owner.
    Owner(String),
    /// The connection was evicted or released.
    None,
}

/// A connection's quota slot, released on drop.
#[derive(Debug)]
pub(crate) struct Slot {
    /// The quotas that the slot belongs to.
    all: Connections,
    /// The quota that the connection counts against.
    quota: Quota,
}

impl Connections {
    /// Creates empty quotas with the server's limits.
    pub(crate) fn new(bounds: &Bounds) -> Self {
        Self {
            counts: Arc::default(),
            per_address: bounds.unauthenticated_per_address,
            unauthenticated: bounds.unauthenticated,
            per_owner: bounds.connections,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an unauthenticated connection. The receiver becomes true when the connection is authenticated,
    /// and its sender is dropped when the connection must close.
    pub(crate) fn add(&self, address: IpAddr) -> (Slot, watch::Receiver<bool>) {
        let mut counts = self.lock();
        if counts
            .unauthenticated
            .get(&address)
            .map_or(0, VecDeque::len)
            >= self.per_address
        {
            counts.evict(address);
        }
        if counts.total >= self.unauthenticated {
            let most = counts
                .unauthenticated
                .iter()
                .max_by_key(|(_, list)| list.len());
            if let Some(address) = most.map(|(address, _)| *address) {
                counts.evict(address);
            }
        }
        counts.next += 1;
        let number = counts.next;
        let (sender, receiver) = watch::channel(false);
        let list = counts.unauthenticated.entry(address).or_default();
        list.push_back((number, sender));
        counts.total += 1;
        let slot = Slot {
            all: self.clone(),
            quota: Quota::Unauthenticated(address, number),
        };
        (slot, receiver)
    }
}

impl Slot {
    /// Moves the connection to an owner's quota.
    ///
    /// # Errors
    /// The owner's maximum number of connections, if it is reached.
    pub(crate) fn authenticate(&mut self, owner: &str) -> Result<(), usize> {
        let Quota::Unauthenticated(address, number) = self.quota else {
            return Ok(());
        };
        let mut counts = self.all.lock();
        let held = counts.owners.entry(owner.into()).or_default();
        if *held >= self.all.per_owner {
            return Err(self.all.per_owner);
        }
        *held += 1;
        // Sends before the sender is dropped, which would close the connection.
        let list = counts.unauthenticated.get(&address);
        let own = list.and_then(|list| list.iter().find(|(n, _)| *n == number));
        let stays = own.is_some_and(|(_, sender)| sender.send(true).is_ok());
        counts.remove(address, number);
        drop(counts);
        self.quota = Quota::Owner(owner.into());
        if !stays {
            self.release();
        }
        Ok(())
    }

    /// Frees the slot. Repeated calls have no effect.
    fn release(&mut self) {
        let mut counts = self.all.lock();
        match std::mem::replace(&mut self.quota, Quota::None) {
            Quota::Unauthenticated(address, number) => counts.remove(address, number),
            Quota::Owner(owner) => {
                if let Some(held) = counts.owners.get_mut(&owner) {
                    *held -= 1;
                }
            }
            Quota::None => {}
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections() -> Connections {
        Connections::new(&Bounds {
            unauthenticated: 4,
            unauthenticated_per_address: 3,
            connections: 2,
            ..Bounds::default()
        })
    }

    fn address(n: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, n])
    }

    #[test]
    fn full_quotas_close_the_oldest_unauthenticated_connection() {
        let all = connections();
        let add = |n| all.add(address(n));
        let mut held: Vec<_> = [1, 1, 1].map(add).into();
        let ended = |held: &[(Slot, watch::Receiver<bool>)]| -> Vec<bool> {
            held.iter()
                .map(|(_, end)| end.has_changed().is_err())
                .collect()
        };
        assert_eq!(ended(&held), [false; 3]);
        // First of its own address, then of the address that has the most.
        held.push(add(1));
        assert_eq!(ended(&held), [true, false, false, false]);
        held.extend([add(2), add(3)]);
        assert_eq!(ended(&held), [true, true, false, false, false, false]);
        drop(held);
        assert_eq!(all.lock().total, 0);
        assert!(all.lock().unauthenticated.is_empty());
    }

    #[test]
    fn owners_have_a_quota_that_unauthenticated_connections_do_not_use() {
        let all = connections();
        let mut held: Vec<_> = (0..3).map(|_| all.add(address(1))).collect();
        let authenticated: Vec<_> = held
            .iter_mut()
            .map(|(slot, _)| slot.authenticate("ann"))
            .collect();
        assert_eq!(authenticated, [Ok(()), Ok(()), Err(2)]);
        assert_eq!(all.lock().total, 1);
        assert!(*held[0].1.borrow());
        let crowd: Vec<_> = (0..9).map(|_| all.add(address(1))).collect();
        assert!(*held[0].1.borrow());
        assert_eq!(all.add(address(2)).0.authenticate("bob"), Ok(()));
        drop((held, crowd));
        assert!(all.lock().owners.values().all(|n| *n == 0));
    }
}
