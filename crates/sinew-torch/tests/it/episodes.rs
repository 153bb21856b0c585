//! Groups of episodes as a run records them, with the inputs of all algorithms: several turns, equal states,
//! rewards of episodes and turns, counts of tools, masks, two temperatures, a branch and a truncated episode.

use sinew_algo::{Algorithm, AlgorithmConfig, AlgorithmKind, Column, Columns, RunFacts};
use sinew_train::{Policy, score_rows};
use sinew_types::{
    Component, Enforced, EpisodeEnd, EpisodeId, Format, FormatLaw, Grammar, GroupId, Limit,
    NO_PARENT, Node, NodeFormat, NodeId, Origin, Outcome, PolicyVersion, Provenance, RowMasks,
    TRACE_FORMAT_VERSION, TaskId, Timing, TokenId, TokenKind, Trace, VersionSpan,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Episodes of a group. GRPO-RoC trains half of them and needs two successes and two failures among these.
pub(crate) const GROUP: usize = 8;
/// Factor on the rewards of each group, so that their deviations differ.
const FACTORS: [f64; 3] = [1.0, 0.5, 2.0];
/// Rewards of a group; those above 1/2 are successes.
const REWARDS: [f64; GROUP] = [0.0, 1.0, 0.5, 1.0, 0.0, 0.25, 1.0, 0.0];
const VOCABULARY: u32 = 61;
/// Allowed tokens by turns; 1: no choice.
const ALLOWED: [u32; 4] = [4, 1, 40, VOCABULARY];
/// Tokens of a micro-batch when episodes are scored.
const SCORED: usize = 160;

/// Episodes by group, and the masks of their tokens.
pub(crate) struct Episodes {
    pub(crate) groups: Vec<Vec<Trace>>,
    pub(crate) columns: Columns,
}

impl Episodes {
    /// Episodes that `policy` sampled earlier: their log-probabilities differ from its present ones.
    pub(crate) fn sampled(policy: &mut dyn Policy) -> Self {
        let mut episodes = Self {
            groups: Vec::new(),
            columns: Columns::new(),
        };
        for group in 0..FACTORS.len() {
            let mut traces = Vec::new();
            for episode in 0..GROUP {
                let Graph { nodes, masks } = graph(group as u32, episode as u32);
                let trace = trace(group, episode, nodes);
                let columns = episodes.columns.entry(trace.episode.clone()).or_default();
                columns.masks = masks;
                traces.push(trace);
            }
            episodes.groups.push(traces);
        }
        episodes.record(policy);
        episodes
    }

    /// Writes log-probabilities into the traces. They are up to 0.25 from the policy's, so that ratios are on
    /// both sides of every clip, and every thirteenth is 2 below it, so that corrections reject some tokens.
    fn record(&mut self, policy: &mut dyn Policy) {
        let facts = RunFacts {
            group_size: GROUP,
            reference: false,
            teacher: false,
            critic: false,
            max_staleness: 0,
            updates_per_batch: 1,
        };
        let grpo = Algorithm::new(&AlgorithmConfig::new(AlgorithmKind::Grpo), &facts).unwrap();
        let checked = grpo.prepare(&self.groups);
        let draft = checked.unwrap().draft(&self.columns).unwrap();
        let scores = score_rows(policy, draft.rows(), SCORED).unwrap();
        let mut scored = Columns::new();
        draft
            .fill(&mut scored, Column::ProxLogprobs, &scores)
            .unwrap();
        let mut count = 0u32;
        for trace in self.groups.iter_mut().flatten() {
            let by_node = scored[&trace.episode].prox_logprobs.as_ref().unwrap();
            let nodes = trace.nodes.iter_mut().zip(by_node);
            for (node, own) in nodes.filter(|(node, _)| node.kind == TokenKind::Sampled) {
                for (i, own) in own.iter().enumerate() {
                    count += 1;
                    if node.forced(i) {
                        continue;
                    }
                    let near = 0.25 * (1.7 * count as f32).sin();
                    let off = if count.is_multiple_of(13) { -2.0 } else { near };
                    node.logprobs[i] = (own + off).min(0.0);
                }
            }
        }
    }
}

/// Nodes of an episode, and the masks of those that have an output format.
#[derive(Default)]
struct Graph {
    nodes: Vec<Node>,
    masks: BTreeMap<NodeId, RowMasks>,
}

impl Graph {
    fn add(&mut self, node: Node) -> NodeId {
        self.nodes.push(node);
        self.nodes.len() as NodeId - 1
    }

    /// Adds a prompt or an observation that shows `state`.
    fn given(&mut self, parent: NodeId, tokens: Vec<TokenId>, state: u32) -> NodeId {
        let (turn, kind) = match self.nodes.get(parent as usize) {
            Some(sampled) => (sampled.turn, TokenKind::Observation),
            None => (0, TokenKind::Prompt),
        };
        self.add(Node {
            state_hash: Some(u64::from(state)),
            ..Node::given(parent, turn, kind, tokens, Vec::new())
        })
    }

    /// Adds a turn, whose reward follows from its tokens.
    fn sampled(&mut self, parent: NodeId, tokens: Vec<TokenId>, temperature: f32) -> NodeId {
        let turn = self.nodes[parent as usize].turn + 1;
        self.add(Node {
            logprobs: vec![0.0; tokens.len()],
            versions: VersionSpan::whole(tokens.len(), PolicyVersion(0)),
            process_reward: 0.1 * f64::from(tokens[0] % 3),
            temperature,
            ..Node::given(parent, turn, TokenKind::Sampled, tokens, Vec::new())
        })
    }

    /// Gives a turn an output format that allows only some tokens.
    fn limit(&mut self, id: NodeId) {
        let node = &mut self.nodes[id as usize];
        let counts: Vec<u32> = (0..node.tokens.len()).map(|i| ALLOWED[i % 4]).collect();
        let mask = |(&token, &count): (&TokenId, &u32)| {
            let mut words = vec![0u32; 2];
            for i in 0..count {
                let id = (token + 11 * i) % VOCABULARY;
                words[id as usize / 32] |= 1 << (id % 32);
            }
            words
        };
        let masks: Vec<Vec<u32>> = node.tokens.iter().zip(&counts).map(mask).collect();
        let gathered = RowMasks::gather(2, masks.iter().map(|words| Some(words.as_slice())));
        node.format = Some(Box::new(NodeFormat {
            allowed: counts.clone(),
            masks: counts.iter().map(|&count| u64::from(count)).collect(),
            log_mass: vec![0.0; counts.len()],
            ..NodeFormat::new(FormatLaw {
                format: Arc::new(Format::new(Grammar::JsonObject)),
                enforced: Enforced::Masks {
                    implementation: "test".to_owned(),
                    environment: String::new(),
                    format: String::new(),
                },
            })
        }));
        self.masks.insert(id, gathered);
    }
}

/// Tokens that differ from seed to seed.
fn tokens(seed: u32, count: u32) -> Vec<TokenId> {
    let token = |i: u32| (seed * 17 + i * 7 + i * i * 3 + 3) % VOCABULARY;
    (0..count).map(token).collect()
}

/// The tokens of an episode. All share the beginning of the prompt, a group the rest of it, and pairs of
/// episodes the beginning of the first answer, which they sampled at different temperatures.
fn graph(group: u32, episode: u32) -> Graph {
    let mut graph = Graph::default();
    let mut prompt = tokens(0, 6);
    prompt.extend(tokens(group + 1, 4));
    let prompt = graph.given(NO_PARENT, prompt, 100 * group);
    let mut answer = tokens(20 + episode / 2, 2);
    answer.extend(tokens(30 + episode, 1 + episode % 3));
    let temperature = [0.7, 1.0][episode as usize % 2];
    let first = graph.sampled(prompt, answer, temperature);
    let state = 100 * group + 1 + episode % 3;
    let seen = graph.given(first, tokens(40 + episode % 3, 3), state);
    let second = graph.sampled(seen, tokens(50 + episode, 3 + episode % 2), 1.0);
    if episode.is_multiple_of(3) {
        graph.limit(second);
    }
    if episode % 4 == 3 {
        let more = graph.given(second, tokens(60, 2), 100 * group + 9);
        graph.sampled(more, tokens(70 + episode, 2), 0.7);
    }
    if episode == 1 {
        // A second path, with a turn of its own.
        graph.sampled(seen, tokens(80, 3), 1.0);
    }
    graph
}

fn trace(group: usize, episode: usize, nodes: Vec<Node>) -> Trace {
    let reward = REWARDS[(episode + 3 * group) % GROUP];
    let name = format!("g{group}");
    let counts = [
        ("tool_calls", 2.0),
        ("tool_errors", (episode % 3) as f64),
        ("format_penalty", 0.25 * (episode % 2) as f64),
    ];
    let environment = Component {
        name: ["shop", "desk"][group % 2].to_owned(),
        version: "1".to_owned(),
    };
    let is_cut = (group, episode) == (0, 6);
    Trace {
        format_version: TRACE_FORMAT_VERSION,
        episode: EpisodeId::new(format!("{name}-e{episode}")),
        group: GroupId::new(name.clone()),
        task: TaskId::new(name),
        task_kind: "kind".to_owned(),
        origin: Origin {
            purpose: "train".to_owned(),
            ..Origin::default()
        },
        provenance: Provenance {
            environment: Some(environment),
            ..Provenance::default()
        },
        nodes,
        outcome: Outcome {
            reward: reward * FACTORS[group],
            success: reward > 0.5,
            metrics: counts.map(|(name, count)| (name.to_owned(), count)).into(),
            ..Outcome::default()
        },
        end: if is_cut {
            EpisodeEnd::Truncated {
                limit: Limit::Turns,
            }
        } else {
            EpisodeEnd::Terminated
        },
        timing: Timing::default(),
        ignored: BTreeMap::new(),
    }
}
