//! Media of traces as objects: a picture or a sound that a message holds as a `data:` address is stored once,
//! however many turns and episodes repeat it. Reading a trace puts the address back.

use crate::payloads::{Object, Payloads};
use bytes::Bytes;
use sinew_store::StoreError;
use sinew_types::{Content, Media, MediaSource, Part, Trace};
use std::collections::HashMap;

/// Minimum bytes of a `data:` address that becomes an object.
const FROM: usize = 2_048;
/// Beginning of an address that stands for an object.
const REFERENCE: &str = "sinew-media:";

/// Folder of the media of a store.
pub(crate) fn folder(store: &str) -> String {
    format!("{store}/media")
}

/// Replaces media by references; `None` if there are none. The second part has the objects.
pub(crate) fn taken_out(trace: &Trace, folder: &str) -> Option<(Trace, Vec<Object>)> {
    let large = |media: &Media| match &media.source {
        MediaSource::Url(url) => url.len() >= FROM && url.starts_with("data:"),
        MediaSource::Blake3(_) => false,
    };
    let has = |part: &Part| matches!(part, Part::Image(m) | Part::Audio(m) if large(m));
    let messages = || trace.nodes.iter().flat_map(|n| &n.messages);
    if !messages().any(|m| m.content.parts().iter().any(has)) {
        return None;
    }
    let (mut referring, mut objects) = (trace.clone(), HashMap::new());
    for message in referring.nodes.iter_mut().flat_map(|n| &mut n.messages) {
        message.content = mapped(&message.content, &mut |url| {
            if url.len() < FROM || !url.starts_with("data:") {
                return Ok(None);
            }
            let hash = blake3::hash(url.as_bytes()).to_hex().to_string();
            let bytes = || Bytes::copy_from_slice(url.as_bytes());
            objects
                .entry(format!("{folder}/{hash}"))
                .or_insert_with(bytes);
            Ok(Some(format!("{REFERENCE}{hash}")))
        })
        .unwrap_or_else(|_| message.content.clone());
    }
    Some((referring, objects.into_iter().collect()))
}

/// Puts media back in the place of references.
///
/// # Errors
/// If an object is missing, damaged, or cannot be read.
pub(crate) fn put_back(
    trace: &mut Trace,
    payloads: &Payloads,
    folder: &str,
) -> Result<(), StoreError> {
    let mut read: HashMap<String, String> = HashMap::new();
    let episode = trace.episode.clone();
    for message in trace.nodes.iter_mut().flat_map(|n| &mut n.messages) {
        if message.content.first_media().is_none() {
            continue;
        }
        message.content = mapped(&message.content, &mut |url| {
            let Some(hash) = url.strip_prefix(REFERENCE) else {
                return Ok(None);
            };
            if let Some(known) = read.get(hash) {
                return Ok(Some(known.clone()));
            }
            let damaged = |reason: String| StoreError::Payload {
                episode: episode.clone(),
                reason,
            };
            let found = payloads.get(&format!("{folder}/{hash}"))?;
            let bytes = found.ok_or_else(|| damaged(format!("its media {hash} is missing")))?;
            if blake3::hash(&bytes).to_hex().as_str() != hash {
                return Err(damaged(format!("its media {hash} fails its checksum")));
            }
            let text = String::from_utf8(bytes.to_vec())
                .map_err(|_| damaged(format!("its media {hash} is no address")))?;
            read.insert(hash.to_owned(), text.clone());
            Ok(Some(text))
        })?;
    }
    Ok(())
}

/// Content with other addresses of media, where `change` gives one.
fn mapped(
    content: &Content,
    change: &mut dyn FnMut(&str) -> Result<Option<String>, StoreError>,
) -> Result<Content, StoreError> {
    let mut changed = |media: &Media| -> Result<Media, StoreError> {
        let mut media = media.clone();
        if let MediaSource::Url(url) = &mut media.source
            && let Some(other) = change(url)?
        {
            *url = other;
        }
        Ok(media)
    };
    let parts = content.parts().iter().map(|part| match part {
        Part::Text { .. } => Ok(part.clone()),
        Part::Image(media) => Ok(Part::Image(changed(media)?)),
        Part::Audio(media) => Ok(Part::Audio(changed(media)?)),
    });
    parts.collect()
}
