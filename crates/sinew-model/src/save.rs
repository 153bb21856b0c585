//! Writes a model as a directory that `transformers`, outside engines and this crate load.

use crate::error::LoadError;
use crate::params::Params;
use safetensors::tensor::{Dtype, View};
use sinew_types::{TensorInfo, TensorSource};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Number type of saved weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveDtype {
    /// Exact.
    F32,
    /// Half the size; values are rounded to nearest, 8 bits of precision.
    Bf16,
}

impl SaveDtype {
    fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }
}

/// A tensor on its way into a file. It is read and converted when it is written, one at a time, so that
/// saving needs memory for only one tensor.
struct FileTensor<'a> {
    source: &'a dyn TensorSource,
    name: &'a str,
    info: TensorInfo<'a>,
    dtype: SaveDtype,
}

impl View for FileTensor<'_> {
    fn dtype(&self) -> Dtype {
        match self.dtype {
            SaveDtype::F32 => Dtype::F32,
            SaveDtype::Bf16 => Dtype::BF16,
        }
    }

    fn shape(&self) -> &[usize] {
        self.info.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let Some(view) = self.source.tensor(self.name) else {
            return Cow::Borrowed(&[]);
        };
        match (self.dtype, view.dtype()) {
            (SaveDtype::F32, sinew_types::Dtype::F32)
            | (SaveDtype::Bf16, sinew_types::Dtype::Bf16) => view.into_bytes(),
            (SaveDtype::F32, _) => {
                let values = view.into_f32();
                values.iter().flat_map(|v| v.to_le_bytes()).collect()
            }
            (SaveDtype::Bf16, _) => {
                let values = view.into_f32();
                let rounded = values.iter().map(|v| half::bf16::from_f32(*v));
                rounded.flat_map(half::bf16::to_le_bytes).collect()
            }
        }
    }

    fn data_len(&self) -> usize {
        self.info.elements() * if self.dtype == SaveDtype::F32 { 4 } else { 2 }
    }
}

/// Writes `config.json`, `model.safetensors` and `extra` (name, bytes: tokenizer files and such)
/// into `dir`, which must not exist or be empty.
///
/// The directory appears complete or not at all: everything is written and synced in a hidden
/// directory next to it first, and renamed at the end.
///
/// # Errors
/// If `dir` has content, the disk is full, or an extra file has the name of another one.
pub fn save_pretrained(
    dir: &Path,
    params: &Params,
    dtype: SaveDtype,
    extra: &[(String, Vec<u8>)],
) -> Result<(), LoadError> {
    let config = params
        .config()
        .to_json(dtype.name())
        .map_err(LoadError::config(dir))?;
    write_dir(dir, |staging| {
        write_tensors(&staging.join("model.safetensors"), params, dtype)?;
        write_file(&staging.join("config.json"), config.as_bytes())?;
        extra
            .iter()
            .try_for_each(|(name, bytes)| write_file(&staging.join(plain(dir, name)?), bytes))
    })
}

/// Writes every tensor of `source` into one safetensors file and syncs it. Not atomic: for a
/// directory that is renamed as a whole, see [`write_dir`].
pub(crate) fn write_tensors(
    path: &Path,
    source: &dyn TensorSource,
    dtype: SaveDtype,
) -> Result<(), LoadError> {
    let failed = |reason: String| LoadError::Save {
        path: path.to_owned(),
        reason,
    };
    let names = source.names();
    let tensors: Vec<_> = names
        .iter()
        .filter_map(|name| {
            let stored = FileTensor {
                source,
                name,
                info: source.info(name)?,
                dtype,
            };
            Some((name, stored))
        })
        .collect();
    // `transformers` refuses files without this mark.
    let info = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(tensors, Some(info), path).map_err(|e| failed(e.to_string()))?;
    // The library makes files that only their owner can read; engines often run as another user.
    fs::set_permissions(path, fs::Permissions::from_mode(0o644))
        .and_then(|()| File::open(path))
        .and_then(|file| file.sync_all())
        .map_err(|e| failed(e.to_string()))
}

/// Runs `fill` on an empty directory next to `dir` and renames it to `dir` when that succeeds. An error
/// removes it.
pub(crate) fn write_dir(
    dir: &Path,
    fill: impl FnOnce(&Path) -> Result<(), LoadError>,
) -> Result<(), LoadError> {
    let failed = LoadError::io(dir);
    if dir.exists() && fs::read_dir(dir).map_err(failed)?.next().is_some() {
        let reason = "the directory exists and is not empty: choose another or remove it";
        return Err(LoadError::Save {
            path: dir.to_owned(),
            reason: reason.to_owned(),
        });
    }
    let parent = match dir.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    fs::create_dir_all(&parent).map_err(failed)?;
    let staging = tempfile::Builder::new()
        .prefix(".saving-")
        .tempdir_in(&parent)
        .map_err(failed)?;
    fill(staging.path())?;
    let sync = |path: &Path| {
        File::open(path)
            .and_then(|file| file.sync_all())
            .map_err(failed)
    };
    sync(staging.path())?;
    set_readable(staging.path()).map_err(failed)?;
    fs::rename(staging.path(), dir).map_err(failed)?;
    // The name is gone from its old place, so that nothing is left to clean up.
    let _ = staging.keep();
    sync(&parent)
}

/// Makes a saved model as readable as any other directory: temporary directories are private.
fn set_readable(dir: &Path) -> std::io::Result<()> {
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755))
}

/// Writes and syncs a file.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), LoadError> {
    let failed = LoadError::io(path);
    let mut file = File::create(path).map_err(failed)?;
    file.write_all(bytes)
        .and_then(|()| file.sync_all())
        .map_err(failed)
}

/// Checks that `name` is the name of a file that is not written already, and not a path.
fn plain<'a>(dir: &Path, name: &'a str) -> Result<&'a str, LoadError> {
    let taken = name == "config.json" || name == "model.safetensors";
    if name.is_empty() || name.starts_with('.') || name.contains('/') || taken {
        let reason = format!("`{name}` cannot be the name of an extra file");
        return Err(LoadError::Save {
            path: dir.to_owned(),
            reason,
        });
    }
    Ok(name)
}
