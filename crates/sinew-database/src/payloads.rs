//! The bytes of traces outside the database: in a bucket of S3, or in a folder of a shared file system.
//!
//! An object is written once, under a name made from its contents. Writing it again finds it there.

use crate::address::redacted;
use crate::runtime::{outside, random_name};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path as Key;
use object_store::{
    ClientOptions, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
    RetryConfig,
};
use sinew_store::{StoreError, private_dir, private_file};
use sinew_types::holds_password;
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

/// Objects that are written or deleted at a time.
const AT_ONCE: usize = 16;
/// Objects of one listing.
const LISTED: usize = 1_000;
/// Time for one request, and for all attempts at it.
const REQUEST: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(120));
/// Maximum attempts at a request.
const ATTEMPTS: usize = 20;
/// Time for a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// An object to write: its name, and its bytes.
pub(crate) type Object = (String, Bytes);

/// An object that is there.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredObject {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Time at which it was written, in seconds since 1970.
    pub(crate) written_unix_s: f64,
}

/// A place of objects.
pub struct Payloads {
    shown: String,
    place: Place,
}

impl fmt::Debug for Payloads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The client of a bucket has keys.
        f.debug_tuple("Payloads").field(&self.shown).finish()
    }
}

enum Place {
    Folder {
        root: PathBuf,
        /// Random beginning of the names of temporary files, and the number of the next.
        part: String,
        next: AtomicU64,
    },
    Bucket {
        store: Arc<dyn ObjectStore>,
        prefix: String,
    },
}

impl Payloads {
    /// Opens `s3://BUCKET/PREFIX` or `file:///FOLDER`. S3 takes keys, region and endpoint from the usual
    /// variables `AWS_*` of the environment. Nothing is connected or created.
    ///
    /// # Errors
    /// If the address is neither, or a part of the environment is not valid.
    pub fn open(url: &str) -> Result<Self, StoreError> {
        let place = if let Some(folder) = url.strip_prefix("file://") {
            if !folder.starts_with('/') {
                return Err(refused(
                    url,
                    "a folder has an absolute path: file:///FOLDER",
                ));
            }
            Place::Folder {
                root: PathBuf::from(folder),
                part: random_name()?,
                next: AtomicU64::new(0),
            }
        } else if let Some(rest) = url.strip_prefix("s3://") {
            if holds_password(url) {
                return Err(refused(
                    url,
                    "keys of S3 are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
                ));
            }
            let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
            Place::Bucket {
                store: Arc::new(bucket_of(bucket).map_err(|e| refused(url, &e))?),
                prefix: prefix.trim_matches('/').to_owned(),
            }
        } else {
            return Err(refused(
                url,
                "allowed: s3://BUCKET/PREFIX or file:///FOLDER",
            ));
        };
        Ok(Self {
            shown: redacted(url),
            place,
        })
    }

    /// Writes objects, those that are missing. They are durable when the call returns.
    pub(crate) fn put(&self, objects: &[Object]) -> Result<(), StoreError> {
        match &self.place {
            Place::Folder { root, part, next } => objects.iter().try_for_each(|(name, bytes)| {
                let number = next.fetch_add(1, Ordering::Relaxed);
                write(root, name, &format!("part-{part}-{number}"), bytes)
            }),
            Place::Bucket { store, prefix } => self.bucket(async || {
                let puts = objects.iter().map(|(name, bytes)| async move {
                    let payload = PutPayload::from(bytes.clone());
                    let create = PutOptions::from(PutMode::Create);
                    match store.put_opts(&key(prefix, name), payload, create).await {
                        Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => Ok(()),
                        Err(error) => Err(error),
                    }
                });
                let puts = stream::iter(puts).buffer_unordered(AT_ONCE);
                puts.try_collect::<Vec<()>>().await.map(drop)
            }),
        }
    }

    /// Reads an object; `None` if it does not exist.
    pub(crate) fn get(&self, name: &str) -> Result<Option<Bytes>, StoreError> {
        match &self.place {
            Place::Folder { root, .. } => {
                let path = root.join(name);
                match std::fs::read(&path) {
                    Ok(bytes) => Ok(Some(bytes.into())),
                    Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
                    Err(source) => Err(StoreError::Io { path, source }),
                }
            }
            Place::Bucket { store, prefix } => self.bucket(async || {
                let found = match store.get(&key(prefix, name)).await {
                    Ok(found) => found,
                    Err(object_store::Error::NotFound { .. }) => return Ok(None),
                    Err(error) => return Err(error),
                };
                found.bytes().await.map(Some)
            }),
        }
    }

