//! User ids of sandboxes.
//!
//! A user id that no other sandbox has keeps files, signals, `/proc` and limits of users apart even
//! where namespaces fail. A snapshot's files belong to the user that made them, so forks of it share the
//! id.

use crate::error::{Error, Result};
use std::rc::Rc;

/// First user id of sandboxes; no two lineages of sandboxes that are alive share one.
const FIRST_UID: u32 = 200_000;
const UIDS: u32 = 60_000;

/// First and last user id that a sandbox can have.
pub(crate) fn uid_range() -> (u32, u32) {
    (FIRST_UID + 1, FIRST_UID + UIDS)
}

/// User ids that are free.
#[derive(Clone, Debug, Default)]
pub(crate) struct Users {
    used: Rc<std::cell::Cell<u32>>,
    free: Rc<std::cell::RefCell<Vec<u32>>>,
}

/// A user id that belongs only to a sandbox, its snapshots and their forks.
#[derive(Debug)]
pub(crate) struct User {
    pub(crate) uid: u32,
    /// User numbers that were used and released.
    free: Rc<std::cell::RefCell<Vec<u32>>>,
}

impl Users {
    pub(crate) fn take(&self) -> Result<Rc<User>> {
        let free = self.free.borrow_mut().pop();
        let uid = match free {
            Some(uid) => uid,
            None if self.used.get() < UIDS => {
                self.used.set(self.used.get() + 1);
                FIRST_UID + self.used.get()
            }
            None => {
                let why = format!("all {UIDS} user ids of sandboxes are taken");
                return Err(Error::Unavailable(why));
            }
        };
        let free = Rc::clone(&self.free);
        Ok(Rc::new(User { uid, free }))
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.free.borrow_mut().push(self.uid);
    }
}
