//! Paths of checkpoints, and the names in them.

use super::types::{CheckpointKind, CheckpointPath, ModelId, Refusal};

/// Longest name of a checkpoint.
const MAX_NAME: usize = 200;
/// Shortest and longest time to live of a checkpoint: an hour and ten years, as the SDK documents.
const TTL_S: std::ops::RangeInclusive<u64> = 3600..=315_360_000;

/// Whether a text is made of the characters that names may have.
fn plain(name: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    !name.is_empty() && name.len() <= MAX_NAME && name.bytes().all(allowed)
}

/// Checks the name of a checkpoint that a client makes.
///
/// # Errors
/// If it has other characters, or starts with a dot, as those that the desk makes.
pub(super) fn check_name(name: &str) -> Result<(), Refusal> {
    if plain(name) && !name.starts_with('.') {
        return Ok(());
    }
    let value = format!("{:?}", name.chars().take(MAX_NAME + 1).collect::<String>());
    let allowed = format!(
        "a name of 1 to {MAX_NAME} letters, digits, `.`, `_` or `-`, not starting with a dot"
    );
    Err(Refusal::invalid("path", value, allowed))
}

/// Checks a time to live.
///
/// # Errors
/// If it is shorter than an hour, or longer than ten years.
pub(super) fn check_ttl(ttl_s: Option<u64>) -> Result<(), Refusal> {
    match ttl_s {
        Some(value) if !TTL_S.contains(&value) => {
            let (least, most) = (TTL_S.start(), TTL_S.end());
            let allowed = format!("{least} (1 hour) to {most} (10 years); left out: never");
            Err(Refusal::invalid("ttl_seconds", value, allowed))
        }
        _ => Ok(()),
    }
}

impl CheckpointPath {
    /// Reads `tinker://MODEL_ID/weights/NAME`, or the same with another [`CheckpointKind`].
    ///
    /// # Errors
    /// If it has another form.
    pub fn parse(text: &str) -> Result<Self, Refusal> {
        let wrong = || {
            let value = format!("{:?}", text.chars().take(400).collect::<String>());
            let allowed = "tinker://MODEL_ID/weights/NAME or tinker://MODEL_ID/sampler_weights/NAME, as \
                           saves return it";
            Refusal::invalid("path", value, allowed)
        };
        let rest = text.strip_prefix("tinker://").ok_or_else(wrong)?;
        let parts: Vec<&str> = rest.split('/').collect();
        let &[model, segment, name] = parts.as_slice() else {
            return Err(wrong());
        };
        let kind = CheckpointKind::ALL
            .into_iter()
            .find(|kind| kind.segment() == segment)
            .ok_or_else(wrong)?;
        let colons = |b: u8| b.is_ascii_alphanumeric() || b"._:-".contains(&b);
        if model.is_empty() || !model.bytes().all(colons) || !plain(name) {
            return Err(wrong());
        }
        Ok(Self {
            model: ModelId::from(model),
            kind,
            name: name.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_as_they_are_written() {
        for text in [
            "tinker://0a1b:train:0/weights/000020",
            "tinker://0a1b:train:12/sampler_weights/final",
            "tinker://0a1b:train:12/sampler_weights/.snapshot-4",
            "tinker://0a1b:train:12/external_weights/final",
        ] {
            assert_eq!(CheckpointPath::parse(text).unwrap().to_string(), text);
        }
        for text in [
            "",
            "final",
            "tinker://m/weights",
            "tinker://m/weights/",
            "tinker:///weights/a",
            "tinker://m/other_weights/a",
            "tinker://m/weights/a/b",
            "tinker://m/weights/../x",
            "tinker://m n/weights/a",
        ] {
            let error = CheckpointPath::parse(text).unwrap_err().to_string();
            assert!(error.contains("tinker://MODEL_ID"), "{error}");
        }
    }

    #[test]
    fn clients_choose_plain_names_and_times() {
        check_name("000020").unwrap();
        for name in ["", ".inflight", "a/b", "a b", "é"] {
            assert!(check_name(name).is_err(), "{name}");
        }
        check_ttl(None).unwrap();
        check_ttl(Some(3600)).unwrap();
        assert!(check_ttl(Some(3599)).is_err());
    }
}