    /// Objects of a folder in the order of their names, those after `after`; empty at the end.
    pub(crate) fn list(&self, folder: &str, after: &str) -> Result<Vec<StoredObject>, StoreError> {
        match &self.place {
            Place::Folder { root, .. } => {
                let mut found = Vec::new();
                let walked = walk(root, folder, after, &mut found);
                walked.map_err(|source| StoreError::Io {
                    path: root.join(folder),
                    source,
                })?;
                Ok(found)
            }
            Place::Bucket { store, prefix } => self.bucket(async || {
                let folder = key(prefix, folder);
                let found = if after.is_empty() {
                    store.list(Some(&folder))
                } else {
                    store.list_with_offset(Some(&folder), &key(prefix, after))
                };
                let object = |meta: ObjectMeta| StoredObject {
                    name: name_of(prefix, &meta.location),
                    bytes: meta.size,
                    written_unix_s: meta.last_modified.timestamp_millis() as f64 / 1e3,
                };
                let found = found.take(LISTED).map_ok(object);
                found.try_collect::<Vec<StoredObject>>().await
            }),
        }
    }

    /// Deletes objects. Missing ones are no error.
    pub(crate) fn delete(&self, names: &[String]) -> Result<(), StoreError> {
        match &self.place {
            Place::Folder { root, .. } => names.iter().try_for_each(|name| {
                let path = root.join(name);
                match std::fs::remove_file(&path) {
                    Err(source) if source.kind() != ErrorKind::NotFound => {
                        Err(StoreError::Io { path, source })
                    }
                    _ => Ok(()),
                }
            }),
            Place::Bucket { store, prefix } => self.bucket(async || {
                let deletes = names.iter().map(|name| async move {
                    match store.delete(&key(prefix, name)).await {
                        Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                        Err(error) => Err(error),
                    }
                });
                let deletes = stream::iter(deletes).buffer_unordered(AT_ONCE);
                deletes.try_collect::<Vec<()>>().await.map(drop)
            }),
        }
    }

    /// Runs requests to a bucket, and turns their errors into those of a store.
    fn bucket<T: Send>(
        &self,
        work: impl AsyncFn() -> object_store::Result<T> + Sync,
    ) -> Result<T, StoreError> {
        let done = outside(|runtime| runtime.block_on(work()))?;
        done.map_err(|error| refused(&self.shown, &sinew_http::cause(&error)))
    }
}

fn refused(url: &str, reason: &str) -> StoreError {
    StoreError::Server {
        server: redacted(url),
        reason: reason.to_owned(),
    }
}

fn key(prefix: &str, name: &str) -> Key {
    Key::from(format!("{prefix}/{name}"))
}

/// Inverse of [`key`].
fn name_of(prefix: &str, key: &Key) -> String {
    let prefix = Key::from(prefix);
    let (prefix, key): (&str, &str) = (prefix.as_ref(), key.as_ref());
    let name = key.strip_prefix(prefix).unwrap_or(key);
    name.trim_start_matches('/').to_owned()
}

/// A client of a bucket, by the environment.
fn bucket_of(bucket: &str) -> Result<AmazonS3, String> {
    // The client's library asks the process for its cryptography; another part may have set the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let plain = std::env::var("AWS_ALLOW_HTTP").is_ok_and(|v| v == "true");
    let client = ClientOptions::new()
        .with_timeout(REQUEST.0)
        .with_connect_timeout(CONNECT)
        .with_allow_http(plain);
    AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_client_options(client)
        .with_retry(RetryConfig {
            max_retries: ATTEMPTS,
            retry_timeout: REQUEST.1,
            ..RetryConfig::default()
        })
        .build()
        .map_err(|e| sinew_http::cause(&e))
}

