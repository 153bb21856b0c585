//! Answers that may be asked for again: a call whose answer was lost is answered from here, not carried out
//! twice.
//!
//! They are bounded by number and bytes. A dropped call would run again, which the queue makes harmless: a
//! put is a duplicate, an ack changes nothing, rows of a lease come back when it ends.

use bytes::Bytes;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use tokio::sync::OnceCell;

/// Maximum answers that are kept.
const MAX_REPLIES: usize = 4096;
/// Maximum of their bytes.
const MAX_BYTES: usize = 64 << 20;

/// Status and body of an answer.
pub(crate) type Reply = (u16, Bytes);

/// The place of an answer; a repeated request waits for the first.
pub(crate) type ReplySlot = Arc<OnceCell<Reply>>;

/// Answers by the names of their calls.
#[derive(Debug, Default)]
pub(crate) struct Replies(Mutex<KeptReplies>);

#[derive(Debug, Default)]
struct KeptReplies {
    by_id: HashMap<String, ReplySlot>,
    /// The oldest first.
    order: VecDeque<String>,
    bytes: usize,
}

impl Replies {
    /// The place of a call's answer.
    pub(crate) fn place(&self, id: &str) -> ReplySlot {
        let mut kept = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(place) = kept.by_id.get(id) {
            return Arc::clone(place);
        }
        let place = ReplySlot::default();
        kept.by_id.insert(id.to_owned(), Arc::clone(&place));
        kept.order.push_back(id.to_owned());
        kept.trim();
        place
    }

    /// Counts the bytes of a stored answer. An answer above the total limit is not kept.
    pub(crate) fn filled(&self, id: &str, bytes: usize) {
        let mut kept = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if !kept.by_id.contains_key(id) {
            return;
        }
        kept.bytes += bytes;
        kept.trim();
    }
}

impl KeptReplies {
    /// Drops the oldest.
    fn trim(&mut self) {
        while self.order.len() > MAX_REPLIES || self.bytes > MAX_BYTES {
            let Some(oldest) = self.order.pop_front() else {
                return;
            };
            let place = self.by_id.remove(&oldest);
            let size = place.and_then(|p| p.get().map(|(_, body)| body.len()));
            self.bytes = self.bytes.saturating_sub(size.unwrap_or(0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(replies: &Replies, id: &str, bytes: usize) {
        let place = replies.place(id);
        place.set((200, vec![0; bytes].into())).unwrap();
        replies.filled(id, bytes);
    }

    #[test]
    fn answers_are_kept_up_to_a_number_and_bytes() {
        let replies = Replies::default();
        fill(&replies, "first", 10);
        assert!(replies.place("first").get().is_some());
        fill(&replies, "large", MAX_BYTES - 10);
        assert!(replies.place("first").get().is_some());
        fill(&replies, "second", 10);
        assert!(replies.place("first").get().is_none(), "the oldest went");
        assert!(replies.place("second").get().is_some());
        for n in 0..MAX_REPLIES {
            fill(&replies, &n.to_string(), 1);
        }
        let kept = replies.0.lock().unwrap();
        assert_eq!(kept.order.len(), MAX_REPLIES);
        assert_eq!(kept.by_id.len(), MAX_REPLIES);
        assert_eq!(kept.bytes, MAX_REPLIES);
    }
}
