//! The SETUP request as the host sends it.

use crate::wire::{self, Take};

/// Walls, user, interpreter and environment of all programs after it.
pub(super) struct SetupRequest {
    pub(super) user: u32,
    pub(super) warm: bool,
    pub(super) tcp: bool,
    /// Size of the folders of a machine.
    pub(super) work_bytes: u64,
    /// Files in the folders of a machine.
    pub(super) inodes: u64,
    pub(super) python: Vec<u8>,
    pub(super) filter: Vec<u8>,
    pub(super) env: Vec<Vec<u8>>,
    /// User and folder of programs that name none, if programs can write everywhere.
    pub(super) root: Option<(Vec<u8>, Vec<u8>)>,
    /// Resource, soft and hard limit.
    pub(super) limits: Vec<[u64; 3]>,
    /// Memory and processes of all programs of a machine.
    pub(super) together: Option<[u64; 3]>,
}

impl SetupRequest {
    /// `None` if the payload makes no sense.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let mut take = Take(bytes);
        let mut asked = Self {
            user: take.number()? as u32,
            warm: take.byte()? == 1,
            tcp: take.byte()? == 1,
            work_bytes: take.number()?,
            inodes: take.number()?,
            python: take.bytes()?.to_vec(),
            filter: take.bytes()?.to_vec(),
            env: take.list()?,
            root: None,
            limits: Vec::new(),
            together: None,
        };
        let writable = take.byte()? == 1;
        let root = (take.bytes()?.to_vec(), take.bytes()?.to_vec());
        asked.root = writable.then_some(root);
        while let Some(resource) = take.number() {
            let limit = [resource, take.number()?, take.number()?];
            match resource {
                wire::TOGETHER => asked.together = Some(limit),
                _ => asked.limits.push(limit),
            }
        }
        Some(asked)
    }
}
