//! Connections that have shown no token yet, and those of owners: who may have how many.
//!
//! A new connection is a stranger. Strangers have few places and little time; where they need more, the
//! oldest of the address with the most of them goes, so that a client that sends its request at once
//! is served. With a valid token a connection becomes its owner's, and only the owner's connections
//! count against it.

use crate::book::Bounds;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

#[derive(Debug, Default)]
struct Counts {
    next: u64,
    /// Oldest first; dropping a sender ends the connection.
    strangers: HashMap<IpAddr, VecDeque<(u64, watch::Sender<bool>)>>,
    total: usize,
    owners: HashMap<String, usize>,
}

impl Counts {
    fn leave(&mut self, address: IpAddr, number: u64) {
        let Some(list) = self.strangers.get_mut(&address) else {
            return;
        };
        let before = list.len();
        list.retain(|(n, _)| *n != number);
        self.total -= before - list.len();
        if list.is_empty() {
            self.strangers.remove(&address);
        }
    }

    /// Ends the oldest stranger of an address.
    fn evict(&mut self, address: IpAddr) {
        let oldest = self.strangers.get(&address).and_then(VecDeque::front);
        if let Some(number) = oldest.map(|(number, _)| *number) {
            self.leave(address, number);
        }
    }
}

/// All connections.
#[derive(Clone, Debug)]
pub(crate) struct Connections {
    counts: Arc<Mutex<Counts>>,
    per_address: usize,
    strangers: usize,
    per_owner: usize,
}

/// Whose a connection is.
#[derive(Debug)]
enum Standing {
    Stranger(IpAddr, u64),
    Owner(String),
    /// It was a stranger too long.
    Gone,
}

/// A connection's place; dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Place {
    all: Connections,
    standing: Standing,
}

impl Connections {
    pub(crate) fn new(bounds: &Bounds) -> Self {
        Self {
            counts: Arc::default(),
            per_address: bounds.strangers_per_address,
            strangers: bounds.strangers,
            per_owner: bounds.connections,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a stranger, and what ends when it has to give it up.
    pub(crate) fn enter(&self, address: IpAddr) -> (Place, watch::Receiver<bool>) {
        let mut counts = self.lock();
        if counts.strangers.get(&address).map_or(0, VecDeque::len) >= self.per_address {
            counts.evict(address);
        }
        if counts.total >= self.strangers {
            let most = counts.strangers.iter().max_by_key(|(_, list)| list.len());
            if let Some(most) = most.map(|(address, _)| *address) {
                counts.evict(most);
            }
        }
        counts.next += 1;
        let number = counts.next;
        let (sender, receiver) = watch::channel(false);
        let list = counts.strangers.entry(address).or_default();
        list.push_back((number, sender));
        counts.total += 1;
        let place = Place {
            all: self.clone(),
            standing: Standing::Stranger(address, number),
        };
        (place, receiver)
    }
}

impl Place {
    /// Makes it an owner's. Whether there was room; the number that an owner may have.
    pub(crate) fn belong_to(&mut self, owner: &str) -> Result<(), usize> {
        let Standing::Stranger(address, number) = self.standing else {
            return Ok(());
        };
        let mut counts = self.all.lock();
        let held = counts.owners.entry(owner.into()).or_default();
        if *held >= self.all.per_owner {
            return Err(self.all.per_owner);
        }
        *held += 1;
        // The connection learns that it stays before its sender goes.
        let list = counts.strangers.get(&address);
        let own = list.and_then(|list| list.iter().find(|(n, _)| *n == number));
        let stays = own.is_some_and(|(_, sender)| sender.send(true).is_ok());
        counts.leave(address, number);
        drop(counts);
        self.standing = Standing::Owner(owner.into());
        if !stays {
            self.give_up();
        }
        Ok(())
    }

    fn give_up(&mut self) {
        let mut counts = self.all.lock();
        match std::mem::replace(&mut self.standing, Standing::Gone) {
            Standing::Stranger(address, number) => counts.leave(address, number),
            Standing::Owner(owner) => {
                if let Some(held) = counts.owners.get_mut(&owner) {
                    *held -= 1;
                }
            }
            Standing::Gone => {}
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.give_up();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections() -> Connections {
        Connections::new(&Bounds {
            strangers: 4,
            strangers_per_address: 3,
            connections: 2,
            ..Bounds::default()
        })
    }

    fn address(n: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, n])
    }

    #[test]
    fn the_oldest_stranger_makes_room() {
        let all = connections();
        let enter = |n| all.enter(address(n));
        let mut held: Vec<_> = [1, 1, 1].map(enter).into();
        let ended = |held: &[(Place, watch::Receiver<bool>)]| -> Vec<bool> {
            held.iter()
                .map(|(_, end)| end.has_changed().is_err())
                .collect()
        };
        assert_eq!(ended(&held), [false; 3]);
        // Of its own address, then of the one that has the most.
        held.push(enter(1));
        assert_eq!(ended(&held), [true, false, false, false]);
        held.extend([enter(2), enter(3)]);
        assert_eq!(ended(&held), [true, true, false, false, false, false]);
        drop(held);
        assert_eq!(all.lock().total, 0);
        assert!(all.lock().strangers.is_empty());
    }

    #[test]
    fn an_owner_has_so_many_and_no_stranger_takes_them() {
        let all = connections();
        let mut held: Vec<_> = (0..3).map(|_| all.enter(address(1))).collect();
        let joined: Vec<_> = held
            .iter_mut()
            .map(|(place, _)| place.belong_to("ann"))
            .collect();
        assert_eq!(joined, [Ok(()), Ok(()), Err(2)]);
        assert_eq!(all.lock().total, 1);
        assert!(*held[0].1.borrow());
        let crowd: Vec<_> = (0..9).map(|_| all.enter(address(1))).collect();
        assert!(*held[0].1.borrow());
        assert_eq!(all.enter(address(2)).0.belong_to("bob"), Ok(()));
        drop((held, crowd));
        assert!(all.lock().owners.values().all(|n| *n == 0));
    }
}
