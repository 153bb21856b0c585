//! Requests with formats: drawn and recorded tokens, and the end of a request without a mask.

use crate::{channel, collect, ids, request};
use sinew_grammar::{
    GrammarError, Grammars, GuidedGrammars, ListGrammars, Mask, Matcher, Vocabulary, replay,
};
use sinew_infer::testing::HashForward;
use sinew_infer::{
    EmbeddedEngine, EngineConfig, FakeConfig, FakeEngine, FakeModel, ForwardLimits, SchedulerConfig,
};
use sinew_types::{
    Engine, EngineError, FinishReason, Format, GenerateRequest, Grammar, NO_PARENT, Node,
    NodeFormat, SampledToken, TokenId, TokenKind,
};
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};

/// Every byte, an end, and a few words.
const VOCAB: usize = 264;
const END: TokenId = 256;
const WORDS: [&str; 7] = ["{\"", "\": ", "name", "true", "false", " \"", "}}"];

fn vocabulary() -> Vocabulary {
    let mut tokens: Vec<Option<Box<[u8]>>> = (0..=255).map(|b| Some([b].into())).collect();
    tokens.push(Some(b"<end>".as_slice().into()));
    tokens.extend(WORDS.map(|w| Some(w.as_bytes().into())));
    Vocabulary {
        tokens,
        special: vec![END],
        end: END,
        columns: VOCAB,
        encode: Arc::new(|text| text.bytes().map(TokenId::from).collect()),
        source: Vec::new(),
    }
}

static GUIDED: LazyLock<Arc<GuidedGrammars>> =
    LazyLock::new(|| Arc::new(GuidedGrammars::new(vocabulary()).unwrap()));

fn limits(vocab: usize, blocks: usize) -> ForwardLimits {
    ForwardLimits {
        vocab,
        context: 512,
        block_tokens: 4,
        blocks,
    }
}

fn engine(
    forward: HashForward,
    grammars: Option<Arc<dyn Grammars>>,
    speculative_tokens: usize,
) -> EmbeddedEngine {
    let config = EngineConfig {
        scheduler: SchedulerConfig {
            max_num_seqs: 8,
            max_batched_tokens: 64,
            speculative_tokens,
            ..SchedulerConfig::default()
        },
        ..EngineConfig::default()
    };
    EmbeddedEngine::with_formats(forward, config, None, grammars, Box::new(|| 0.0)).unwrap()
}

fn usual(blocks: usize, speculation: usize) -> EmbeddedEngine {
    let forward = HashForward::new(limits(VOCAB, blocks));
    engine(forward, Some(GUIDED.clone()), speculation)
}

fn constraint(id: u64, format: &Arc<Format>, max_tokens: u32) -> GenerateRequest {
    let prompt: Vec<TokenId> = (0..5 + id as u32 % 3).map(|i| 40 + i).collect();
    let mut request = request(id, &prompt, max_tokens);
    request.sampling.format = Some(Arc::clone(format));
    request
}

type Answer = (Vec<SampledToken>, Result<FinishReason, EngineError>);

fn run(engine: &dyn Engine, requests: &[GenerateRequest]) -> Vec<Answer> {
    let receivers: Vec<_> = requests
        .iter()
        .map(|r| {
            let (sink, events) = channel();
            engine.submit(r.clone(), sink).unwrap();
            events
        })
        .collect();
    receivers.iter().map(collect).collect()
}

fn schema() -> Arc<Format> {
    let schema = r#"{"type":"object","properties":{"name":{"type":"string","maxLength":5},"on":{"type":"boolean"}},"required":["name","on"],"additionalProperties":false}"#;
    let schema = schema.to_owned();
    Arc::new(Format::new(Grammar::JsonSchema { schema }))
}

fn choice(texts: &[&str]) -> Arc<Format> {
    let texts = texts.iter().map(|t| (*t).to_owned()).collect();
    Arc::new(Format::new(Grammar::Choice { texts }))
}

