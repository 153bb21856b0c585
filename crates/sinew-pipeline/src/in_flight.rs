//! The file of a run's folder with the episodes in flight: one line of JSON each, behind a line that names
//! the format.
//!
//! It is written as a whole, to another name first: a crash leaves the old file or the new one. It is written
//! at checkpoints and when the run is asked to stop. So a killed process loses the tokens that its episodes
//! have sampled since the last checkpoint.

use serde::{Deserialize, Serialize};
use sinew_orchestrator::PipelineError;
use sinew_rollout::SavedEpisode;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// Name in the run's folder.
pub const FILE: &str = "in-flight.jsonl";

/// A larger file is not written, nor read.
const MAX_BYTES: u64 = 256 << 20;

/// The first line.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Head {
    format: u32,
}

const HEAD: Head = Head { format: 1 };

/// The file of a run.
#[derive(Clone, Debug)]
pub(crate) struct InFlightFile(PathBuf);

/// Content of a file.
#[derive(Debug, Default)]
pub(crate) struct InFlightContent {
    pub(crate) episodes: Vec<SavedEpisode>,
    /// Reason why a part of the file could not be read, if that is the case.
    pub(crate) damage: Option<String>,
}

fn failed(path: &Path, e: &std::io::Error) -> PipelineError {
    PipelineError::system(format!(
        "{}: {e}\n  hint: the file keeps how far episodes in flight had come; without it they start again",
        path.display()
    ))
}

impl InFlightFile {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// Writes these episodes in place of those before; gives how many did not fit. Durable before it returns.
    pub(crate) fn write(&self, episodes: &[SavedEpisode]) -> Result<usize, PipelineError> {
        let path = &self.0;
        if episodes.is_empty() {
            return match std::fs::remove_file(path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(failed(path, &e)),
                _ => Ok(0),
            };
        }
        let other = path.with_extension("jsonl.new");
        let written = write(&other, episodes).and_then(|left_out| {
            std::fs::rename(&other, path)?;
            if let Some(folder) = path.parent() {
                File::open(folder)?.sync_all()?;
            }
            Ok(left_out)
        });
        written.map_err(|e| failed(path, &e))
    }

    /// Reads the episodes. A damaged file gives those that can be read.
    pub(crate) fn read(&self) -> Result<InFlightContent, PipelineError> {
        let file = match File::open(&self.0) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Ok(InFlightContent::default());
            }
            Err(e) => return Err(failed(&self.0, &e)),
        };
        let mut lines = BufReader::new(file.take(MAX_BYTES)).lines();
        let mut read = InFlightContent::default();
        // A line that is not text names no format either.
        let head = lines.next().and_then(Result::ok).unwrap_or_default();
        if !serde_json::from_str::<Head>(&head).is_ok_and(|head| head == HEAD) {
            read.damage = Some("its first line names no format that this version reads".into());
            return Ok(read);
        }
        for (n, line) in lines.enumerate() {
            let episode = line.map_err(|e| e.to_string());
            match episode.and_then(|l| serde_json::from_str(&l).map_err(|e| e.to_string())) {
                Ok(episode) => read.episodes.push(episode),
                Err(e) => {
                    read.damage = Some(format!("line {}: {e}", n + 2));
                    break;
                }
            }
        }
        Ok(read)
    }
}

fn write(path: &Path, episodes: &[SavedEpisode]) -> std::io::Result<usize> {
    let mut out = BufWriter::new(File::create(path)?);
    let (mut bytes, mut left_out) = (0, 0);
    let head = serde_json::to_vec(&HEAD)?;
    out.write_all(&head)?;
    out.write_all(b"\n")?;
    for episode in episodes {
        let line = serde_json::to_vec(episode)?;
        bytes += line.len() as u64 + 1;
        // Room for the first line, with plenty to spare.
        if bytes + 1024 > MAX_BYTES {
            left_out += 1;
            continue;
        }
        out.write_all(&line)?;
        out.write_all(b"\n")?;
    }
    out.flush()?;
    out.get_ref().sync_all()?;
    Ok(left_out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_env::tiny::TinyTaskset;
    use sinew_env::{Split, Taskset};
    use sinew_rollout::{EpisodeSpec, RunInfo};
    use sinew_types::{EpisodeId, GroupId, PolicyVersion, SampledToken, SamplingParams};

    fn episode(id: &str) -> SavedEpisode {
        let spec = EpisodeSpec {
            episode: EpisodeId::new(id),
            group: GroupId::new("d00000001"),
            task: TinyTaskset::new(0).get(Split::Train, 0).unwrap(),
            draw: 1,
            purpose: "train".into(),
            seed: 5,
        };
        SavedEpisode {
            trace: spec.empty_trace(&RunInfo::default(), &SamplingParams::default()),
            turn: vec![SampledToken {
                id: 3,
                logprob: -0.123_456_79,
                version: PolicyVersion(7),
                top: Vec::new(),
                choice: None,
            }],
            finish: None,
        }
    }

    #[test]
    fn what_is_written_is_read_and_nothing_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = InFlightFile::new(dir.path().join(FILE));
        assert!(file.read().unwrap().episodes.is_empty());
        let episodes = [episode("d00000001-e0"), episode("d00000001-e1")];
        assert_eq!(file.write(&episodes).unwrap(), 0);
        let read = file.read().unwrap();
        assert_eq!(
            (read.episodes.as_slice(), read.damage),
            (&episodes[..], None)
        );
        file.write(&[]).unwrap();
        file.write(&[]).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_damaged_file_gives_what_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let file = InFlightFile::new(path.clone());
        file.write(&[episode("a"), episode("b")]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        let read = file.read().unwrap();
        assert_eq!(read.episodes.len(), 1);
        assert!(read.damage.unwrap().starts_with("line 3:"));
        std::fs::write(&path, b"{\"format\":2}\n").unwrap();
        assert!(file.read().unwrap().damage.unwrap().contains("format"));
        std::fs::write(&path, b"\xff\xfe\n").unwrap();
        assert!(file.read().unwrap().damage.unwrap().contains("first line"));
    }
}
