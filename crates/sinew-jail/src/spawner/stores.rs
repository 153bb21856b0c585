//! Snapshots, users of sandboxes, and the numbers that distinguish file systems.

use super::files::Layer;
use super::users::{User, Users};
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::rc::Rc;

/// Users and snapshots that sandboxes start from.
#[derive(Debug)]
pub(super) struct Stores {
    /// `None` where all sandboxes share one user.
    users: Option<Users>,
    snapshots: HashMap<u64, Vec<Layer>>,
    /// Number of the last file system.
    last: u64,
}

impl Stores {
    pub(super) fn new(own_users: bool) -> Self {
        Self {
            users: own_users.then(Users::default),
            snapshots: HashMap::new(),
            last: 0,
        }
    }

    /// A number that no other file system of this spawner has.
    pub(super) fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// A user id that no other sandbox has, where there are such.
    pub(super) fn new_user(&self) -> Result<Option<Rc<User>>> {
        self.users.as_ref().map(Users::take).transpose()
    }

    /// The layers that a sandbox starts from, the upmost first: of a snapshot, or none.
    pub(super) fn layers(&self, base: Option<u64>) -> Result<Vec<Layer>> {
        let Some(base) = base else {
            return Ok(Vec::new());
        };
        let layers = self.snapshots.get(&base);
        layers.cloned().ok_or(Error::NoSuch("snapshot"))
    }

    pub(super) fn keep(&mut self, snapshot: u64, layers: Vec<Layer>) {
        self.snapshots.insert(snapshot, layers);
    }

    /// Lets a snapshot go; sandboxes that started from it keep its layers.
    pub(super) fn forget(&mut self, snapshot: u64) {
        self.snapshots.remove(&snapshot);
    }
}
