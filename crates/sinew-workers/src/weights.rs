//! The owner's side of weights: each version is published, then named at the desk.
//!
//! No worker is waited for: one that is late starts no ticket that asks for a version which it does not have.

use crate::desk::Desk;
use crate::terms::PublishedMark;
use sinew_engines::{SharedWeights, WeightsFolder};
use sinew_orchestrator::PipelineError;
use sinew_pipeline::WeightsTransport;
use sinew_types::{Lineage, PolicyVersion, TensorSource, WeightsId};
use std::path::PathBuf;
use std::sync::Arc;

/// Name of a manifest in the folder of a version.
pub(crate) const MANIFEST: &str = "manifest.json";

/// Publishes weights in a folder, from which the desk serves them.
pub struct ServedWeights {
    shared: SharedWeights,
    root: PathBuf,
    lineage: Lineage,
    desk: Arc<Desk>,
}

sinew_types::debug_fields!(ServedWeights, root);

impl ServedWeights {
    /// Publishes versions of `lineage` under `root`, which `folder` writes to; `deltas`: as differences, if
    /// these are smaller.
    pub fn new(
        folder: WeightsFolder,
        root: PathBuf,
        lineage: Lineage,
        deltas: bool,
        desk: Arc<Desk>,
    ) -> Self {
        Self {
            shared: SharedWeights::new(folder, lineage, deltas),
            root,
            lineage,
            desk,
        }
    }
}

impl WeightsTransport for ServedWeights {
    fn publish(
        &mut self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), PipelineError> {
        let failed = |e: &dyn std::fmt::Display| PipelineError::system(format!("weights: {e}"));
        self.shared
            .publish(version, &*weights)
            .map_err(|e| failed(&e))?;
        let id = WeightsId::new(version, self.lineage);
        let path = self.root.join(id.folder_name()).join(MANIFEST);
        let manifest = std::fs::read(&path).map_err(|e| failed(&e))?;
        let mark = PublishedMark {
            id: id.folder_name(),
            manifest: blake3::hash(&manifest).to_hex().to_string(),
            address: None,
        };
        self.desk.publish(id, Some(mark));
        Ok(())
    }
}

/// Names the versions at the desk that engines outside load: their servers get them from the owner, or have
/// them at the address of a service.
pub struct AnnouncedWeights {
    engines: Box<dyn WeightsTransport>,
    lineage: Lineage,
    desk: Arc<Desk>,
}

sinew_types::debug_fields!(AnnouncedWeights, lineage);

impl AnnouncedWeights {
    /// `engines` have the weights `first` already, which are at `address` if a service has them.
    pub fn new(
        engines: Box<dyn WeightsTransport>,
        first: WeightsId,
        address: Option<&str>,
        desk: Arc<Desk>,
    ) -> Self {
        desk.publish(first, address.map(|address| at_service(first, address)));
        Self {
            engines,
            lineage: first.lineage,
            desk,
        }
    }
}

impl WeightsTransport for AnnouncedWeights {
    fn publish(
        &mut self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), PipelineError> {
        let id = WeightsId::new(version, self.lineage);
        let mark = weights.address().map(|address| at_service(id, address));
        self.engines.publish(version, weights)?;
        self.desk.publish(id, mark);
        Ok(())
    }
}

/// The mark of weights that a service has.
fn at_service(id: WeightsId, address: &str) -> PublishedMark {
    PublishedMark {
        id: id.folder_name(),
        manifest: blake3::hash(address.as_bytes()).to_hex().to_string(),
        address: Some(address.to_owned()),
    }
}
