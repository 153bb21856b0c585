//! Output formats: makers of masks for an engine, and for the same masks before training.

use sinew_algo::Columns;
use sinew_grammar::{GrammarError, Grammars, GuidedGrammars, Matcher, Vocabulary, replay};
use sinew_orchestrator::{FormatCounts, PipelineError};
use sinew_render::Renderer;
use sinew_types::{EpisodeEnd, EpisodeId, FailureKind, Format, NodeId, TokenId, Trace};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// Returns the maker of masks over the vocabulary of a renderer, for a model with `columns` logits. The
/// vocabulary is read when a format is first used, since most runs use none.
///
/// # Errors
/// If the model has no token that ends a turn.
pub fn grammars(
    renderer: &Arc<dyn Renderer>,
    columns: usize,
) -> Result<Arc<dyn Grammars>, PipelineError> {
    let Some(&end) = renderer.stop_ids().first() else {
        return Err(PipelineError::system(
            "formats: the model has no token that ends a turn",
        ));
    };
    Ok(Arc::new(LazyGrammars {
        renderer: Arc::clone(renderer),
        end,
        columns,
        made: OnceLock::new(),
    }))
}

struct LazyGrammars {
    renderer: Arc<dyn Renderer>,
    end: TokenId,
    columns: usize,
    made: OnceLock<Result<GuidedGrammars, GrammarError>>,
}

sinew_types::debug_fields!(LazyGrammars, columns);

impl LazyGrammars {
    fn made(&self) -> Result<&GuidedGrammars, GrammarError> {
        let made = self.made.get_or_init(|| self.make());
        made.as_ref().map_err(Clone::clone)
    }

    fn make(&self) -> Result<GuidedGrammars, GrammarError> {
        let renderer = &self.renderer;
        let ids = 0..renderer.vocab_size() as u32;
        let files = renderer.files();
        let files = files.map_err(|e| GrammarError::Vocabulary(e.to_string()))?;
        let tokenizer = files.into_iter().find(|(name, _)| name == "tokenizer.json");
        let own = Arc::clone(renderer);
        GuidedGrammars::new(Vocabulary {
            tokens: ids
                .clone()
                .map(|id| renderer.token_bytes(id).map(Into::into))
                .collect(),
            special: ids.filter(|&id| renderer.is_special(id)).collect(),
            end: self.end,
            columns: self.columns,
            // Text without tokens of its own is cut into the longest that fit.
            encode: Arc::new(move |text| own.encode_text(text).unwrap_or_default()),
            source: tokenizer.map(|(_, bytes)| bytes).unwrap_or_default(),
        })
    }
}

/// Grammars that are built when a format is first started, which is before any mask is requested.
impl Grammars for LazyGrammars {
    fn implementation(&self) -> &str {
        self.made().map_or("", |g| g.implementation())
    }

    fn environment(&self) -> &str {
        self.made().map_or("", |g| g.environment())
    }

    fn columns(&self) -> usize {
        self.columns
    }

    fn start(&self, format: &Arc<Format>) -> Result<Box<dyn Matcher>, GrammarError> {
        self.made()?.start(format)
    }

    fn check(&self, format: &Arc<Format>, tokens: &[TokenId]) -> Result<(), GrammarError> {
        self.made()?.check(format, tokens)
    }
}

/// The masks of a batch, and the episodes that must not be trained, with the reason.
#[derive(Debug, Default)]
pub(crate) struct FormatReplay {
    pub columns: Columns,
    pub counts: FormatCounts,
    pub rejected: BTreeMap<EpisodeId, String>,
}

/// The masks of given episodes, so that they can be scored.
pub fn masks(grammars: &dyn Grammars, groups: &mut [Vec<Trace>]) -> Columns {
    replay_all(grammars, groups).columns
}