fn said(tokens: &[SampledToken]) -> String {
    let table = vocabulary().tokens;
    let plain = tokens.iter().filter(|t| t.id != END);
    let bytes = plain.flat_map(|t| table[t.id as usize].clone().unwrap().to_vec());
    String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
}

/// The node that a recorder writes.
fn node(tokens: &[SampledToken]) -> Node {
    let mut node = Node::given(NO_PARENT, 0, TokenKind::Sampled, ids(tokens), Vec::new());
    tokens
        .iter()
        .for_each(|t| NodeFormat::push(&mut node.format, t));
    node
}

#[test]
fn outputs_are_of_the_format_and_end_by_themselves() {
    let requests: Vec<_> = (0..12).map(|id| constraint(id, &schema(), 200)).collect();
    for (tokens, end) in run(&usual(512, 0), &requests) {
        assert_eq!(end, Ok(FinishReason::StopId { id: END }));
        let text = said(&tokens);
        let value: serde_json::Value = serde_json::from_str(&text).expect(&text);
        assert!(value["name"].as_str().unwrap().chars().count() <= 5);
        assert!(value["on"].is_boolean());
        let forced = tokens
            .iter()
            .filter(|t| t.choice.as_ref().unwrap().allowed == 1);
        assert!(forced.clone().count() > 10, "{text}");
        assert!(forced.clone().all(|t| t.logprob == 0.0));
        let masks = replay(GUIDED.as_ref(), &node(&tokens)).unwrap().unwrap();
        assert_eq!(masks.rows.len(), tokens.len());
    }
}

/// Compares with a softmax in f64 over the allowed logits, computed separately.
#[test]
fn logprobs_are_of_the_softmax_over_the_mask() {
    for (id, temperature) in [(1, 1.0f32), (2, 0.6), (3, 1.7)] {
        let mut asked = constraint(id, &schema(), 60);
        asked.sampling.temperature = temperature;
        asked.sampling.top_logprobs = 255;
        let (tokens, _) = run(&usual(512, 0), std::slice::from_ref(&asked)).remove(0);
        let mut context = asked.prompt.to_vec();
        let mut matcher = GUIDED.start(&schema()).unwrap();
        let mut free = 0;
        for token in &tokens {
            let mask = matcher.mask().unwrap();
            let choice = token.choice.as_ref().unwrap();
            assert_eq!((choice.allowed, choice.mask), (mask.allowed(), mask.hash()));
            let logits = HashForward::logits_after(VOCAB, 0, &context);
            let power = |t: TokenId| (f64::from(logits[t as usize]) / f64::from(temperature)).exp();
            let allowed: f64 = mask.tokens().map(power).sum();
            let expected = (power(token.id) / allowed).ln();
            assert!((f64::from(token.logprob) - expected).abs() < 1e-5);
            if mask.allowed() > 1 {
                free += 1;
                let all: f64 = (0..VOCAB as u32).map(power).sum();
                let mass = (allowed / all).ln();
                assert!((f64::from(choice.log_mass) - mass).abs() < 1e-5);
            }
            assert!(token.top.iter().all(|t| mask.allows(t.id)));
            if mask.allowed() <= 255 {
                let sum: f64 = token.top.iter().map(|t| f64::from(t.logprob).exp()).sum();
                assert!((sum - 1.0).abs() < 1e-5, "{sum}");
            }
            context.push(token.id);
            matcher.advance(token.id).unwrap();
        }
        assert!(free > 2);
    }
}

#[test]
fn guesses_batches_and_preemption_change_nothing_under_a_format() {
    let formats = [schema(), choice(&["true and false", "true or false"])];
    let requests: Vec<_> = (0..16)
        .map(|id| constraint(id, &formats[id as usize % 2], 90))
        .collect();
    let roomy = run(&usual(512, 0), &requests);
    assert_eq!(run(&usual(512, 16), &requests), roomy, "with draft tokens");
    assert_eq!(run(&usual(60, 0), &requests), roomy, "with preemption");
    for (request, answer) in requests.iter().zip(&roomy).take(4) {
        let alone = run(&usual(512, 0), std::slice::from_ref(request));
        assert_eq!(&alone[0], answer, "alone");
    }
}

