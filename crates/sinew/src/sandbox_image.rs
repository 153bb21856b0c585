//! `sinew sandbox image`: images for sandboxes, built from folders with a Dockerfile.

use crate::output;
use clap::{Args, Subcommand};
use serde_json::json;
use sinew_assembly::Failure;
use sinew_image::build::{
    self, BuildError, BuildNetwork, BuildRequest, BuilderKind, EngineBuilder,
};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Cache of images that recipes name by default.
const CACHE: &str = ".cache/images";
/// Longest build.
const MAX_TIMEOUT_S: u64 = 86_400;

/// The cache, and the form of the output.
#[derive(Clone, Debug, Args)]
pub(crate) struct CacheArgs {
    /// Folder of unpacked images, as sandbox.image_cache
    #[arg(long, value_name = "FOLDER", default_value = CACHE)]
    cache: PathBuf,
    /// One JSON object an image
    #[arg(long)]
    json: bool,
}

/// Sub-commands of `sinew sandbox image`.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Build an image with podman, buildah or docker, once until the folder or a base image changes
    #[command(
        after_help = "Example: sinew sandbox image build environment --tag mine\n         \
                      sinew sandbox run --level crun --image built:mine --writable-root 512 --shell id"
    )]
    Build {
        /// Folder with the Dockerfile
        folder: PathBuf,
        /// Name of the image: built:NAME in sandbox.image and --image
        #[arg(long, value_name = "NAME")]
        tag: Option<String>,
        /// Dockerfile, below the folder
        #[arg(long, value_name = "PATH", default_value = "Dockerfile")]
        file: String,
        /// Value of an ARG of the Dockerfile; may be given several times
        #[arg(long, value_name = "NAME=VALUE")]
        arg: Vec<String>,
        /// podman, buildah or docker; left out: the first that works
        #[arg(long, value_parser = ["podman", "buildah", "docker"])]
        builder: Option<String>,
        /// Let the builder fetch base images that it does not have
        #[arg(long)]
        pull: bool,
        /// Give the commands of the Dockerfile no network
        #[arg(long)]
        no_network: bool,
        /// Time limit in seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 600)]
        timeout: u64,
        #[command(flatten)]
        at: CacheArgs,
    },
    /// List the images that were built, the newest first
    List {
        #[command(flatten)]
        at: CacheArgs,
    },
    /// Remove an image that was built and that no sandbox uses
    Remove {
        /// Its name, or at least 8 characters of its key
        name: String,
        #[command(flatten)]
        at: CacheArgs,
    },
}

/// `sinew sandbox image ...`.
///
/// # Errors
/// Wrong input, a missing builder or base image, a build that fails.
pub(crate) fn run(command: &ImageCommand) -> Result<(), Failure> {
    match command {
        ImageCommand::List { at } => list(at),
        ImageCommand::Remove { name, at } => {
            if build::remove(&at.cache, name).map_err(|e| failed(&e))? {
                return Ok(());
            }
            Err(Failure::input(format!(
                "{name:?}: {} has no such build\n  hint: sinew sandbox image list",
                at.cache.display()
            )))
        }
        ImageCommand::Build {
            folder,
            tag,
            file,
            arg,
            builder,
            pull,
            no_network,
            timeout,
            at,
        } => {
            if !(1..=MAX_TIMEOUT_S).contains(timeout) {
                return Err(Failure::input(format!(
                    "--timeout {timeout}: allowed: 1 to {MAX_TIMEOUT_S}"
                )));
            }
            let request = BuildRequest {
                dockerfile: file.clone(),
                tag: tag.clone(),
                args: arguments(arg)?,
                network: if *no_network {
                    BuildNetwork::None
                } else {
                    BuildNetwork::Host
                },
                timeout: Duration::from_secs(*timeout),
                pull: *pull,
                ..BuildRequest::new(folder, &at.cache)
            };
            let kind = builder.as_deref().map(str::parse::<BuilderKind>);
            make(&request, kind.transpose().map_err(|e| failed(&e))?, at.json)
        }
    }
}

/// Values of `--arg`.
fn arguments(given: &[String]) -> Result<Vec<(String, String)>, Failure> {
    let pair = |text: &String| {
        let (name, value) = text
            .split_once('=')
            .ok_or_else(|| Failure::input(format!("--arg {text:?}: allowed: NAME=VALUE")))?;
        Ok((name.to_owned(), value.to_owned()))
    };
    given.iter().map(pair).collect()
}

/// Builds, and prints where the image is.
fn make(request: &BuildRequest, kind: Option<BuilderKind>, as_json: bool) -> Result<(), Failure> {
    let engine = EngineBuilder::find(kind).map_err(|e| failed(&e))?;
    let built = build::build(request, &engine).map_err(|e| failed(&e))?;
    let (image, key) = (&built.image, &built.key);
    if as_json {
        output::print_json(&json!({
            "key": key, "tag": built.tag, "image_id": image.id, "root": image.root,
            "bytes": image.bytes, "fresh": built.fresh, "config": image.config, "log": built.log,
        }));
        return Ok(());
    }
    let name = built.tag.as_deref().unwrap_or(&key[..16]);
    let how = if built.fresh { "built" } else { "known" };
    let mib = image.bytes.div_ceil(1 << 20);
    output::print(&format!(
        "built:{name}  {how}  {mib} MiB  {}\n",
        image.root.display()
    ));
    Ok(())
}

/// Prints the builds of a cache.
fn list(at: &CacheArgs) -> Result<(), Failure> {
    for record in build::list(Path::new(&at.cache)).map_err(|e| failed(&e))? {
        if at.json {
            output::print_json(&json!(record));
            continue;
        }
        let name = record.tag.as_deref().unwrap_or(&record.key[..16]);
        let mib = record.bytes.div_ceil(1 << 20);
        let (builder, context) = (&record.builder, &record.context);
        output::print(&format!("built:{name}  {mib} MiB  {builder}  {context}\n"));
    }
    Ok(())
}

/// The failure of a build, by the cause of the mistake.
fn failed(e: &BuildError) -> Failure {
    match e {
        BuildError::Request { .. } => Failure::input(e.to_string()),
        BuildError::NoBuilder { .. } | BuildError::NoBase { .. } => Failure::outside(e.to_string()),
        _ => Failure::system(e.to_string()),
    }
}
