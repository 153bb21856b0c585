//! Quotas of open connections.
//!
//! A new connection has no key. Connections without a key have a small quota and a short time. A full quota
//! closes the oldest of them, so that a client that sends its request at once is served. A valid key moves
//! the connection to the quota of that key.

use super::{ConnectionLimits, Key};
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Time that every connection has for its request before another one may take its place.
const GRACE: Duration = Duration::from_millis(100);

/// A connection without a key. Dropping the sender closes it.
#[derive(Debug)]
struct Stranger {
    number: u64,
    since: Instant,
    has_key: watch::Sender<bool>,
}

/// Current connections.
#[derive(Debug, Default)]
struct Counts {
    /// Number of the latest connection.
    next: u64,
    /// Connections without a key by address, oldest first.
    strangers: HashMap<IpAddr, VecDeque<Stranger>>,
    /// Number of connections without a key.
    without_key: usize,
    /// Number of connections by the name of their key.
    keys: HashMap<String, usize>,
    /// Number of connections with a key.
    with_key: usize,
}

impl Counts {
    /// Removes a connection without a key.
    fn remove(&mut self, address: IpAddr, number: u64) {
        let Some(list) = self.strangers.get_mut(&address) else {
            return;
        };
        let before = list.len();
        list.retain(|stranger| stranger.number != number);
        self.without_key -= before - list.len();
        if list.is_empty() {
            self.strangers.remove(&address);
        }
    }

    /// Closes the oldest connection without a key of an address.
    ///
    /// # Errors
    /// The time after which that is allowed.
    fn evict(&mut self, address: IpAddr, now: Instant) -> Result<(), Duration> {
        let oldest = self.strangers.get(&address).and_then(VecDeque::front);
        let Some(oldest) = oldest else { return Ok(()) };
        let age = now.saturating_duration_since(oldest.since);
        if age < GRACE {
            return Err(GRACE - age);
        }
        let number = oldest.number;
        self.remove(address, number);
        Ok(())
    }

    /// The address with the most connections without a key; of several, the one with the oldest.
    fn most(&self) -> Option<IpAddr> {
        let rank = |list: &VecDeque<Stranger>| (list.len(), list.front().map(|s| s.number));
        let most = self.strangers.iter().max_by_key(|(_, list)| {
            let (count, oldest) = rank(list);
            (count, std::cmp::Reverse(oldest))
        });
        most.map(|(address, _)| *address)
    }
}

/// Quotas and counts of all connections of a server.
#[derive(Clone, Debug)]
pub(super) struct Connections {
    counts: Arc<Mutex<Counts>>,
    without_key: usize,
    without_key_per_address: usize,
    with_key: usize,
    per_key: usize,
}

/// Quota that a connection counts against.
#[derive(Debug)]
enum Quota {
    /// The quota of an address, with the connection's number.
    Address(IpAddr, u64),
    /// The quota of a key.
    Key(Key),
    /// The connection was evicted or released.
    None,
}

/// Place of a connection in a quota, released on drop.
#[derive(Debug)]
pub(super) struct Slot {
    all: Connections,
    quota: Quota,
}