#[test]
fn tokens_without_a_choice_need_no_pass_of_their_own() {
    let forward = HashForward::new(limits(VOCAB, 64));
    let rows = forward.computed();
    let engine = engine(forward, Some(GUIDED.clone()), 0);
    let text = "a long text that is the only one";
    let asked = constraint(0, &choice(&[text]), 100);
    let prompt = asked.prompt.len() as u64;
    let (tokens, end) = run(&engine, &[asked]).remove(0);
    assert_eq!(end, Ok(FinishReason::StopId { id: END }));
    assert_eq!(said(&tokens), text);
    assert_eq!(
        rows.load(Ordering::Relaxed),
        prompt,
        "nothing but the prompt"
    );
    assert!(tokens.iter().all(|t| t.logprob == 0.0));
}

#[test]
fn the_most_tokens_cut_an_output_anywhere() {
    for max_tokens in 1..40 {
        let (tokens, end) = run(&usual(512, 8), &[constraint(9, &schema(), max_tokens)]).remove(0);
        match end {
            Ok(FinishReason::Length) => assert_eq!(tokens.len(), max_tokens as usize),
            other => assert_eq!(other, Ok(FinishReason::StopId { id: END })),
        }
        assert!(replay(GUIDED.as_ref(), &node(&tokens)).unwrap().is_some());
    }
}

#[test]
fn requests_with_and_without_formats_do_not_mix() {
    let mut plain = constraint(3, &schema(), 30);
    plain.sampling.format = None;
    let requests = [
        constraint(2, &schema(), 60),
        plain.clone(),
        constraint(4, &schema(), 60),
    ];
    let mixed = run(&usual(512, 0), &requests);
    let forward = HashForward::new(limits(VOCAB, 512));
    let alone = run(&engine(forward, None, 0), &[plain]);
    assert_eq!(mixed[1], alone[0]);
    assert!(mixed[1].0.iter().all(|t| t.choice.is_none()));
    assert!(mixed[0].0.iter().all(|t| t.choice.is_some()));
}

#[test]
fn a_format_that_cannot_be_held_to_is_refused() {
    let refused = |engine: &dyn Engine, format: &Arc<Format>| {
        let (sink, _events) = channel();
        match engine.submit(constraint(1, format, 5), sink).unwrap_err() {
            EngineError::Format(why) => why,
            other => panic!("{other}"),
        }
    };
    let forward = || HashForward::new(limits(VOCAB, 64));
    let without = engine(forward(), None, 0);
    assert!(refused(&without, &schema()).contains("without a maker of masks"));
    let list = ListGrammars::new(vocabulary()).unwrap();
    let listed = engine(forward(), Some(Arc::new(list)), 0);
    assert!(refused(&listed, &schema()).contains("json_schema"));
    let larger = HashForward::new(limits(VOCAB + 1, 64));
    let larger = engine(larger, Some(GUIDED.clone()), 0);
    assert!(refused(&larger, &schema()).contains("265"));
    let pattern = "(".to_owned();
    let broken = Arc::new(Format::new(Grammar::Regex { pattern }));
    assert!(refused(&usual(64, 0), &broken).contains("regex"));
}

/// Fails after so many tokens.
#[derive(Debug)]
struct Failing(Arc<GuidedGrammars>, usize);

#[derive(Debug)]
struct FailingMatcher(Box<dyn Matcher>, usize);

