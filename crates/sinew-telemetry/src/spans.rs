//! Phases of episodes as spans of OpenTelemetry: an episode, its turns, and in each turn the generation and
//! the tools. Pure: phases and time are arguments.
//!
//! An episode is a trace. It is complete when it is not live any more and its result is known, which its
//! first span has. A turn begins with a generation and ends before the next one; starts and scores stand next
//! to the turns. Models and tokens have the names of the conventions for generative models.
//!
//! | span | attribute | holds |
//! |---|---|---|
//! | all | `sinew.episode` | the id of the episode |
//! | `episode` | `sinew.turns` | number of its turns |
//! | `episode` | `sinew.reward`, `sinew.success` | what it came to; without a score there are none |
//! | `episode` | `gen_ai.usage.output_tokens` | sampled tokens of all turns |
//! | `episode`, `generate` | `gen_ai.request.model` | the model, as the recipe names it |
//! | `generate` | `gen_ai.usage.input_tokens` | tokens before the turn |
//! | `generate` | `gen_ai.usage.output_tokens` | tokens that the turn sampled |
//! | `generate`, `tool` | `gen_ai.operation.name` | `chat`, `execute_tool` |
//! | `turn` | `sinew.turn` | its number, from 1 |
//!
//! Invariants:
//! - Unknown values are left out: tokens of turns that were sampled in several pieces, for example.
//! - Ids follow from run and episode, so that an episode that is sent twice is one trace.
//! - Kept spans are bounded; those that do not fit are counted as lost.

use crate::otlp::{self, boolean, float, int, text};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use sinew_rollout::{EndedEpisode, LiveEpisode, Phase, PhaseSpan};
use std::collections::{BTreeMap, BTreeSet};

/// Episodes whose phases are kept at a time, and phases of one episode; what is above is lost.
const MAX_OPEN: usize = 20_000;
const MAX_PHASES: usize = 2000;
/// Attributes of the conventions for generative models.
const MODEL: &str = "gen_ai.request.model";
const SAMPLED: &str = "gen_ai.usage.output_tokens";
/// Seconds after the last phase of an episode of which it is not known whether it lives.
const QUIET_S: f64 = 120.0;

/// A complete episode: its phases, and its result; `None` if the result was lost or has not come.
pub(crate) type CompleteEpisode = (Vec<PhaseSpan>, Option<EndedEpisode>);

/// Collects phases until their episodes are complete.
#[derive(Debug, Default)]
pub(crate) struct Collector {
    /// Phases of episodes that are not complete, by id.
    open: BTreeMap<String, Vec<PhaseSpan>>,
    /// The ends of these episodes.
    ended: BTreeMap<String, EndedEpisode>,
    /// Phases that did not fit.
    pub(crate) lost: u64,
}

impl Collector {
    /// Takes phases that ended.
    pub(crate) fn add(&mut self, spans: &[PhaseSpan]) {
        for span in spans {
            let id = span.episode.as_str();
            if !self.open.contains_key(id) && self.open.len() >= MAX_OPEN {
                self.lost += 1;
                continue;
            }
            let phases = self.open.entry(id.to_owned()).or_default();
            if phases.len() < MAX_PHASES {
                phases.push(span.clone())
            } else {
                self.lost += 1
            }
        }
    }

    /// Adds the results of episodes.
    pub(crate) fn end(&mut self, ended: &[EndedEpisode]) {
        for episode in ended {
            let id = episode.episode.as_str();
            if self.open.contains_key(id) {
                self.ended.insert(id.to_owned(), episode.clone());
            }
        }
    }

    /// Returns complete episodes: those that are not live, and whose result is known or whose last phase
    /// ended long ago.
    pub(crate) fn complete(
        &mut self,
        live: &[LiveEpisode],
        now_unix_s: f64,
    ) -> Vec<CompleteEpisode> {
        let live: BTreeSet<&str> = live.iter().map(|l| l.episode.as_str()).collect();
        let done = |id: &String, phases: &Vec<PhaseSpan>| {
            let last = phases.last().map_or(0.0, |p| p.ended_unix_s);
            let known = self.ended.contains_key(id) || now_unix_s - last > QUIET_S;
            known && !live.contains(id.as_str())
        };
        let over: Vec<String> = self
            .open
            .iter()
            .filter(|(id, phases)| done(id, phases))
            .map(|(id, _)| id.clone())
            .collect();
        over.iter().filter_map(|id| self.take(id)).collect()
    }

