//! Machines of a recipe: containers with writable roots, each of the image that its task names.
//!
//! Images are built or found once; a provider of containers serves all machines of one image, network and
//! number of processors. The egress proxy of a provider is its only way out.

use crate::levels::egress::{self, EgressProxy};
use crate::levels::error::LevelError;
use crate::levels::volumes::volumes;
use crate::levels::{container, image};
use sinew_egress::{EgressConfig, RuleConfig, RuleScheme};
use sinew_env::{ImageSource, MachineImage, MachineNetwork, MachineSpec, Machines};
use sinew_image::build::{BuildError, BuildRequest, EngineBuilder, build, import};
use sinew_image::{Image, UnpackLimits};
use sinew_recipe::{Level, SandboxPlan};
use sinew_sandbox::{
    Limits, Network, Sandbox, SandboxError, SandboxFuture, SandboxProvider, SandboxSpec,
    WritableRoot,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Memory of a machine whose task names none and whose recipe allows less, in bytes: an interpreter with its
/// packages needs more than a small program.
const MEMORY_BYTES: u64 = 2 << 30;

/// Bytes of files of a machine whose task names none.
const STORAGE_BYTES: u64 = 1 << 30;

/// Maximum bytes of files of a machine: they are in memory with some engines.
const MAX_STORAGE_BYTES: u64 = 16 << 30;

/// Processes of a machine, at least.
const PROCESSES: u64 = 512;

/// Open files of a process, at least.
const OPEN_FILES: u64 = 4096;

/// Maximum number of providers that are kept; machines that live keep theirs.
const MAX_PROVIDERS: usize = 64;

/// Properties that machines of one provider share.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shared {
    root: PathBuf,
    network: MachineNetwork,
    /// Processors in thousandths; 0: not bounded.
    cpus: u64,
}

/// A value that is made once, by the first who asks.
type Once<T> = Arc<Mutex<Option<T>>>;

/// Values by key, and the keys in the order in which they came.
type Values<K, T> = (BTreeMap<K, Once<T>>, Vec<K>);

/// Values that are made once, by key; the oldest are forgotten.
struct Kept<K, T> {
    all: Mutex<Values<K, T>>,
    most: usize,
}

impl<K: Ord + Clone, T: Clone> Kept<K, T> {
    fn new(most: usize) -> Self {
        Self {
            all: Mutex::default(),
            most,
        }
    }

    /// The value of a key. Others who ask for it wait until it is made. Blocks.
    fn get(
        &self,
        key: &K,
        make: impl FnOnce() -> Result<T, SandboxError>,
    ) -> Result<T, SandboxError> {
        let own = {
            let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
            let (values, order) = &mut *all;
            if !values.contains_key(key) {
                order.push(key.clone());
            }
            let own = Arc::clone(values.entry(key.clone()).or_default());
            if order.len() > self.most {
                let oldest = order.remove(0);
                values.remove(&oldest);
            }
            own
        };
        let mut own = own.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = &*own {
            return Ok(made.clone());
        }
        let made = make()?;
        *own = Some(made.clone());
        Ok(made)
    }
}

/// Containers with writable roots.
pub(crate) struct ContainerMachines {
    inner: Arc<Inner>,
}

struct Inner {
    section: SandboxPlan,
    /// Folders of the host that every machine sees, read-only.
    shows: Vec<(PathBuf, PathBuf)>,
    images: Kept<ImageSource, MachineImage>,
    providers: Kept<Shared, Arc<dyn SandboxProvider>>,
}

/// Machines of a recipe, which see these folders of the host.
///
/// # Errors
/// If a volume of the recipe cannot be shown.
pub(crate) fn machines(
    section: &SandboxPlan,
    mut shows: Vec<(PathBuf, PathBuf)>,
) -> Result<Arc<dyn Machines>, LevelError> {
    shows.extend(volumes(&section.volumes)?);
    Ok(Arc::new(ContainerMachines {
        inner: Arc::new(Inner {
            section: section.clone(),
            shows,
            images: Kept::new(usize::MAX),
            providers: Kept::new(MAX_PROVIDERS),
        }),
    }))
}

fn unavailable(reason: impl std::fmt::Display) -> SandboxError {
    SandboxError::Unavailable {
        level: "container".into(),
        reason: reason.to_string(),
    }
}

/// The name of an image with the host of its registry; without one it is Docker's.
fn registry(name: &str) -> String {
    let first = name.split('/').next().unwrap_or_default();
    let host = name.contains('/') && (first.contains(['.', ':']) || first == "localhost");
    if host {
        format!("registry:{name}")
    } else {
        format!("registry:docker.io/{name}")
    }
}

impl Inner {
    /// An image that is built, or that has a name.
    fn image(&self, source: &ImageSource, within: Duration) -> Result<MachineImage, SandboxError> {
        let cache = Path::new(&self.section.image_cache);
        let limits = UnpackLimits::default();
        let made = match source {
            ImageSource::Build {
                context,
                dockerfile,
            } => {
                let builder = EngineBuilder::find(None).map_err(unavailable)?;
                let request = BuildRequest {
                    dockerfile: dockerfile.clone(),
                    timeout: within,
                    pull: true,
                    ..BuildRequest::new(context, cache)
                };
                let built = build(&request, &builder);
                built.map_err(unavailable)?.image
            }
            ImageSource::Named(name) => match import(name, None, cache, &limits, within) {
                Ok(image) => image,
                Err(BuildError::NoBase { .. } | BuildError::NoBuilder { .. }) => {
                    self.pulled(name)?
                }
                Err(e) => return Err(unavailable(e)),
            },
        };
        Ok(MachineImage {
            root: made.root,
            workdir: made.config.working_dir,
            env: made.config.env,
            user: made.config.user,
        })
    }

