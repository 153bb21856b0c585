//! The adapters that are loaded: names, slots of the device, versions.

use crate::blocks::Space;
use crate::forward::AdapterSlot;
use sinew_types::{AdapterName, EngineError, PolicyVersion};
use std::collections::HashMap;

/// An adapter that is loaded.
#[derive(Clone, Debug)]
pub(crate) struct LoadedAdapter {
    name: AdapterName,
    /// Version of tokens that it samples.
    pub(crate) version: PolicyVersion,
    /// Its keys and values in the prefix cache.
    pub(crate) space: Space,
}

/// Adapters by slot and by name. At most `max` at a time.
#[derive(Debug)]
pub(crate) struct Adapters {
    slots: Vec<Option<LoadedAdapter>>,
    names: HashMap<AdapterName, AdapterSlot>,
    max: usize,
}

impl Adapters {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            slots: Vec::new(),
            names: HashMap::new(),
            max,
        }
    }

    /// Slot of a name that is loaded.
    pub(crate) fn find(&self, name: &AdapterName) -> Option<AdapterSlot> {
        self.names.get(name).copied()
    }

    /// Slot under which the device is to load a name: its own one, or a free one.
    ///
    /// # Errors
    /// If it is a new name and all slots are taken.
    pub(crate) fn slot_for(&self, name: &AdapterName) -> Result<AdapterSlot, EngineError> {
        if let Some(slot) = self.find(name) {
            return Ok(slot);
        }
        if self.names.len() >= self.max {
            return Err(EngineError::Weights(format!(
                "adapter {name}: max_adapters = {}: as many are loaded; unload one, or raise it",
                self.max
            )));
        }
        let free = self.slots.iter().position(Option::is_none);
        Ok(free.unwrap_or(self.slots.len()) as AdapterSlot)
    }

    /// Records an adapter in a slot of [`Adapters::slot_for`]. Returns the space of the one that it replaces.
    pub(crate) fn put(
        &mut self,
        slot: AdapterSlot,
        name: &AdapterName,
        version: PolicyVersion,
        space: Space,
    ) -> Option<Space> {
        let index = slot as usize;
        if index >= self.slots.len() {
            self.slots.resize(index + 1, None);
        }
        let loaded = LoadedAdapter {
            name: name.clone(),
            version,
            space,
        };
        let before = self.slots[index].replace(loaded);
        self.names.insert(name.clone(), slot);
        before.map(|before| before.space)
    }

    /// Forgets a name; returns its slot and what was loaded there.
    pub(crate) fn remove(&mut self, name: &AdapterName) -> Option<(AdapterSlot, LoadedAdapter)> {
        let slot = self.names.remove(name)?;
        let loaded = self.slots[slot as usize].take()?;
        debug_assert_eq!(loaded.name, *name);
        Some((slot, loaded))
    }

    /// The adapter in a slot.
    pub(crate) fn get(&self, slot: AdapterSlot) -> Option<&LoadedAdapter> {
        self.slots.get(slot as usize)?.as_ref()
    }

    /// All that are loaded.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut LoadedAdapter> {
        self.slots.iter_mut().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> AdapterName {
        AdapterName::new(text).unwrap()
    }

    #[test]
    fn slots_are_bounded_and_used_again() {
        let mut adapters = Adapters::new(2);
        let load = |adapters: &mut Adapters, text: &str, version: u64| {
            let slot = adapters.slot_for(&name(text)).unwrap();
            let space = Space(version);
            let before = adapters.put(slot, &name(text), PolicyVersion(version), space);
            (slot, before)
        };
        assert_eq!(load(&mut adapters, "a", 1), (0, None));
        assert_eq!(load(&mut adapters, "b", 2), (1, None));
        let refused = adapters.slot_for(&name("c")).unwrap_err().to_string();
        assert!(refused.contains("max_adapters = 2"), "{refused}");
        assert_eq!(load(&mut adapters, "a", 3), (0, Some(Space(1))), "replaced");
        assert_eq!(adapters.get(0).unwrap().version, PolicyVersion(3));
        let (slot, removed) = adapters.remove(&name("a")).unwrap();
        assert_eq!((slot, removed.space), (0, Space(3)));
        assert!(adapters.remove(&name("a")).is_none() && adapters.get(0).is_none());
        assert_eq!(load(&mut adapters, "c", 4), (0, None));
        assert_eq!(adapters.find(&name("b")), Some(1));
        assert_eq!(adapters.find(&name("a")), None);
        let none = Adapters::new(0).slot_for(&name("a"));
        assert!(none.unwrap_err().to_string().contains("max_adapters = 0"));
    }
}
