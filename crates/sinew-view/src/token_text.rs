//! Tokens as pieces of text that together give the whole text. Pure.

use sinew_render::Renderer;
use sinew_types::TokenId;

/// Text of each token. A character that spans several tokens stands at its last one, the others are empty, so
/// that all of them together are the text.
pub fn pieces(tokens: &[TokenId], renderer: &dyn Renderer) -> Vec<String> {
    let mut pieces = Vec::with_capacity(tokens.len());
    let mut bytes: Vec<u8> = Vec::new();
    for (i, &id) in tokens.iter().enumerate() {
        let own = renderer.token_bytes(id);
        bytes.extend(own.unwrap_or_else(|| format!("<unknown {id}>").into_bytes()));
        let whole = match std::str::from_utf8(&bytes) {
            Ok(_) => bytes.len(),
            // The end may be the beginning of a character.
            Err(e) if e.error_len().is_none() && i + 1 < tokens.len() => e.valid_up_to(),
            Err(_) => bytes.len(),
        };
        let rest = bytes.split_off(whole);
        pieces.push(String::from_utf8_lossy(&bytes).into_owned());
        bytes = rest;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_character_of_several_tokens_is_whole() {
        let renderer = sinew_render::byte_renderer().unwrap();
        let tokens = renderer.encode_text("aé🦀b").unwrap();
        let pieces = pieces(&tokens, &renderer);
        assert_eq!(pieces.len(), tokens.len());
        assert_eq!(pieces.concat(), "aé🦀b");
        assert!(pieces.iter().any(|p| p == "🦀"), "{pieces:?}");
    }

    proptest! {
        #[test]
        fn pieces_are_the_text(text in "\\PC{0,40}") {
            let renderer = sinew_render::byte_renderer().unwrap();
            let tokens = renderer.encode_text(&text).unwrap();
            prop_assert_eq!(pieces(&tokens, &renderer).concat(), text);
        }
    }
}
