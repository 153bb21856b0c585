//! The bytes of traces outside the database: in a bucket of S3, or in a folder of a shared file system.
//!
//! An object is written once, under a name made from its contents. Writing it again finds it there.

use crate::runtime::outside;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path as Key;
use object_store::{
    ClientOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, RetryConfig,
};
use sinew_store::{StoreError, private_dir, private_file};
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Objects that are written or deleted at a time.
const AT_ONCE: usize = 16;
/// Time for one request, and for all attempts at it.
const REQUEST: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(120));
/// Maximum attempts at a request.
const ATTEMPTS: usize = 20;
/// Time for a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// An object to write: its name, and its bytes.
pub(crate) type Object = (String, Bytes);

/// A place of objects.
#[derive(Debug)]
pub struct Payloads {
    shown: String,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Folder {
        root: PathBuf,
        /// Number of the next temporary file of this process.
        next: AtomicU64,
    },
    Bucket {
        store: Arc<dyn ObjectStore>,
        prefix: String,
    },
}

impl Payloads {
    /// Opens `s3://BUCKET/PREFIX` or `file:///FOLDER`. S3 takes keys, region and endpoint from the usual
    /// variables `AWS_*` of the environment. Nothing is connected; a folder is created.
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
            let root = PathBuf::from(folder);
            private_dir(&root).map_err(|source| StoreError::Io {
                path: root.clone(),
                source,
            })?;
            Place::Folder {
                root,
                next: AtomicU64::new(0),
            }
        } else if let Some(rest) = url.strip_prefix("s3://") {
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
            shown: url.to_owned(),
            place,
        })
    }

    /// Writes objects, those that are missing. They are durable when the call returns.
    pub(crate) fn put(&self, objects: &[Object]) -> Result<(), StoreError> {
        match &self.place {
            Place::Folder { root, next } => {
                let mut written = objects.iter();
                written.try_for_each(|(name, bytes)| write(root, next, name, bytes))
            }
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
        server: url.to_owned(),
        reason: reason.to_owned(),
    }
}

fn key(prefix: &str, name: &str) -> Key {
    Key::from(format!("{prefix}/{name}"))
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

/// Writes a file whole and durably, unless it is there.
fn write(root: &Path, next: &AtomicU64, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
    let path = root.join(name);
    if path.exists() {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(root);
    let number = next.fetch_add(1, Ordering::Relaxed);
    let part = root.join(format!("part-{}-{number}", std::process::id()));
    let written = (|| {
        private_dir(folder)?;
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