    /// Removes an episode, and returns it with its result if that is known.
    fn take(&mut self, id: &str) -> Option<CompleteEpisode> {
        let phases = self.open.remove(id)?;
        Some((phases, self.ended.remove(id)))
    }

    /// All that is left, at the end of a run.
    pub(crate) fn rest(&mut self) -> Vec<CompleteEpisode> {
        let ids: Vec<String> = self.open.keys().cloned().collect();
        ids.iter().filter_map(|id| self.take(id)).collect()
    }
}

/// The request of OTLP with the traces of episodes.
pub(crate) fn request(
    service: &str,
    run: &str,
    model: &str,
    episodes: &[CompleteEpisode],
) -> ExportTraceServiceRequest {
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(otlp::resource(service, run)),
            scope_spans: vec![ScopeSpans {
                scope: Some(otlp::scope()),
                spans: episodes
                    .iter()
                    .flat_map(|e| episode(run, model, e))
                    .collect(),
                ..ScopeSpans::default()
            }],
            ..ResourceSpans::default()
        }],
    }
}

/// The spans of an episode, its own first.
fn episode(run: &str, model: &str, (phases, ended): &CompleteEpisode) -> Vec<Span> {
    let Some(first) = phases.first() else {
        return Vec::new();
    };
    let begin = |p: &PhaseSpan| p.ended_unix_s - p.seconds;
    let mut phases: Vec<&PhaseSpan> = phases.iter().collect();
    phases.sort_by(|a, b| begin(a).total_cmp(&begin(b)));
    let mut maker = Maker::new(run, first.episode.as_str());
    let from = begin(phases[0]);
    let to = phases.iter().map(|p| p.ended_unix_s).fold(from, f64::max);
    let root = maker.span("episode", &[], from, to);
    let mut spans = vec![root];
    let root_id = spans[0].span_id.clone();
    let (mut turn, mut number) = (None::<usize>, 0);
    // A turn that is sampled in pieces has several phases: its tokens cannot be assigned then.
    let turns = ended.as_ref().map_or(&[][..], |e| &e.turns);
    let generated = phases.iter().filter(|p| p.phase == Phase::Generate);
    let mut turns = if generated.count() == turns.len() {
        turns.iter()
    } else {
        [].iter()
    };
    for phase in phases {
        if phase.phase == Phase::Generate {
            number += 1;
            let mut span = maker.span("turn", &root_id, begin(phase), phase.ended_unix_s);
            span.attributes.push(int("sinew.turn", number));
            turn = Some(spans.len());
            spans.push(span);
        }
        let inside = matches!(phase.phase, Phase::Generate | Phase::Tool);
        let parent = turn.filter(|_| inside);
        let parent_id = parent.map_or(&root_id, |t| &spans[t].span_id).clone();
        let mut span = maker.span(
            name(phase.phase),
            &parent_id,
            begin(phase),
            phase.ended_unix_s,
        );
        if let Some(operation) = operation(phase.phase) {
            span.attributes
                .push(text("gen_ai.operation.name", operation));
        }
        if phase.phase == Phase::Generate {
            span.attributes.push(text(MODEL, model));
            let (before, sampled) = turns.next().copied().unzip();
            let counts = [("gen_ai.usage.input_tokens", before), (SAMPLED, sampled)];
            let known = counts.map(|(key, n)| Some(int(key, n? as i64)));
            span.attributes.extend(known.into_iter().flatten());
        }
        if let Some(t) = parent {
            let end = span.end_time_unix_nano;
            spans[t].end_time_unix_nano = spans[t].end_time_unix_nano.max(end);
        }
        spans.push(span);
    }
    let root = &mut spans[0].attributes;
    root.extend([int("sinew.turns", number), text(MODEL, model)]);
    if let Some(ended) = ended {
        let sampled: usize = ended.turns.iter().map(|t| t.1).sum();
        root.push(int(SAMPLED, sampled as i64));
        // An episode without a score has neither a reward of 0 nor a failure.
        if let Some(reward) = ended.reward {
            root.push(float("sinew.reward", reward));
            root.push(boolean("sinew.success", ended.success));
        }
    }
    spans
}