/// Writes a file whole and durably, unless it is there. Until it is whole it has the name `part`.
fn write(root: &Path, name: &str, part: &str, bytes: &[u8]) -> Result<(), StoreError> {
    let path = root.join(name);
    if path.exists() {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(root);
    let part = folder.join(part);
    let written = (|| {
        if !folder.is_dir() {
            private_dir(folder)?;
            let above = folder.ancestors().skip(1);
            let mut above = above.take_while(|above| above.starts_with(root));
            above.try_for_each(|above| File::open(above)?.sync_all())?;
        }
        let mut file = private_file()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&part)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&part, &path)?;
        File::open(folder)?.sync_all()
    })();
    written.map_err(|source| StoreError::Io { path, source })
}

/// Adds the files below a folder in the order of their names: those after `after`, until [`LISTED`] are
/// found.
fn walk(
    root: &Path,
    folder: &str,
    after: &str,
    found: &mut Vec<StoredObject>,
) -> std::io::Result<()> {
    let gone = |e: &std::io::Error| e.kind() == ErrorKind::NotFound;
    let entries = match std::fs::read_dir(root.join(folder)) {
        Err(e) if gone(&e) => return Ok(()),
        entries => entries?,
    };
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names: Vec<String> = names.collect::<std::io::Result<_>>()?;
    names.sort();
    for name in names {
        if found.len() >= LISTED {
            return Ok(());
        }
        let name = format!("{folder}/{name}");
        // A folder on the way to `after` has names after it.
        if name.as_str() <= after && !after.starts_with(&name) {
            continue;
        }
        let meta = match std::fs::symlink_metadata(root.join(&name)) {
            Err(e) if gone(&e) => continue,
            meta => meta?,
        };
        if meta.is_dir() {
            walk(root, &name, after, found)?;
        } else if name.as_str() > after {
            let written = meta.modified()?.duration_since(UNIX_EPOCH);
            found.push(StoredObject {
                name,
                bytes: meta.len(),
                written_unix_s: written.map_or(0.0, |since| since.as_secs_f64()),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_holds_each_object_once() {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("file://{}", folder.path().join("objects").display());
        let payloads = Payloads::open(&url).unwrap();
        let objects: Vec<Object> = (0..40)
            .map(|n| (format!("a/{}/{n}", n % 3), Bytes::from(vec![n as u8; 9])))
            .collect();
        payloads.put(&objects).unwrap();
        payloads.put(&objects[..9]).unwrap();
        assert_eq!(payloads.get("a/1/7").unwrap().unwrap(), vec![7; 9]);
        assert_eq!(payloads.get("a/1/8").unwrap(), None);
        payloads.delete(&["a/1/7".into(), "a/1/7".into()]).unwrap();
        assert_eq!(payloads.get("a/1/7").unwrap(), None);
    }

    #[test]
    fn a_listing_goes_on_after_any_name_and_sees_every_object_once() {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("file://{}", folder.path().display());
        let payloads = Payloads::open(&url).unwrap();
        assert_eq!(payloads.list("s", "").unwrap(), []);
        let mut names = Vec::new();
        for epoch in [0, 1, 10, 2] {
            names.extend((0..400).map(|n| format!("s/{epoch}/{:02}/{n:03}", n % 7)));
        }
        for name in names.iter().map(String::as_str).chain(["other/0/00/x"]) {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "abc").unwrap();
        }
        let (mut seen, mut after) = (Vec::new(), String::new());
        loop {
            let page = payloads.list("s", &after).unwrap();
            let Some(last) = page.last() else { break };
            after = last.name.clone();
            assert!(page.iter().all(|o| o.bytes == 3 && o.written_unix_s > 1e9));
            seen.extend(page.into_iter().map(|o| o.name));
        }
        names.sort();
        assert_eq!(seen, names);
    }

    #[test]
    fn keys_of_a_bucket_have_names_without_its_prefix() {
        for prefix in ["", "runs/a", "odd {names}/100%"] {
            assert_eq!(name_of(prefix, &key(prefix, "s/0/ab/x")), "s/0/ab/x");
        }
        let refused = Payloads::open("s3://key:s3cret@bucket/p").unwrap_err();
        let refused = refused.to_string();
        assert!(
            refused.contains("AWS_SECRET_ACCESS_KEY") && !refused.contains("s3cret"),
            "{refused}"
        );
    }

    #[test]
    fn other_places_are_refused() {
        for url in ["gs://b/p", "file://relative", "/folder", "s3:/b"] {
            let refused = Payloads::open(url).unwrap_err().to_string();
            assert!(
                refused.contains(url) && refused.contains("file:///"),
                "{refused}"
            );
        }
    }
}