/// Makes the masks of all nodes again that were held to a format. An episode whose masks are not those that
/// were recorded becomes one that the system failed: it is not trained, and in no baseline.
pub(crate) fn replay_all(grammars: &dyn Grammars, groups: &mut [Vec<Trace>]) -> FormatReplay {
    let mut replayed = FormatReplay::default();
    let mut mass = 0.0;
    for trace in groups.iter_mut().flatten() {
        if matches!(trace.end, EpisodeEnd::Failed { .. }) {
            continue;
        }
        for (id, node) in trace.nodes.iter().enumerate() {
            let (Some(format), false) =
                (&node.format, replayed.rejected.contains_key(&trace.episode))
            else {
                continue;
            };
            match replay(grammars, node) {
                Ok(Some(masks)) => {
                    let columns = replayed.columns.entry(trace.episode.clone()).or_default();
                    columns.masks.insert(id as NodeId, masks);
                    let forced = format.allowed.iter().filter(|&&n| n == 1).count();
                    replayed.counts.forced += forced;
                    replayed.counts.masked += format.allowed.len() - forced;
                    mass += format.log_mass.iter().map(|&m| f64::from(m)).sum::<f64>();
                }
                Ok(None) => {
                    let kept = grammars.check(&format.law.format, &node.tokens).is_ok();
                    replayed.counts.advised += 1;
                    replayed.counts.kept += usize::from(kept);
                }
                Err(error) => {
                    let why = format!("node {id}: {error}");
                    replayed.rejected.insert(trace.episode.clone(), why);
                }
            }
        }
        if let Some(why) = replayed.rejected.get(&trace.episode) {
            tracing::warn!(episode = %trace.episode, %why, "masks cannot be made again: not trained");
            replayed.columns.remove(&trace.episode);
            trace.end = EpisodeEnd::Failed {
                kind: FailureKind::Engine,
                message: format!("format: {why}"),
            };
        }
    }
    replayed.counts.rejected = replayed.rejected.len();
    if replayed.counts.masked > 0 {
        replayed.counts.log_mass = mass / replayed.counts.masked as f64;
    }
    replayed
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_algo::{AlgoError, AlgorithmConfig, RunFacts};
    use sinew_infer::{FakeConfig, FakeEngine, FakeModel};
    use sinew_render::TinyRenderer;
    use sinew_types::{
        Enforced, Engine, EngineEvent, GenerateRequest, Grammar, GroupId, NO_PARENT, Node,
        NodeFormat, Origin, Outcome, PolicyVersion, Provenance, RequestId, SamplingParams,
        TRACE_FORMAT_VERSION, TaskId, Timing, TokenKind, VersionSpan,
    };
    use std::sync::mpsc;

    fn renderer() -> Arc<dyn Renderer> {
        Arc::new(TinyRenderer::new("abc."))
    }

    /// A group of two, each sampled by the fake engine under a format.
    fn group(grammars: &Arc<dyn Grammars>, rewards: [f64; 2]) -> Vec<Trace> {
        let columns = grammars.columns();
        let engine = FakeEngine::threaded(
            FakeConfig {
                model: FakeModel {
                    vocab: columns,
                    seed: 1,
                    end: None,
                },
                grammars: Some(Arc::clone(grammars)),
                ..FakeConfig::default()
            },
            Box::new(|| 0.0),
        )
        .unwrap();
        sampled(&engine, rewards, 1.0)
    }

    fn sampled(engine: &dyn Engine, rewards: [f64; 2], temperature: f32) -> Vec<Trace> {
        let traces = rewards.iter().zip(0..).map(|(&reward, n)| {
            let pattern = "(ab|ba|c){4}\\.".to_owned();
            let format = Format::new(Grammar::Regex { pattern });
            let sampling = SamplingParams {
                seed: n,
                temperature,
                format: Some(format.into()),
                ..SamplingParams::default()
            };
            let request = GenerateRequest::new(RequestId(n), vec![1, 2], sampling);
            let (send, events) = mpsc::sync_channel(64);
            let sink = Box::new(move |event| drop(send.send(event)));
            engine.submit(request, sink).unwrap();
            let mut node = Node::given(0, 1, TokenKind::Sampled, Vec::new(), Vec::new());
            node.temperature = temperature;
            for event in events {
                let EngineEvent::Tokens { tokens, .. } = event else {
                    break;
                };
                for token in tokens {
                    NodeFormat::push(&mut node.format, &token);
                    node.tokens.push(token.id);
                    node.logprobs.push(token.logprob);
                }
            }
            node.versions.push(VersionSpan {
                start: 0,
                len: node.tokens.len() as u32,
                version: PolicyVersion(0),
            });
            let prompt = Node::given(NO_PARENT, 0, TokenKind::Prompt, vec![1, 2], Vec::new());
            Trace {
                format_version: TRACE_FORMAT_VERSION,
                episode: EpisodeId::new(format!("e{n}")),
                group: GroupId::new("g"),
                task: TaskId::new("t"),
                task_kind: String::new(),
                origin: Origin {
                    purpose: "train".into(),
                    ..Origin::default()
                },
                provenance: Provenance::default(),
                nodes: vec![prompt, node],
                outcome: Outcome {
                    reward,
                    ..Outcome::default()
                },
                end: EpisodeEnd::Terminated,
                timing: Timing::default(),
                ignored: std::collections::BTreeMap::new(),
            }
        });
        traces.collect()
    }

    fn algorithm() -> sinew_algo::Algorithm {
        let config: AlgorithmConfig = toml::from_str("type = 'grpo'").unwrap();
        let facts = RunFacts {
            group_size: 2,
            reference: false,
            teacher: false,
            critic: false,
            max_staleness: 0,
            updates_per_batch: 1,
        };
        sinew_algo::Algorithm::new(&config, &facts).unwrap()
    }

    fn rows(
        algorithm: &sinew_algo::Algorithm,
        groups: &[Vec<Trace>],
        columns: &Columns,
    ) -> Result<(Vec<sinew_types::TrainRow>, sinew_algo::AlgoReport), sinew_algo::AlgoError> {
        algorithm.prepare(groups)?.rows(columns)
    }

    #[test]
    fn rows_carry_the_masks_and_forced_tokens_are_not_trained() {
        let grammars = grammars(&renderer(), renderer().vocab_size()).unwrap();
        let mut groups = vec![group(&grammars, [0.0, 1.0])];
        let replayed = replay_all(grammars.as_ref(), &mut groups);
        assert!(replayed.counts.masked > 0 && replayed.counts.forced > 0);
        assert!(replayed.rejected.is_empty());
        let algorithm = algorithm();
        let (rows, _) = rows(&algorithm, &groups, &replayed.columns).unwrap();
        let drafted = algorithm.prepare(&groups).unwrap();
        let drafted = drafted.draft(&replayed.columns).unwrap();
        assert_eq!((rows.len(), drafted.rows().len()), (2, 2));
        let mut trained = 0;
        for row in rows.iter().chain(drafted.rows()) {
            let masks = row.masks.as_ref().unwrap();
            let trace = groups[0].iter().find(|t| t.episode == row.episode).unwrap();
            let format = trace.nodes[1].format.as_ref().unwrap();
            for t in 0..row.tokens.len() {
                let free = t >= 2 && format.allowed[t - 2] > 1;
                assert_eq!(row.weights[t] != 0.0, free);
                assert_eq!(masks.mask(t).is_some(), free);
                trained += usize::from(free);
            }
        }
        assert_eq!(trained, 2 * replayed.counts.masked);
    }

    #[test]
    fn an_episode_whose_masks_differ_is_not_trained() {
        let grammars = grammars(&renderer(), renderer().vocab_size()).unwrap();
        let mut groups = vec![group(&grammars, [0.0, 1.0])];
        groups[0].extend(group(&grammars, [0.5, 0.7]).into_iter().map(|mut t| {
            t.episode = EpisodeId::new(format!("{}+", t.episode));
            t
        }));
        let altered = groups[0][1].nodes[1].format.as_mut().unwrap();
        altered.masks[2] ^= 1;
        let replayed = replay_all(grammars.as_ref(), &mut groups);
        assert_eq!(replayed.counts.rejected, 1);
        let why = &replayed.rejected[&EpisodeId::new("e1")];
        assert!(why.contains("node 1: token 2"), "{why}");
        let (rows, _) = rows(&algorithm(), &groups, &replayed.columns).unwrap();
        assert_eq!(rows.len(), 3);
        assert!(rows.iter().all(|r| r.episode.as_str() != "e1"));
    }

    #[test]
    fn advised_answers_are_checked_and_trained_without_masks() {
        let grammars = grammars(&renderer(), renderer().vocab_size()).unwrap();
        let mut groups = vec![group(&grammars, [0.0, 1.0])];
        for trace in &mut groups[0] {
            let format = trace.nodes[1].format.as_mut().unwrap();
            format.law.enforced = Enforced::Advice;
            format.truncate(0);
        }
        let cut = &mut groups[0][0].nodes[1];
        cut.tokens.truncate(3);
        cut.logprobs.truncate(3);
        cut.versions[0].len = 3;
        let replayed = replay_all(grammars.as_ref(), &mut groups);
        assert_eq!((replayed.counts.advised, replayed.counts.kept), (2, 1));
        let (rows, _) = rows(&algorithm(), &groups, &replayed.columns).unwrap();
        assert!(rows.len() == 2 && rows.iter().all(|r| r.masks.is_none()));
    }

    #[test]
    fn rows_without_the_masks_are_refused() {
        let grammars = grammars(&renderer(), renderer().vocab_size()).unwrap();
        let groups = vec![group(&grammars, [0.0, 1.0])];
        let refused = rows(&algorithm(), &groups, &Columns::new());
        assert!(matches!(
            refused,
            Err(AlgoError::MissingMask { node: 1, .. })
        ));
    }

    /// Random weights over the alphabet, sampled by the real engine under a format at two temperatures.
    #[test]
    fn the_trainer_has_the_log_probs_of_the_engine() {
        use sinew_infer::{EmbeddedEngine, EngineConfig, ModelForward};
        use sinew_model::{InferModel, Params};
        use sinew_train::{ModelPolicy, score_rows};
        let renderer = renderer();
        let vocab = renderer.vocab_size();
        let grammars = grammars(&renderer, vocab).unwrap();
        let config = sinew_model::ModelConfig {
            family: sinew_model::Family::Llama,
            vocab,
            d_model: 32,
            layers: 2,
            heads: 2,
            kv_heads: 1,
            head_dim: 16,
            d_ff: 64,
            rope_theta: 10_000.0,
            rope_scaling: sinew_model::RopeScaling::None,
            rms_eps: 1e-5,
            tied_embeddings: true,
            qkv_bias: false,
            qk_norm: false,
            max_context: 64,
            bos_id: None,
            eos_ids: vec![1],
        };
        let mut params = Params::random(&config, 5);
        params.values_mut().iter_mut().for_each(|v| *v *= 4.0);
        let device = sinew_tensor::Cpu::new(sinew_tensor::KernelSet::detect_f32(), 1);
        let model = InferModel::new(&device, &config, &params, 64).unwrap();
        let forward = ModelForward::new(device.clone(), model, 512).unwrap();
        let made = Some(Arc::clone(&grammars));
        let clock = Box::new(|| 0.0);
        let config = EngineConfig::default();
        let engine = EmbeddedEngine::with_formats(forward, config, None, made, clock).unwrap();
        for temperature in [1.0, 0.6] {
            let mut groups = vec![sampled(&engine, [0.0, 1.0], temperature)];
            let replayed = replay_all(grammars.as_ref(), &mut groups);
            assert!(replayed.rejected.is_empty(), "{:?}", replayed.rejected);
            let (rows, _) = rows(&algorithm(), &groups, &replayed.columns).unwrap();
            let mut policy = ModelPolicy::frozen(params.clone(), 64, device.clone()).unwrap();
            let scored = score_rows(&mut policy, &rows, 64).unwrap();
            let mut compared = 0;
            for (row, scored) in rows.iter().zip(&scored) {
                for t in (0..row.tokens.len()).filter(|&t| row.weights[t] != 0.0) {
                    let (ours, theirs) = (scored[t], row.behaviour_logprobs[t]);
                    assert!((ours - theirs).abs() < 1e-5, "{ours} {theirs}");
                    compared += 1;
                }
            }
            assert_eq!(compared, replayed.counts.masked);
            // The distribution without the masks differs.
            let mut bare = rows.clone();
            bare.iter_mut().for_each(|r| r.masks = None);
            let scored = score_rows(&mut policy, &bare, 64).unwrap();
            let far = rows.iter().zip(&scored).any(|(row, scored)| {
                let each = (0..row.tokens.len()).filter(|&t| row.weights[t] != 0.0);
                each.into_iter()
                    .any(|t| (scored[t] - row.behaviour_logprobs[t]).abs() > 0.1)
            });
            assert!(far);
        }
    }
}
