//! Masks of fixed texts, compared with a direct search.

use proptest::prelude::*;
use sinew_grammar::{GrammarError, Grammars, ListGrammars, Vocabulary};
use sinew_types::{Format, Grammar};
use std::sync::Arc;

fn small(tokens: &[&str]) -> ListGrammars {
    let mut all: Vec<Option<Box<[u8]>>> = vec![Some(b"<end>".as_slice().into()), None];
    all.extend(tokens.iter().map(|t| Some(t.as_bytes().into())));
    ListGrammars::new(Vocabulary {
        columns: all.len() + 3,
        tokens: all,
        special: vec![0],
        end: 0,
        encode: Arc::new(|_| Vec::new()),
        source: Vec::new(),
    })
    .unwrap()
}

fn choice(texts: &[String]) -> Arc<Format> {
    let texts = texts.to_vec();
    Arc::new(Format::new(Grammar::Choice { texts }))
}

#[test]
fn lists_allow_their_texts_and_refuse_other_formats() {
    let grammars = small(&["y", "ye", "yes", "s", "n", "o"]);
    let mut matcher = grammars
        .start(&choice(&["yes".into(), "no".into()]))
        .unwrap();
    let first: Vec<u32> = matcher.mask().unwrap().tokens().collect();
    assert_eq!(first, [2, 3, 4, 6]);
    matcher.advance(3).unwrap();
    assert_eq!(matcher.mask().unwrap().only(), Some(5));
    matcher.advance(5).unwrap();
    assert_eq!(
        matcher.mask().unwrap().only(),
        Some(0),
        "only the end is allowed"
    );
    matcher.advance(0).unwrap();
    assert!(matcher.ended());
    let object = Arc::new(Format::new(Grammar::JsonObject));
    let error = grammars.start(&object).unwrap_err();
    assert!(matches!(error, GrammarError::Unsupported { .. }), "{error}");
    let mut stuck = grammars.start(&choice(&["q".into()])).unwrap();
    assert_eq!(stuck.mask(), Err(GrammarError::DeadEnd { position: 0 }));
}

proptest! {
    #[test]
    fn tokens_are_allowed_if_and_only_if_a_text_continues_with_them(
        texts in prop::collection::vec("[ab]{1,6}", 1..5),
        picks in prop::collection::vec(any::<u32>(), 12),
    ) {
        let tokens = ["a", "b", "ab", "ba", "bb", "aab"];
        let grammars = small(&tokens);
        let mut matcher = grammars.start(&choice(&texts)).unwrap();
        let mut output = String::new();
        for pick in picks {
            let mask = matcher.mask().unwrap();
            for (token, id) in tokens.iter().zip(2..) {
                let next = format!("{output}{token}");
                let expected = texts.iter().any(|t| t.starts_with(&next));
                prop_assert_eq!(mask.allows(id), expected);
            }
            prop_assert_eq!(mask.allows(0), texts.contains(&output));
            let allowed: Vec<u32> = mask.tokens().collect();
            let token = allowed[pick as usize % allowed.len()];
            matcher.advance(token).unwrap();
            if token == 0 {
                break;
            }
            output += tokens[token as usize - 2];
        }
    }
}
