//! Builders that the host has: Podman, Buildah, Docker.

use super::command::BuilderKind;
use super::run::{Ran, run};
use super::{BuildError, BuildRequest, ImageBuilder, io_error};
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

/// Maximum time of a question to a builder.
const ASK: Duration = Duration::from_secs(60);
/// Last bytes of output that are kept of everything but builds.
const LOG: usize = 16 << 10;

/// A builder that works on this host. Its settings are those of its own files and variables, such as
/// `CONTAINERS_CONF` and `DOCKER_HOST`.
#[derive(Clone, Copy, Debug)]
pub struct EngineBuilder {
    kind: BuilderKind,
}

impl EngineBuilder {
    /// The builder of this kind, or else the first that works.
    ///
    /// # Errors
    /// [`BuildError::NoBuilder`] with the reason of each that was tried.
    pub fn find(choice: Option<BuilderKind>) -> Result<Self, BuildError> {
        let mut tried = Vec::new();
        for kind in choice.map_or(BuilderKind::ALL.to_vec(), |kind| vec![kind]) {
            let why = match run(kind.name(), &kind.probe(), ASK, LOG) {
                Ok(ran) if ran.is_ok() => return Ok(Self { kind }),
                Ok(ran) => format!("{}: {}", ran.end, ran.log.trim()),
                Err(e) => e.to_string(),
            };
            tried.push(format!("{}: {why}", kind.name()));
        }
        Err(BuildError::NoBuilder {
            tried: tried.join("; "),
        })
    }

    /// Kind of the builder.
    pub fn kind(&self) -> BuilderKind {
        self.kind
    }

    /// Runs the builder's program.
    fn run(&self, args: &[OsString], timeout: Duration, log: usize) -> Result<Ran, BuildError> {
        let name = self.kind.name();
        run(name, args, timeout, log).map_err(|e| io_error(format!("start {name}"), e))
    }

    /// The output of a program that must have succeeded.
    fn done(&self, operation: &'static str, ran: Ran) -> Result<String, BuildError> {
        if ran.is_ok() {
            return Ok(ran.log);
        }
        Err(BuildError::Failed {
            builder: self.kind.name().into(),
            operation,
            reason: ran.end.to_string(),
            log: ran.log,
        })
    }
}

impl ImageBuilder for EngineBuilder {
    fn name(&self) -> &'static str {
        self.kind.name()
    }

    fn id(&self, image: &str) -> Result<Option<String>, BuildError> {
        super::command::check_name("base image", image)?;
        let ran = self.run(&self.kind.id(image), ASK, LOG)?;
        let id = ran.stdout.trim().to_owned();
        Ok((ran.is_ok() && !id.is_empty()).then_some(id))
    }

    fn build(&self, request: &BuildRequest, tag: &str) -> Result<String, BuildError> {
        let args = self.kind.build(request, tag)?;
        let ran = self.run(&args, request.timeout, request.log_bytes)?;
        self.done("build", ran)
    }

    fn save(&self, image: &str, file: &Path, timeout: Duration) -> Result<(), BuildError> {
        let ran = self.run(&self.kind.save(image, file), timeout, LOG)?;
        self.done("save", ran).map(drop)
    }
}