impl Grammars for Failing {
    fn implementation(&self) -> &str {
        self.0.implementation()
    }
    fn environment(&self) -> &str {
        self.0.environment()
    }
    fn columns(&self) -> usize {
        self.0.columns()
    }
    fn check(&self, format: &Arc<Format>, tokens: &[TokenId]) -> Result<(), GrammarError> {
        self.0.check(format, tokens)
    }
    fn start(&self, format: &Arc<Format>) -> Result<Box<dyn Matcher>, GrammarError> {
        Ok(Box::new(FailingMatcher(self.0.start(format)?, self.1)))
    }
}

impl Matcher for FailingMatcher {
    fn mask(&mut self) -> Result<Arc<Mask>, GrammarError> {
        match self.1 {
            0 => Err(GrammarError::Limit {
                position: 0,
                why: "too much work".to_owned(),
            }),
            _ => self.0.mask(),
        }
    }
    fn advance(&mut self, token: TokenId) -> Result<(), GrammarError> {
        self.1 -= 1;
        self.0.advance(token)
    }
    fn ended(&self) -> bool {
        self.0.ended()
    }
    fn fork(&self) -> Box<dyn Matcher> {
        Box::new(Self(self.0.fork(), self.1))
    }
}

#[test]
fn a_limit_in_the_middle_ends_the_request_as_an_error() {
    let grammars = Arc::new(Failing(GUIDED.clone(), 12));
    let forward = HashForward::new(limits(VOCAB, 512));
    let engine = engine(forward, Some(grammars), 0);
    let mut plain = constraint(2, &schema(), 20);
    plain.sampling.format = None;
    let answers = run(&engine, &[constraint(1, &schema(), 100), plain]);
    let (tokens, end) = &answers[0];
    assert!(tokens.len() <= 12 && tokens.iter().all(|t| t.choice.is_some()));
    let failed = matches!(end, Err(EngineError::Format(why)) if why.contains("too much work"));
    assert!(failed, "{end:?}");
    assert_eq!(answers[1].1, Ok(FinishReason::Length), "others go on");
}

fn fake(script: Option<&str>) -> FakeEngine {
    let script = script.map(|text| {
        let ids: Vec<TokenId> = text.bytes().map(TokenId::from).collect();
        let script: sinew_infer::Script = Arc::new(move |_| Some(ids.clone()));
        script
    });
    let config = FakeConfig {
        model: FakeModel {
            vocab: VOCAB,
            seed: 3,
            end: None,
        },
        script,
        grammars: Some(GUIDED.clone()),
        ..FakeConfig::default()
    };
    FakeEngine::threaded(config, Box::new(|| 0.0)).unwrap()
}

#[test]
fn the_fake_engine_holds_to_formats_as_well() {
    for id in 0..6 {
        let asked = constraint(id, &schema(), 300);
        let (tokens, end) = run(&fake(None), std::slice::from_ref(&asked)).remove(0);
        assert_eq!(end, Ok(FinishReason::StopId { id: END }));
        serde_json::from_str::<serde_json::Value>(&said(&tokens)).unwrap();
        let mut matcher = GUIDED.start(&schema()).unwrap();
        for token in &tokens {
            let mask = matcher.mask().unwrap();
            // A token that is the only one allowed is certain.
            let certain = mask.only() == Some(token.id);
            assert!(
                certain == (token.logprob == 0.0) || token.id == END,
                "{token:?}"
            );
            matcher.advance(token.id).unwrap();
        }
        assert!(replay(GUIDED.as_ref(), &node(&tokens)).unwrap().is_some());
    }
}

#[test]
fn a_script_is_followed_as_far_as_the_format_allows() {
    let format = choice(&["yes", "no"]);
    let (tokens, _) = run(&fake(Some("no")), &[constraint(1, &format, 9)]).remove(0);
    assert_eq!(said(&tokens), "no");
    let (tokens, end) = run(&fake(Some("yellow")), &[constraint(1, &format, 9)]).remove(0);
    assert_eq!(said(&tokens), "yes");
    assert_eq!(end, Ok(FinishReason::StopId { id: END }));
}