impl Connections {
    /// Empty quotas.
    pub(super) fn new(limits: &ConnectionLimits) -> Self {
        Self {
            counts: Arc::default(),
            without_key: limits.without_key,
            without_key_per_address: limits.without_key_per_address,
            with_key: limits.with_key,
            per_key: limits.per_key,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection without a key. The receiver becomes true when a key came, and its sender is dropped
    /// when the connection must close.
    ///
    /// # Errors
    /// The time to wait, if the quota is full of connections that have just come.
    pub(super) fn add(
        &self,
        address: IpAddr,
        now: Instant,
    ) -> Result<(Slot, watch::Receiver<bool>), Duration> {
        let mut counts = self.lock();
        let own = counts.strangers.get(&address).map_or(0, VecDeque::len);
        // A burst of an address may pass its own quota, never that of all.
        let evicted = own >= self.without_key_per_address && counts.evict(address, now).is_ok();
        if !evicted
            && counts.without_key >= self.without_key
            && let Some(most) = counts.most()
        {
            counts.evict(most, now)?;
        }
        counts.next += 1;
        let number = counts.next;
        let (has_key, receiver) = watch::channel(false);
        let stranger = Stranger {
            number,
            since: now,
            has_key,
        };
        counts
            .strangers
            .entry(address)
            .or_default()
            .push_back(stranger);
        counts.without_key += 1;
        let slot = Slot {
            all: self.clone(),
            quota: Quota::Address(address, number),
        };
        Ok((slot, receiver))
    }
}

impl Slot {
    /// Moves the connection to the quota of a key.
    ///
    /// # Errors
    /// The limit that is reached.
    pub(super) fn take_key(&mut self, key: Key) -> Result<(), usize> {
        let Quota::Address(address, number) = self.quota else {
            return Ok(());
        };
        let mut counts = self.all.lock();
        if counts.with_key >= self.all.with_key {
            return Err(self.all.with_key);
        }
        if let Key::Named(name) = &key {
            let held = counts.keys.get(name).copied().unwrap_or(0);
            if held >= self.all.per_key {
                return Err(self.all.per_key);
            }
            counts.keys.insert(name.clone(), held + 1);
        }
        counts.with_key += 1;
        // Sends before the sender is dropped, which would close the connection.
        let list = counts.strangers.get(&address);
        let own = list.and_then(|list| list.iter().find(|s| s.number == number));
        let stays = own.is_some_and(|s| s.has_key.send(true).is_ok());
        counts.remove(address, number);
        drop(counts);
        self.quota = Quota::Key(key);
        if !stays {
            self.release();
        }
        Ok(())
    }

    /// Whether the connection has a key.
    pub(super) fn has_key(&self) -> bool {
        matches!(self.quota, Quota::Key(_))
    }

    /// Frees the place. Repeated calls have no effect.
    fn release(&mut self) {
        let mut counts = self.all.lock();
        match std::mem::replace(&mut self.quota, Quota::None) {
            Quota::Address(address, number) => counts.remove(address, number),
            Quota::Key(key) => {
                counts.with_key -= 1;
                let Key::Named(name) = key else { return };
                match counts.keys.get(&name).map_or(0, |held| held - 1) {
                    0 => counts.keys.remove(&name),
                    left => counts.keys.insert(name, left),
                };
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
        Connections::new(&ConnectionLimits {
            without_key: 4,
            without_key_per_address: 3,
            with_key: 3,
            per_key: 2,
            ..ConnectionLimits::default()
        })
    }

    fn key(name: &str) -> Key {
        Key::Named(name.into())
    }

    fn address(n: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, n])
    }

    type Held = Vec<(Slot, watch::Receiver<bool>)>;

    fn ended(held: &Held) -> Vec<bool> {
        let ended = held.iter().map(|(_, end)| end.has_changed().is_err());
        ended.collect()
    }

    #[test]
    fn full_quotas_close_the_oldest_connection_without_a_key() {
        let (all, began) = (connections(), Instant::now());
        let add = |n, ms| all.add(address(n), began + Duration::from_millis(ms));
        let mut held: Held = [1, 1, 1].map(|n| add(n, 0).unwrap()).into();
        assert_eq!(ended(&held), [false; 3]);
        // The first connection that ends is from the same address, the next from the address with the most.
        held.push(add(1, 200).unwrap());
        assert_eq!(ended(&held), [true, false, false, false]);
        held.extend([add(2, 200).unwrap(), add(3, 200).unwrap()]);
        assert_eq!(ended(&held), [true, true, false, false, false, false]);
        drop(held);
        assert_eq!(all.lock().without_key, 0);
        assert!(all.lock().strangers.is_empty());
    }

    #[test]
    fn connections_that_have_just_come_keep_their_place() {
        let (all, began) = (connections(), Instant::now());
        let mut held: Held = (0..4)
            .map(|_| all.add(address(1), began).unwrap())
            .collect();
        assert_eq!(ended(&held), [false; 4]);
        let wait = all.add(address(2), began + Duration::from_millis(40));
        assert_eq!(wait.unwrap_err(), Duration::from_millis(60));
        assert_eq!(ended(&held), [false; 4]);
        held[3].0.take_key(key("ann")).unwrap();
        assert!(all.add(address(2), began).is_ok());
    }

    #[test]
    fn keys_have_quotas_that_other_connections_do_not_use() {
        let (all, began) = (connections(), Instant::now());
        let add = |n, s| all.add(address(n), began + Duration::from_secs(s)).unwrap();
        let mut held: Held = (0..3).map(|_| add(1, 0)).collect();
        let taken: Vec<_> = held
            .iter_mut()
            .map(|(slot, _)| slot.take_key(key("ann")))
            .collect();
        assert_eq!(taken, [Ok(()), Ok(()), Err(2)]);
        assert_eq!(all.lock().without_key, 1);
        assert!(*held[0].1.borrow());
        let crowd: Held = (1..10).map(|s| add(1, s)).collect();
        assert!(*held[0].1.borrow());
        let mut bob = add(2, 11);
        assert_eq!(bob.0.take_key(key("bob")), Ok(()));
        assert_eq!(add(2, 12).0.take_key(Key::Operator), Err(3));
        drop((held, crowd, bob));
        assert!(all.lock().keys.is_empty());
        assert_eq!(all.lock().with_key, 0);
    }
}