/// The name of a phase's span.
fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Boot => "start",
        Phase::Generate => "generate",
        Phase::Tool => "tool",
        Phase::Score => "score",
        Phase::Wait => "wait",
    }
}

/// Name of the conventions for generative models.
fn operation(phase: Phase) -> Option<&'static str> {
    match phase {
        Phase::Generate => Some("chat"),
        Phase::Tool => Some("execute_tool"),
        Phase::Boot | Phase::Score | Phase::Wait => None,
    }
}

/// The ids of an episode's trace and of its first span, which is the whole episode.
pub(crate) fn episode_ids(run: &str, episode: &str) -> (Vec<u8>, Vec<u8>) {
    let trace = trace_id(run, episode);
    let span = span_id(&trace, 1);
    (trace, span)
}

/// Whether an episode is in a share of all, by only its id.
pub(crate) fn chosen(episode: &str, share: f64) -> bool {
    let hash = blake3::hash(episode.as_bytes());
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&hash.as_bytes()[..4]);
    f64::from(u32::from_le_bytes(bytes)) < share * 4_294_967_296.0
}

fn trace_id(run: &str, episode: &str) -> Vec<u8> {
    let hash = blake3::hash(format!("{run}\n{episode}").as_bytes());
    hash.as_bytes()[..16].to_vec()
}

/// The id of the `number`th span of a trace, from 1.
fn span_id(trace: &[u8], number: u64) -> Vec<u8> {
    let mut seed = trace.to_vec();
    seed.extend_from_slice(&number.to_le_bytes());
    blake3::hash(&seed).as_bytes()[..8].to_vec()
}

/// Makes spans of one trace with ids that follow from run and episode, so that a trace that is sent twice is
/// the same trace.
struct Maker {
    trace: Vec<u8>,
    episode: String,
    made: u64,
}

impl Maker {
    /// The ids of one episode.
    fn new(run: &str, episode: &str) -> Self {
        Self {
            trace: trace_id(run, episode),
            episode: episode.to_owned(),
            made: 0,
        }
    }

    /// The next span.
    fn span(&mut self, name: &str, parent: &[u8], from_s: f64, to_s: f64) -> Span {
        self.made += 1;
        let nanos = |s: f64| (s.max(0.0) * 1e9) as u64;
        Span {
            trace_id: self.trace.clone(),
            span_id: span_id(&self.trace, self.made),
            parent_span_id: parent.to_vec(),
            name: name.to_owned(),
            kind: SpanKind::Internal as i32,
            start_time_unix_nano: nanos(from_s),
            end_time_unix_nano: nanos(to_s),
            attributes: vec![text("sinew.episode", &self.episode)],
            ..Span::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::EpisodeId;

    fn phase(episode: &str, phase: Phase, ended: f64, seconds: f64) -> PhaseSpan {
        PhaseSpan {
            episode: EpisodeId::new(episode),
            phase,
            ended_unix_s: ended,
            seconds,
        }
    }

    #[test]
    fn a_turn_holds_its_generation_and_its_tools() {
        let phases = vec![
            phase("e", Phase::Boot, 11.0, 1.0),
            phase("e", Phase::Generate, 13.0, 2.0),
            phase("e", Phase::Tool, 14.0, 1.0),
            phase("e", Phase::Generate, 16.0, 2.0),
            phase("e", Phase::Score, 17.0, 1.0),
        ];
        let ended = EndedEpisode {
            episode: EpisodeId::new("e"),
            reward: Some(0.5),
            success: true,
            turns: vec![(10, 3), (17, 2)],
        };
        let complete = (phases, Some(ended));
        let spans = episode("run", "hf:org/model", &complete);
        let names: Vec<&str> = spans.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "episode", "start", "turn", "generate", "tool", "turn", "generate", "score"
            ]
        );
        let parent = |child: usize| {
            let id = &spans[child].parent_span_id;
            spans.iter().position(|s| &s.span_id == id)
        };
        assert_eq!(parent(0), None);
        assert_eq!(
            [parent(1), parent(2), parent(3), parent(4)],
            [Some(0), Some(0), Some(2), Some(2)]
        );
        assert_eq!([parent(6), parent(7)], [Some(5), Some(0)]);
        assert_eq!(spans[2].end_time_unix_nano, spans[4].end_time_unix_nano);
        assert_eq!(spans[0].start_time_unix_nano, 10_000_000_000);
        let again = episode("run", "hf:org/model", &complete);
        assert_eq!(spans, again);
        let has = |span: usize, wanted| spans[span].attributes.contains(&wanted);
        assert!(has(0, float("sinew.reward", 0.5)) && has(0, boolean("sinew.success", true)));
        assert!(has(0, text(MODEL, "hf:org/model")) && has(0, int(SAMPLED, 5)));
        assert!(has(3, text(MODEL, "hf:org/model")) && has(3, int(SAMPLED, 3)));
        assert!(has(6, int("gen_ai.usage.input_tokens", 17)) && has(6, int(SAMPLED, 2)));
    }

