//! Signatures of addresses that need no key.

use crate::desk::types::CheckpointKind;

/// A checkpoint in a path: the training run, the word of its kind, and its name.
pub(crate) type CheckpointParts = (String, String, String);

/// The address of a checkpoint that a path names.
pub(crate) fn tinker_path((model, kind, name): &CheckpointParts) -> String {
    format!("tinker://{model}/{kind}/{name}")
}

/// Parts of a signed address: tenant, end of its time, signature, model, name of the checkpoint, file.
pub(crate) type SignedParts = (String, u64, String, String, String, String);

/// Start of the paths of signed addresses.
pub(crate) const SIGNED: &str = "/api/v1/external_weights/";

/// Signs addresses of files.
#[derive(Clone)]
pub(crate) struct Signer {
    key: [u8; 32],
}

sinew_types::debug_fields!(Signer);

/// A file that an address names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) tenant: &'a str,
    /// Milliseconds since 1970 (UTC) until which the address is valid.
    pub(crate) until_ms: u64,
    /// Address of the checkpoint.
    pub(crate) checkpoint: &'a str,
    pub(crate) file: &'a str,
}

impl Signer {
    /// With a key of its own.
    pub(crate) fn new() -> std::io::Result<Self> {
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(std::io::Error::other)?;
        Ok(Self { key })
    }

    /// None of the parts has a line break, so that two places never have the same text.
    pub(crate) fn sign(&self, place: Place<'_>) -> blake3::Hash {
        let Place {
            tenant,
            until_ms,
            checkpoint,
            file,
        } = place;
        let text = format!("{tenant}\n{until_ms}\n{checkpoint}\n{file}");
        blake3::keyed_hash(&self.key, text.as_bytes())
    }
}

impl Signer {
    /// The checkpoint of an address, if this server signed it. Hashes are compared in constant time.
    pub(crate) fn checkpoint(&self, parts: &SignedParts) -> Option<String> {
        let (tenant, until_ms, signature, model, name, file) = parts;
        let segment = CheckpointKind::External.segment().to_owned();
        let checkpoint = tinker_path(&(model.clone(), segment, name.clone()));
        let place = Place {
            tenant,
            until_ms: *until_ms,
            checkpoint: &checkpoint,
            file,
        };
        let given = blake3::Hash::from_hex(signature).ok()?;
        (given == self.sign(place)).then_some(checkpoint)
    }

    /// The tenant for whom the path of a request was signed, so that its connection counts as one with a key.
    pub(crate) fn tenant(&self, path: &str) -> Option<String> {
        let mut parts = path.strip_prefix(SIGNED)?.splitn(6, '/').map(str::to_owned);
        let tenant = parts.next()?;
        let until_ms = parts.next()?.parse().ok()?;
        let signed = (
            tenant.clone(),
            until_ms,
            parts.next()?,
            parts.next()?,
            parts.next()?,
            parts.next()?,
        );
        self.checkpoint(&signed).map(|_| tenant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_holds_for_one_file_of_one_tenant_and_time() {
        let signer = Signer::new().unwrap();
        let place = Place {
            tenant: "a",
            until_ms: 1,
            checkpoint: "tinker://m/external_weights/n",
            file: "f",
        };
        let signed = signer.sign(place);
        assert_eq!(signer.sign(place), signed);
        let other_tenant = Place {
            tenant: "b",
            ..place
        };
        let later = Place {
            until_ms: 2,
            ..place
        };
        let other_file = Place { file: "g", ..place };
        for other in [other_tenant, later, other_file] {
            assert_ne!(signer.sign(other), signed);
        }
        assert_ne!(Signer::new().unwrap().sign(place), signed);
        let path = |hash: &str| format!("{SIGNED}a/1/{hash}/m/n/f");
        let hash = signed.to_hex();
        assert_eq!(signer.tenant(&path(&hash)), Some("a".to_owned()));
        let other = signer.sign(later).to_hex();
        assert_eq!(signer.tenant(&path(&other)), None);
        assert_eq!(signer.tenant("/api/v1/healthz"), None);
    }
}
