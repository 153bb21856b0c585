//! A builder without programs, for tests of what stands above builders.

use super::{BuildError, BuildRequest, ImageBuilder, io_error};
use crate::documents::{self, hex};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// An image of the builder: its root as a tar file, and its settings.
#[derive(Clone, Debug)]
struct Kept {
    tar: Vec<u8>,
    config: Value,
}

/// Understands `FROM scratch` or an image of its own, `COPY` of files and folders of the context,
/// `ENV NAME=VALUE`, `WORKDIR` and `USER`, one on a line; everything else is refused. It keeps images in
/// memory and runs nothing.
#[derive(Debug, Default)]
pub struct PlainBuilder {
    images: Mutex<BTreeMap<String, Kept>>,
}

/// The refusal of an instruction.
fn refused(line: &str, reason: impl Into<String>) -> BuildError {
    BuildError::Failed {
        builder: "plain".into(),
        operation: "build",
        reason: reason.into(),
        log: line.into(),
    }
}

impl Kept {
    /// Configuration as the image has it.
    fn configuration(&self) -> Vec<u8> {
        let (os, architecture) = documents::machine();
        let content = format!("sha256:{}", hex(&Sha256::digest(&self.tar)));
        let all = json!({
            "architecture": architecture, "os": os, "config": self.config,
            "rootfs": { "type": "layers", "diff_ids": [content] },
        });
        all.to_string().into_bytes()
    }

    fn id(&self) -> String {
        hex(&Sha256::digest(self.configuration()))
    }
}

/// A root and settings that grow by one instruction after the other.
struct Stage {
    builder: tar::Builder<Vec<u8>>,
    env: Vec<String>,
    config: Value,
}

impl Stage {
    fn new(base: Option<&Kept>) -> Result<Self, BuildError> {
        let mut builder = tar::Builder::new(Vec::new());
        let config = base.map_or(json!({}), |base| base.config.clone());
        if let Some(base) = base {
            let failed = |e: std::io::Error| io_error("copy a base image", e);
            let mut archive = tar::Archive::new(base.tar.as_slice());
            for entry in archive.entries().map_err(failed)? {
                let entry = entry.map_err(failed)?;
                let mut header = entry.header().clone();
                let path = entry.path().map_err(failed)?.into_owned();
                let appended = builder.append_data(&mut header, path, entry);
                appended.map_err(failed)?;
            }
        }
        let env = config["Env"].as_array().into_iter().flatten();
        let env = env.filter_map(Value::as_str).map(String::from).collect();
        Ok(Self {
            builder,
            env,
            config,
        })
    }

    /// Adds what an instruction says.
    fn add(&mut self, context: &Path, line: &str) -> Result<(), BuildError> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["COPY", from, to] => {
                let to = to.trim_start_matches('/');
                let copied = self.copy(&context.join(from), Path::new(to));
                copied.map_err(|e| refused(line, e.to_string()))
            }
            ["ENV", pair] if pair.contains('=') => {
                self.env.push((*pair).into());
                self.config["Env"] = json!(self.env);
                Ok(())
            }
            ["WORKDIR", folder] => {
                self.config["WorkingDir"] = json!(folder);
                Ok(())
            }
            ["USER", user] => {
                self.config["User"] = json!(user);
                Ok(())
            }
            _ => Err(refused(line, "does not understand this line")),
        }
    }

    /// Copies a file, a link or a folder, in the order of names.
    fn copy(&mut self, from: &Path, to: &Path) -> std::io::Result<()> {
        let meta = from.symlink_metadata()?;
        let mut header = tar::Header::new_gnu();
        header.set_metadata(&meta);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        if meta.is_symlink() {
            return self
                .builder
                .append_link(&mut header, to, fs::read_link(from)?);
        }
        if !meta.is_dir() {
            return self.builder.append_data(&mut header, to, File::open(from)?);
        }
        if !to.as_os_str().is_empty() {
            self.builder
                .append_data(&mut header, to, std::io::empty())?;
        }
        let names = fs::read_dir(from)?.map(|e| e.map(|e| e.file_name()));
        let mut names = names.collect::<std::io::Result<Vec<_>>>()?;
        names.sort();
        for name in names {
            self.copy(&from.join(&name), &to.join(&name))?;
        }
        Ok(())
    }
}

impl PlainBuilder {
    fn kept(&self, image: &str) -> Option<Kept> {
        let images = self.images.lock().unwrap_or_else(PoisonError::into_inner);
        images.get(image).cloned()
    }
}

impl ImageBuilder for PlainBuilder {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn id(&self, image: &str) -> Result<Option<String>, BuildError> {
        Ok(self.kept(image).map(|kept| kept.id()))
    }

    fn build(&self, request: &BuildRequest, tag: &str) -> Result<String, BuildError> {
        let path = request.context.join(&request.dockerfile);
        let text = fs::read_to_string(path).map_err(|e| io_error("read a Dockerfile", e))?;
        let lines = text.lines().map(str::trim);
        let lines: Vec<&str> = lines
            .filter(|l| !l.is_empty() && !l.starts_with('#'))
            .collect();
        let Some((first, rest)) = lines.split_first() else {
            return Err(refused("", "the Dockerfile is empty"));
        };
        let base = match first.split_whitespace().collect::<Vec<_>>().as_slice() {
            ["FROM", "scratch"] => None,
            ["FROM", image] => Some(
                self.kept(image)
                    .ok_or_else(|| refused(first, "no such image"))?,
            ),
            _ => return Err(refused(first, "does not begin with FROM IMAGE")),
        };
        let mut stage = Stage::new(base.as_ref())?;
        for line in rest {
            stage.add(&request.context, line)?;
        }
        let tar = stage.builder.into_inner();
        let kept = Kept {
            tar: tar.map_err(|e| io_error("pack a root", e))?,
            config: stage.config,
        };
        let mut images = self.images.lock().unwrap_or_else(PoisonError::into_inner);
        images.insert(tag.into(), kept);
        Ok(format!("{} instructions\n", lines.len()))
    }

    fn save(&self, image: &str, file: &Path, _: Duration) -> Result<(), BuildError> {
        let kept = self.kept(image).ok_or_else(|| BuildError::NoBase {
            builder: self.name().into(),
            image: image.into(),
        })?;
        let failed = |e: std::io::Error| io_error("save an image", e);
        let manifest = json!([{
            "Config": "config.json", "RepoTags": [image], "Layers": ["layer.tar"],
        }]);
        let manifest = manifest.to_string().into_bytes();
        let mut builder = tar::Builder::new(File::create_new(file).map_err(failed)?);
        for (name, content) in [
            ("manifest.json", manifest),
            ("config.json", kept.configuration()),
            ("layer.tar", kept.tar),
        ] {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o644);
            header.set_size(content.len() as u64);
            let appended = builder.append_data(&mut header, name, content.as_slice());
            appended.map_err(failed)?;
        }
        builder.into_inner().map(drop).map_err(failed)
    }
}
