//! The reasoning of a turn as the `thoughtSignature` that Google's clients send back.
//!
//! Google's own signatures are opaque; these hold the text. A client that changes one only loses the exact
//! match with the sampled turn, which is then found by its other parts.

use crate::dialect::media::standard_base64;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Begins the text of every signature: those of other servers are not read.
const MARK: &str = "sinew:";

/// The signature that holds a reasoning.
pub(super) fn write(reasoning: &str) -> String {
    STANDARD.encode(format!("{MARK}{reasoning}"))
}

/// The reasoning in a signature; `None` for a signature of another server.
pub(super) fn read(signature: &str) -> Option<String> {
    let bytes = STANDARD.decode(standard_base64(signature)).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    text.strip_prefix(MARK).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_holds_its_reasoning_in_both_alphabets() {
        let reasoning = "Ünïcode? ~~~ >>> ???\n";
        let signature = write(reasoning);
        assert_eq!(read(&signature).as_deref(), Some(reasoning));
        let url_safe = signature.replace('+', "-").replace('/', "_");
        assert_eq!(
            read(url_safe.trim_end_matches('=')).as_deref(),
            Some(reasoning)
        );
        for other in ["", "skip_thought_signature_validator", "c2luZXc="] {
            assert_eq!(read(other), None, "{other}");
        }
    }
}