    /// An image of a registry.
    fn pulled(&self, name: &str) -> Result<Image, SandboxError> {
        let section = SandboxPlan {
            image: Some(registry(name)),
            ..self.section.clone()
        };
        let image = image::image(&section).map_err(unavailable)?;
        image.ok_or_else(|| unavailable(format!("no image {name}")))
    }

    /// Rules of the egress proxy for a network.
    fn rules(&self, network: &MachineNetwork) -> Option<EgressConfig> {
        match network {
            MachineNetwork::Loopback => None,
            MachineNetwork::Recipe => self.section.egress.clone(),
            MachineNetwork::Hosts(hosts) => {
                let schemes = [RuleScheme::Https, RuleScheme::Http];
                let both = |host: &String| {
                    schemes.map(|scheme| RuleConfig {
                        host: host.clone(),
                        scheme,
                        ..RuleConfig::default()
                    })
                };
                Some(EgressConfig {
                    intercept: false,
                    rules: hosts.iter().flat_map(both).collect(),
                    ..EgressConfig::default()
                })
            }
        }
    }

    /// Starts a provider.
    fn provider(&self, shared: &Shared) -> Result<Arc<dyn SandboxProvider>, SandboxError> {
        let cpus = (shared.cpus > 0).then(|| shared.cpus as f64 / 1000.0);
        let section = SandboxPlan {
            level: Level::Container,
            image: Some(shared.root.to_string_lossy().into_owned()),
            cpus: cpus.or(self.section.cpus),
            egress: self.rules(&shared.network),
            ..self.section.clone()
        };
        let proxy = egress::start(&section).map_err(unavailable)?;
        let mut shows = self.shows.clone();
        shows.extend(proxy.as_ref().map(EgressProxy::shows));
        let provider = container::unpooled(&section, shows).map_err(unavailable)?;
        Ok(egress::wrap(provider, proxy))
    }

    /// Limits, variables and layer of a machine.
    fn spec(&self, spec: &MachineSpec) -> SandboxSpec {
        let section = &self.section;
        let usual = (section.memory_mb << 20).max(MEMORY_BYTES);
        let bytes = spec.storage_bytes.unwrap_or(STORAGE_BYTES);
        let bytes = bytes.min(MAX_STORAGE_BYTES);
        let workdir = match &spec.workdir {
            Some(folder) => folder.clone(),
            None if spec.image.workdir.is_empty() => "/".into(),
            None => spec.image.workdir.clone(),
        };
        SandboxSpec {
            limits: Limits {
                cpu_s: spec.cpu_s,
                // The layer may be in memory.
                memory_bytes: spec.memory_bytes.unwrap_or(usual).saturating_add(bytes),
                processes: section.processes.max(PROCESSES),
                output_bytes: spec.output_bytes,
                work_bytes: bytes,
                open_files: section.open_files.max(OPEN_FILES),
            },
            env: [spec.image.env.clone(), spec.env.clone()].concat(),
            strict: section.strict,
            network: Network::Loopback,
            writable_root: Some(WritableRoot {
                bytes,
                user: match spec.image.user.as_str() {
                    "" => "root".into(),
                    user => user.into(),
                },
                workdir,
            }),
        }
    }
}

/// Runs blocking work that continues if the caller stops waiting.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SandboxError> + Send + 'static,
) -> Result<T, SandboxError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| SandboxError::Died(e.to_string()))?
}

impl Machines for ContainerMachines {
    fn image<'a>(
        &'a self,
        source: &'a ImageSource,
        within: Duration,
    ) -> SandboxFuture<'a, MachineImage> {
        let (inner, source) = (Arc::clone(&self.inner), source.clone());
        Box::pin(blocking(move || {
            inner.images.get(&source, || inner.image(&source, within))
        }))
    }

    fn start<'a>(&'a self, spec: &'a MachineSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move {
            let shared = Shared {
                root: spec.image.root.clone(),
                network: spec.network.clone(),
                cpus: (spec.cpus.unwrap_or_default() * 1000.0) as u64,
            };
            let inner = Arc::clone(&self.inner);
            let provider =
                blocking(move || inner.providers.get(&shared, || inner.provider(&shared)));
            let provider = provider.await?;
            provider.acquire(&self.inner.spec(spec)).await
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_images_have_the_host_of_their_registry() {
        for (name, full) in [
            ("debian:12", "registry:docker.io/debian:12"),
            ("org/app", "registry:docker.io/org/app"),
            ("ghcr.io/org/app:2", "registry:ghcr.io/org/app:2"),
            ("localhost:5000/app", "registry:localhost:5000/app"),
        ] {
            assert_eq!(registry(name), full);
        }
    }

    #[test]
    fn a_value_is_made_once_and_the_oldest_is_forgotten() {
        let kept = Kept::new(2);
        let get = |key: u8| kept.get(&key, || Ok(key));
        assert_eq!(get(1), Ok(1));
        assert_eq!(kept.get(&1, || Ok(9)), Ok(1));
        let failed = || Err(SandboxError::Died("x".into()));
        assert!(kept.get(&2, failed).is_err());
        assert_eq!((get(2), get(3)), (Ok(2), Ok(3)));
        assert_eq!(kept.get(&1, || Ok(9)), Ok(9));
    }
}
