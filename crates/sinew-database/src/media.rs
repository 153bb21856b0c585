//! Media of traces as objects: a picture or a sound that a message holds as a `data:` address is stored once,
//! however many turns and episodes repeat it. Reading a trace puts the address back.

use crate::payloads::{Object, Payloads};
use bytes::Bytes;
use sinew_store::StoreError;
use sinew_types::{Content, Media, MediaSource, Part, Trace};
use std::collections::HashMap;

/// Minimum bytes of a `data:` address that becomes an object.
const FROM: usize = 2_048;
/// Beginning of an address that stands for an object; the epoch and the hash follow.
const REFERENCE: &str = "sinew-media:";
/// Digits of a hash.
const DIGITS: usize = 64;

/// Name of an object of a store, by the epoch in which it is written and the hash of its contents.
pub(crate) fn object_name(store: &str, epoch: i64, hash: &str) -> String {
    let shelf = hash.get(..2).unwrap_or_default();
    format!("{store}/{epoch}/{shelf}/{hash}")
}

/// The epoch and the hash that an address refers to; `None`: it stands for itself.
fn referred(url: &str) -> Option<(i64, &str)> {
    let (epoch, hash) = url.strip_prefix(REFERENCE)?.split_once('/')?;
    let is_hash = hash.len() == DIGITS && hash.bytes().all(|b| b.is_ascii_hexdigit());
    epoch.parse().ok().filter(|_| is_hash).map(|e| (e, hash))
}

/// Replaces media by references; `None` if there are none. The second part has the objects.
pub(crate) fn taken_out(trace: &Trace, store: &str, epoch: i64) -> Option<(Trace, Vec<Object>)> {
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
                .entry(object_name(store, epoch, &hash))
                .or_insert_with(bytes);
            Ok(Some(format!("{REFERENCE}{epoch}/{hash}")))
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
    store: &str,
) -> Result<(), StoreError> {
    let mut read: HashMap<String, String> = HashMap::new();
    let episode = trace.episode.clone();
    for message in trace.nodes.iter_mut().flat_map(|n| &mut n.messages) {
        if message.content.first_media().is_none() {
            continue;
        }
        message.content = mapped(&message.content, &mut |url| {
            let Some((epoch, hash)) = referred(url) else {
                return Ok(None);
            };
            if let Some(known) = read.get(url) {
                return Ok(Some(known.clone()));
            }
            let damaged = |reason: String| StoreError::Payload {
                episode: episode.clone(),
                reason,
            };
            let found = payloads.get(&object_name(store, epoch, hash))?;
            let bytes = found.ok_or_else(|| damaged(format!("its media {hash} is missing")))?;
            if blake3::hash(&bytes).to_hex().as_str() != hash {
                return Err(damaged(format!("its media {hash} fails its checksum")));
            }
            let text = String::from_utf8(bytes.to_vec())
                .map_err(|_| damaged(format!("its media {hash} is no address")))?;
            read.insert(url.to_owned(), text.clone());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_references_of_this_form_name_objects() {
        let hash = "0123456789abcdef".repeat(4);
        let reference = format!("{REFERENCE}7/{hash}");
        assert_eq!(referred(&reference), Some((7, hash.as_str())));
        assert_eq!(object_name("s", 7, &hash), format!("s/7/01/{hash}"));
        let outside = format!("{REFERENCE}7/{}", "../".repeat(21) + ".");
        let short = format!("{REFERENCE}7/{}", &hash[1..]);
        for other in [outside, short, hash, "https://example.org".into()] {
            assert_eq!(referred(&other), None, "{other}");
        }
    }
}