    #[test]
    fn an_episode_without_a_score_has_no_reward() {
        let ended = EndedEpisode {
            episode: EpisodeId::new("e"),
            reward: None,
            success: false,
            turns: vec![(1, 1), (2, 1)],
        };
        let phases = vec![phase("e", Phase::Generate, 11.0, 1.0)];
        for ended in [Some(ended), None] {
            let spans = episode("run", "m", &(phases.clone(), ended));
            let named = |key: &str| {
                spans
                    .iter()
                    .flat_map(|s| &s.attributes)
                    .any(|a| a.key == key)
            };
            assert!(!named("sinew.reward") && !named("sinew.success"));
            // One phase of two turns: which tokens are its own is not known.
            assert!(!named("gen_ai.usage.input_tokens"));
        }
    }

    #[test]
    fn the_first_span_has_the_id_that_log_records_name() {
        let spans = episode(
            "run",
            "m",
            &(vec![phase("e", Phase::Boot, 11.0, 1.0)], None),
        );
        let ids = (spans[0].trace_id.clone(), spans[0].span_id.clone());
        assert_eq!(ids, episode_ids("run", "e"));
    }

    #[test]
    fn a_share_of_the_episodes_is_chosen_by_their_ids() {
        let count = |share| {
            (0..2000)
                .filter(|i| chosen(&format!("e{i}"), share))
                .count()
        };
        assert_eq!((count(0.0), count(1.0)), (0, 2000));
        assert!((400..600).contains(&count(0.25)), "{}", count(0.25));
    }

    #[test]
    fn an_episode_is_complete_when_it_is_not_live_any_more() {
        let mut collector = Collector::default();
        collector.add(&[
            phase("a", Phase::Tool, 1.0, 1.0),
            phase("b", Phase::Tool, 1.0, 1.0),
        ]);
        let live = [LiveEpisode {
            episode: EpisodeId::new("a"),
            phase: Phase::Generate,
            phase_s: 1.0,
            left_s: None,
        }];
        // The result of `b` is not known yet.
        assert!(collector.complete(&live, 2.0).is_empty());
        let ended = |id| EndedEpisode {
            episode: EpisodeId::new(id),
            reward: Some(1.0),
            success: true,
            turns: Vec::new(),
        };
        collector.end(&[ended("b"), ended("a"), ended("unknown")]);
        let complete = collector.complete(&live, 2.0);
        assert_eq!(complete.len(), 1);
        assert_eq!(complete[0].1.as_ref().unwrap().episode.as_str(), "b");
        assert_eq!(collector.complete(&[], 3.0).len(), 1);
        // One that was given up is complete when it was quiet for long.
        collector.add(&[phase("c", Phase::Tool, 1.0, 1.0)]);
        assert!(collector.complete(&[], 2.0).is_empty());
        assert_eq!(collector.complete(&[], 1000.0).len(), 1);
        assert!(collector.ended.is_empty());
        assert!(collector.rest().is_empty());
    }
}
