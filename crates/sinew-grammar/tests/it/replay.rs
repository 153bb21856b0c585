//! Replay recomputes the recorded masks bit by bit, or refuses with a reason.

use crate::golden::formats;
use crate::{GUIDED, PERSON, guided, schema, vocabulary, walk};
use sinew_grammar::{Grammars, GuidedGrammars, ReplayError, replay};
use sinew_types::{
    Choice, Enforced, Format, Grammar, NO_PARENT, Node, NodeFormat, PolicyVersion, RowMasks,
    SampledToken, TokenKind,
};
use std::sync::Arc;

/// A node as the engine and the recorder produce it.
fn node(format: &Arc<Format>, seed: u64, limit: usize) -> Node {
    let law = Arc::new(GUIDED.law(format));
    let mut node = Node::given(NO_PARENT, 0, TokenKind::Sampled, Vec::new(), Vec::new());
    for step in walk(guided(format).as_mut(), seed, limit) {
        let token = SampledToken {
            id: step.token,
            logprob: if step.mask.allowed() == 1 { 0.0 } else { -1.0 },
            version: PolicyVersion(1),
            top: Vec::new(),
            choice: Some(Choice {
                law: Arc::clone(&law),
                allowed: step.mask.allowed(),
                mask: step.mask.hash(),
                log_mass: -0.5,
            }),
        };
        NodeFormat::push(&mut node.format, &token);
        node.tokens.push(token.id);
        node.logprobs.push(token.logprob);
    }
    node
}

#[test]
fn recorded_choices_are_allowed_on_replay() {
    for (name, format) in formats() {
        // Also in the middle of an output, where `max_tokens` may end it.
        for limit in [5, 60] {
            let node = node(&format, 21, limit);
            let masks = replay(&*GUIDED, &node).unwrap().unwrap();
            assert_eq!(masks.rows.len(), node.tokens.len(), "{name}");
            for (t, &token) in node.tokens.iter().enumerate() {
                let recorded = node.format.as_ref().unwrap();
                match masks.mask(t) {
                    None => assert_eq!(recorded.allowed[t], 1, "{name}"),
                    Some(mask) => {
                        let allowed: u32 = mask.iter().map(|w| w.count_ones()).sum();
                        assert_eq!(allowed, recorded.allowed[t], "{name}");
                        assert!(masks.allows(t, token), "{name}");
                    }
                }
            }
            let words = masks.words_per_mask as usize;
            let distinct: std::collections::HashSet<_> = masks.table.chunks(words).collect();
            assert_eq!(
                distinct.len() * words,
                masks.table.len(),
                "{name}: duplicate masks"
            );
        }
    }
}

#[test]
fn nodes_without_enforced_format_have_no_masks() {
    let mut plain = node(&schema(PERSON), 1, 10);
    plain.format = None;
    assert_eq!(replay(&*GUIDED, &plain), Ok(None));
    let mut advised = node(&schema(PERSON), 1, 10);
    advised.format.as_mut().unwrap().law.enforced = Enforced::Advice;
    assert_eq!(replay(&*GUIDED, &advised), Ok(None));
}

#[test]
fn altered_nodes_are_refused() {
    let good = node(&schema(PERSON), 4, 60);
    assert!(replay(&*GUIDED, &good).unwrap().is_some());
    let refused = |word: &str, edit: &dyn Fn(&mut Node)| {
        let mut node = good.clone();
        edit(&mut node);
        let error = replay(&*GUIDED, &node).unwrap_err().to_string();
        assert!(error.contains(word), "{word}: {error}");
    };
    let law = |node: &mut Node, edit: &dyn Fn(&mut NodeFormat)| {
        edit(node.format.as_mut().unwrap());
    };
    // One byte of the schema.
    refused("format was", &|n| {
        law(n, &|f| {
            let schema = PERSON.replacen("150", "151", 1);
            f.law.format = Arc::new(Format::new(Grammar::JsonSchema { schema }));
        });
    });
    refused("environment was", &|n| {
        law(n, &|f| {
            enforced(f, |_, environment, _| environment.push('0'))
        });
    });
    refused("implementation was", &|n| {
        law(n, &|f| {
            enforced(f, |implementation, _, _| implementation.push('1'))
        });
    });
    refused("token 3: the mask allows", &|n| {
        law(n, &|f| f.masks[3] ^= 1)
    });
    refused("token 2: the mask allows", &|n| {
        law(n, &|f| f.allowed[2] += 1)
    });
    refused("has 9 entries", &|n| law(n, &|f| f.truncate(9)));
    let last = good.tokens.len() - 1;
    refused("barred", &|n| n.tokens[last] = 17);
    refused("enforced the format itself", &|n| {
        law(n, &|f| {
            f.law.enforced = Enforced::Outside {
                engine: "vllm".into(),
            }
        });
    });
}

fn enforced(format: &mut NodeFormat, edit: impl Fn(&mut String, &mut String, &mut String)) {
    match &mut format.law.enforced {
        Enforced::Masks {
            implementation,
            environment,
            format,
        } => edit(implementation, environment, format),
        other => panic!("{other:?}"),
    }
}

#[test]
fn altered_schema_with_matching_hash_has_other_masks() {
    let mut node = node(&schema(PERSON), 4, 60);
    let other = schema(&PERSON.replacen("cat", "cow", 1));
    node.format.as_mut().unwrap().law = GUIDED.law(&other);
    let error = replay(&*GUIDED, &node).unwrap_err();
    let refused = matches!(
        error,
        ReplayError::Mask { .. } | ReplayError::Grammar { .. }
    );
    assert!(refused, "{error}");
}

#[test]
fn vocabulary_is_part_of_the_environment() {
    let node = node(&schema(PERSON), 4, 20);
    let mut other = vocabulary();
    other.tokens[5000] = Some(b"other".as_slice().into());
    let other = GuidedGrammars::new(other).unwrap();
    let error = replay(&other, &node).unwrap_err();
    assert!(
        matches!(
            error,
            ReplayError::Differs {
                field: "environment",
                ..
            }
        ),
        "{error}"
    );
    let mut longer = vocabulary();
    longer.columns += 64;
    let longer = GuidedGrammars::new(longer).unwrap();
    assert_ne!(longer.environment(), GUIDED.environment());
}

#[test]
fn padded_columns_are_never_allowed() {
    let mut padded = vocabulary();
    let tokens = padded.columns;
    padded.columns = tokens + 37;
    let padded = GuidedGrammars::new(padded).unwrap();
    let mut matcher = padded.start(&schema("true")).unwrap();
    for step in walk(matcher.as_mut(), 2, 20) {
        assert_eq!(step.mask.words().len(), (tokens + 37).div_ceil(32));
        assert!(step.mask.tokens().all(|t| (t as usize) < tokens));
    }
}

#[test]
fn masks_of_one_token_are_not_kept() {
    let node = node(&schema(r#"{"const":"only this"}"#), 0, 40);
    let masks = replay(&*GUIDED, &node).unwrap().unwrap();
    let forced = node
        .format
        .as_ref()
        .unwrap()
        .allowed
        .iter()
        .filter(|&&n| n == 1);
    let all = masks.rows.iter().filter(|&&r| r == RowMasks::ALL);
    assert_eq!(forced.count(), all.count());
}
